"""Saboteurs: right implementations changed in one thing, and the check that must find each.

The faults are those that real kernels had and those by which benchmarks were cheated. A fault of
the calling (strides, aliasing, streams, caches) is put on every op that it fits; one of the
arithmetic belongs to its op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.correct.checks.accuracy import (
    EXTREMES,
    GRADIENTS,
    LAYOUTS,
    OUTPUTS,
    TOUCHED,
    UNWRITTEN,
    UPSTREAMS,
)
from tinyllama.ops import OPS

Call = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]

EAGER = {name: op["eager"].call for name, op in OPS.items()}


@dataclass(frozen=True)
class Saboteur:
    """A wrong implementation of an op.

    make: gives the implementation anew, with the state that it keeps between calls.
    checks: those that find it. result: what they must name, where that is one result.
    reference: as the reference of its op it is found by independent code as well.
    """

    op: Op
    fault: str
    make: Callable[[], Call]
    checks: tuple[str, ...]
    result: str = ""
    reference: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict)

    def provider(self) -> Provider:
        return Provider(
            self.op.name, "saboteur", self.make(), **{"dtypes": self.op.dtypes, **self.traits}
        )

    def __str__(self) -> str:
        return f"{self.op.name}-{self.fault}"


# -- how a fault is put on an implementation --------------------------------------------------


def on_input(op: Op, name: str, change: Change) -> Call:
    """The reference with one input changed on its way in."""
    index, reference = list(op.inputs).index(name), EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        changed = [change(arg) if i == index else arg for i, arg in enumerate(args)]
        return reference(*changed, **params)

    return call


def on_output(op: Op, name: str, change: Change) -> Call:
    """The reference with one output changed on its way out."""
    index = list(op.outputs).index(name)
    return on_outputs(op, lambda i, output: change(output) if i == index else output)


def on_outputs(op: Op, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Call:
    """The reference with all its outputs changed, by their place."""
    reference = EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        results = reference(*args, **params)
        if not isinstance(results, tuple):
            return change(0, results)
        return tuple(change(i, result) for i, result in enumerate(results))

    return call


def with_params(op: Op, **forced: Any) -> Call:
    """The reference, deaf to some of its parameters."""
    reference = EAGER[op.name]
    return lambda *args, **params: reference(*args, **{**params, **forced})


class _Upstream(torch.autograd.Function):
    """Nothing forward; backward, the gradient as a function makes it of the one that comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Change) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.change(grads[0]), None


def on_upstream(op: Op, change: Change) -> Call:
    """The reference, whose backward sees the gradients of its outputs changed."""
    return on_outputs(op, lambda _, output: _Upstream.apply(output, change))


def gradient_times(factor: float) -> Change:
    """The same value with a scaled gradient."""
    return lambda x: x.detach() + (x - x.detach()) * factor


# -- faults of the calling, on any op ---------------------------------------------------------


def as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that ignores strides; zeros beyond the memory's end."""
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    flat = flat[x.storage_offset() :][: x.numel()]
    padded = x.new_zeros(x.numel())
    padded[: len(flat)] = flat
    return padded.view(x.shape)


def last_row_forgotten(x: torch.Tensor) -> torch.Tensor:
    """A tail that nothing wrote: the last element of the last row stays as allocated."""
    written = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    written.view(-1)[:-1] = x.reshape(-1)[:-1]
    return written


def zeroed_after_use(gradient: torch.Tensor) -> torch.Tensor:
    used = gradient.clone()
    gradient.zero_()
    return used


def scratch_overrun(x: torch.Tensor) -> torch.Tensor:
    """One element is written behind a buffer, where the memory behind it is ours."""
    scratch = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    end = scratch.storage_offset() + scratch.numel()
    if scratch.untyped_storage().nbytes() > end * scratch.itemsize:
        scratch.as_strided((1,), (1,), end).fill_(0)
    return x


class Lazy(torch.Tensor):
    """A tensor of another type, which could compute its values when they are looked at."""


def input_overwritten(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        results = EAGER[op.name](*args, **params)
        args[0].data.mul_(2)
        return results

    return call


def saved_overwritten(op: Op) -> Callable[[], Call]:
    """The first backward works, and destroys what a second one needs."""

    def make() -> Call:
        def change(factor: torch.Tensor) -> Change:
            def once(gradient: torch.Tensor) -> torch.Tensor:
                used = gradient * factor
                factor.zero_()
                return used

            return once

        return on_outputs(
            op, lambda _, output: _Upstream.apply(output, change(torch.ones_like(output).detach()))
        )

    return make


def cached_by_address(op: Op) -> Callable[[], Call]:
    def make() -> Call:
        known: dict[Any, Any] = {}

        def call(*args: Any, **params: Any) -> Any:
            if torch.is_grad_enabled():
                return EAGER[op.name](*args, **params)
            key = tuple((arg.data_ptr(), arg.shape) for arg in args)
            if key not in known:
                known[key] = EAGER[op.name](*args, **params)
            return known[key]

        return call

    return make


def right_at_first(op: Op) -> Callable[[], Call]:
    """Right whenever it meets a shape for the first time."""

    def make() -> Call:
        met: set[Any] = set()

        def change(_: int, output: torch.Tensor) -> torch.Tensor:
            key = (output.shape, output.dtype, torch.is_grad_enabled())
            first = key not in met
            met.add(key)
            return output if first else output * 1.5

        return on_outputs(op, change)

    return make


def output_memory_reused(op: Op) -> Callable[[], Call]:
    def make() -> Call:
        kept: dict[Any, torch.Tensor] = {}

        def change(place: int, output: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                return output
            buffer = kept.setdefault((place, output.shape, output.dtype), output)
            return buffer.copy_(output)

        return on_outputs(op, change)

    return make


def not_reproducible(op: Op) -> Callable[[], Call]:
    def make() -> Call:
        generator = torch.Generator().manual_seed(0)

        def change(_: int, output: torch.Tensor) -> torch.Tensor:
            last_place = torch.finfo(output.dtype).eps / 2
            noise = torch.randn(output.shape, generator=generator).to(output)
            return output * (1 + last_place * noise)

        return on_outputs(op, change)

    return make


class _WithoutSecond(torch.autograd.Function):
    """Gradients of an op made aside, which no graph connects with its inputs."""

    @staticmethod
    def forward(ctx: Any, op: Op, params: Any, *args: Any) -> Any:
        with torch.enable_grad():
            wanted = [
                arg.detach().requires_grad_(name in op.differentiable)
                for name, arg in zip(op.inputs, args, strict=True)
            ]
            results = EAGER[op.name](*wanted, **params)
        ctx.graph = (results if isinstance(results, tuple) else (results,), wanted)
        detached = tuple(result.detach() for result in ctx.graph[0])
        return detached if isinstance(results, tuple) else detached[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        results, wanted = ctx.graph
        pairs = [(r, g.detach()) for r, g in zip(results, grads, strict=True) if g is not None]
        leaves = [leaf for leaf in wanted if leaf.requires_grad]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            leaves,
            [gradient for _, gradient in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        by_leaf = iter(found)
        named = [next(by_leaf) if leaf.requires_grad else None for leaf in wanted]
        return None, None, *named


def detached_second_order(op: Op) -> Call:
    return lambda *args, **params: _WithoutSecond.apply(op, params, *args)


def under(condition: Callable[[], bool]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda _, output: output * 1.05 if condition() else output


def graph_broken(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        torch._dynamo.graph_break()
        return EAGER[op.name](*args, **params)

    return call


def garbage_for_no_rows(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        if args[0].numel():
            return EAGER[op.name](*args, **params)
        last = _Upstream.apply(args[-1], lambda gradient: gradient + 1)
        return EAGER[op.name](*args[:-1], last, **params)

    return call


def of_calling(op: Op) -> Iterator[Saboteur]:
    """The faults that an op with gradients can have, whatever it computes."""

    def of(fault: str, call: Call, *checks: str, **more: Any) -> Saboteur:
        return Saboteur(op, fault, lambda: call, checks, **more)

    tensors = any(output.axes for output in op.outputs.values())
    first = next(iter(op.differentiable))
    if tensors:
        call = on_upstream(op, as_if_contiguous)
        yield of("strides_of_the_upstream_ignored", call, UPSTREAMS)
        one = on_upstream(op, lambda g: g.flatten()[:1].expand(g.numel()).view(g.shape))
        yield of("one_element_of_the_upstream", one, GRADIENTS)
        overrun = on_outputs(op, lambda _, output: scratch_overrun(output))
        yield of("written_beyond_a_buffer", overrun, "out of bounds")
    if len(op.inputs[first].axes) > 1:

        def misread(x: torch.Tensor) -> torch.Tensor:
            return x + (as_if_contiguous(x.detach()) - x).detach()

        yield of("strides_of_an_input_ignored", on_input(op, first, misread), LAYOUTS)
    yield of("upstream_dropped", on_upstream(op, torch.ones_like), GRADIENTS)
    # Not all ones: of a softmax the gradient would be 0, which is in proportion.
    dropped = on_upstream(op, lambda g: torch.linspace(1, 2, g.numel()).view(g.shape).to(g))
    yield of("upstream_dropped_at_any_scale", dropped, "scaled upstream")
    yield of("upstream_overwritten", on_upstream(op, zeroed_after_use), TOUCHED)
    yield of("upstream_overwritten_for_another", on_upstream(op, zeroed_after_use), "two consumers")
    yield of("input_overwritten", input_overwritten(op), TOUCHED)
    yield Saboteur(op, "saved_overwritten", saved_overwritten(op), ("backward twice",))
    yield Saboteur(op, "cached_by_address", cached_by_address(op), ("fresh contents",))
    yield Saboteur(op, "right_at_first", right_at_first(op), ("fresh contents",))
    yield Saboteur(op, "output_memory_reused", output_memory_reused(op), ("fresh contents",))
    yield Saboteur(op, "not_reproducible", not_reproducible(op), ("determinism",))
    lazy = on_outputs(op, lambda _, output: output.as_subclass(Lazy))
    yield of("a_tensor_of_another_type", lazy, OUTPUTS)
    yield of("nan", on_outputs(op, lambda _, output: output * float("nan")), OUTPUTS)
    yield of("zeros", on_outputs(op, lambda _, output: output * 0), OUTPUTS)
    autocast = on_outputs(op, under(lambda: torch.is_autocast_enabled("cpu")))
    yield of("wrong_under_autocast", autocast, "autocast")
    compiled = on_outputs(op, under(torch.compiler.is_compiling))
    yield of("wrong_when_compiled", compiled, "compiled")
    yield of("graph_broken", graph_broken(op), "compiled")
    second = {"double_backward": False}
    yield of("second_order", detached_second_order(op), "second derivative", traits=second)
    if list(op.inputs)[-1] in op.differentiable and op.inputs[list(op.inputs)[-1]].axes[0] not in (
        op.inputs[first].axes
    ):
        yield of("garbage_for_no_rows", garbage_for_no_rows(op), "empty batch")


# -- faults of the arithmetic -----------------------------------------------------------------


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Ten bits of mantissa, as a matrix unit reads float32 when nobody says otherwise."""
    if x.dtype is not torch.float32:
        return x
    cut = ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return x + (cut - x.detach())


def of_values(op: Op) -> Iterator[Saboteur]:
    """Results off by a little, gradients that are absent, parameters that are ignored."""

    def of(fault: str, call: Call, check: str, result: str, **more: Any) -> Saboteur:
        return Saboteur(op, fault, lambda: call, (check,), result, **more)

    for name in op.differentiable:
        gradient = f"grad {name}"
        deleted = on_input(op, name, torch.Tensor.detach)
        yield of(f"grad_{name}_deleted", deleted, GRADIENTS, "", reference=True)
        for fault, factor in (("zero", 0.0), ("times_1.01", 1.01)):
            call = on_input(op, name, gradient_times(factor))
            yield of(f"grad_{name}_{fault}", call, GRADIENTS, gradient, reference=True)
    for name, output in op.outputs.items():
        scaled = on_output(op, name, lambda x: x * 1.01)
        yield of(f"{name}_times_1.01", scaled, OUTPUTS, name, reference=True)
        if output.axes:
            call = on_output(op, name, last_row_forgotten)
            yield of(f"{name}_tail_forgotten", call, UNWRITTEN, name)
    if "eps" in op.params:
        dropped = with_params(op, eps=0.0)
        if op.mutated:
            yield of("epsilon_dropped", dropped, OUTPUTS, "param", reference=True)
        else:
            yield Saboteur(
                op, "epsilon_dropped", lambda: dropped, (OUTPUTS, GRADIENTS, EXTREMES), "", True
            )
    products = [n for n in op.differentiable if len(op.inputs[n].axes) > 1]
    if op.name in ("attention", "qkv", "swiglu", "linear_cross_entropy", "block"):
        call = on_input(op, products[-1], to_tf32)
        yield Saboteur(op, "products_in_tf32", lambda: call, (OUTPUTS, GRADIENTS))
