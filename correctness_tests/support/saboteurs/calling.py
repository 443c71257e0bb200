"""Faults of the calling, on any op with gradients: strides, aliasing, caches, the framework."""

from collections.abc import Callable
from typing import Any

import torch

from correctness_tests.support.saboteurs.base import (
    EAGER,
    Call,
    Change,
    on_any_op,
    on_each_output,
    on_input,
    on_outputs,
    on_upstream,
    with_upstream,
)
from tinyllama.harness import Op
from tinyllama.harness.correct.checks.accuracy import (
    GRADIENTS,
    LAYOUTS,
    OUTPUTS,
    TOUCHED,
    UPSTREAMS,
    WANTED,
)
from tinyllama.harness.declare.autograd import several

# -- strides and bounds ---------------------------------------------------------------------------


def has_tensor_output(op: Op) -> bool:
    return any(output.axes for output in op.outputs.values())


def first_leaf(op: Op) -> str:
    """The first input that has a gradient."""
    return op.differentiable[0]


def as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that ignores strides; zeros beyond the memory's end."""
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    flat = flat[x.storage_offset() :][: x.numel()]
    padded = x.new_zeros(x.numel())
    padded[: len(flat)] = flat
    return padded.view(x.shape)


@on_any_op(LAYOUTS, fits=lambda op: len(op.inputs[first_leaf(op)].axes) > 1)
def strides_of_an_input_ignored(op: Op) -> Call:
    def misread(x: torch.Tensor) -> torch.Tensor:
        return x + (as_if_contiguous(x.detach()) - x).detach()

    return on_input(op, first_leaf(op), misread)


@on_any_op(UPSTREAMS, fits=has_tensor_output)
def strides_of_the_upstream_ignored(op: Op) -> Call:
    return on_upstream(op, as_if_contiguous)


@on_any_op(GRADIENTS, fits=has_tensor_output)
def one_element_of_the_upstream(op: Op) -> Call:
    return on_upstream(op, lambda g: g.flatten()[:1].expand(g.numel()).view(g.shape))


@on_any_op("out of bounds", fits=has_tensor_output)
def written_beyond_a_buffer(op: Op) -> Call:
    """One element is written behind a buffer, where the memory behind it is ours."""

    def overrun(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        end = scratch.storage_offset() + scratch.numel()
        if scratch.untyped_storage().nbytes() > end * scratch.itemsize:
            scratch.as_strided((1,), (1,), end).fill_(0)
        return x

    return on_each_output(op, overrun)


# -- upstream gradients and inputs that are dropped or overwritten --------------------------------


@on_any_op(GRADIENTS)
def upstream_dropped(op: Op) -> Call:
    return on_upstream(op, torch.ones_like)


@on_any_op("scaled upstream")
def upstream_dropped_at_any_scale(op: Op) -> Call:
    """Not for all ones: the gradient of a softmax would be 0, which is in proportion."""
    return on_upstream(op, lambda g: torch.linspace(1, 2, g.numel()).view(g.shape).to(g))


def zeroed_after_use(gradient: torch.Tensor) -> torch.Tensor:
    used = gradient.clone()
    gradient.zero_()
    return used


@on_any_op(TOUCHED)
def upstream_overwritten(op: Op) -> Call:
    return on_upstream(op, zeroed_after_use)


@on_any_op("two consumers")
def upstream_overwritten_for_another(op: Op) -> Call:
    return on_upstream(op, zeroed_after_use)


@on_any_op(TOUCHED)
def input_overwritten(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        results = EAGER[op.name](*args, **params)
        args[0].data.mul_(2)
        return results

    return call


@on_any_op("backward twice")
def saved_overwritten(op: Op) -> Call:
    """The first backward is right, and destroys what a second one needs."""

    def destroying(factor: torch.Tensor) -> Change:
        return lambda gradient: gradient * zeroed_after_use(factor)

    return on_each_output(
        op, lambda output: with_upstream(output, destroying(torch.ones_like(output).detach()))
    )


# -- state that is kept between calls -------------------------------------------------------------


@on_any_op("fresh contents")
def cached_by_address(op: Op) -> Call:
    known: dict[Any, Any] = {}

    def call(*args: Any, **params: Any) -> Any:
        if torch.is_grad_enabled():
            return EAGER[op.name](*args, **params)
        key = tuple((arg.data_ptr(), arg.shape) for arg in args)
        if key not in known:
            known[key] = EAGER[op.name](*args, **params)
        return known[key]

    return call


@on_any_op("fresh contents")
def right_at_first(op: Op) -> Call:
    """Right whenever it meets a shape for the first time."""
    met: set[Any] = set()

    def change(output: torch.Tensor) -> torch.Tensor:
        key = (output.shape, output.dtype, torch.is_grad_enabled())
        first = key not in met
        met.add(key)
        return output if first else output * 1.5

    return on_each_output(op, change)


@on_any_op("fresh contents")
def output_memory_reused(op: Op) -> Call:
    buffers: dict[Any, torch.Tensor] = {}

    def change(place: int, output: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return output
        buffer = buffers.setdefault((place, output.shape, output.dtype), output)
        return buffer.copy_(output)

    return on_outputs(op, change)


@on_any_op("determinism")
def not_reproducible(op: Op) -> Call:
    generator = torch.Generator().manual_seed(0)

    def change(output: torch.Tensor) -> torch.Tensor:
        last_place = torch.finfo(output.dtype).eps / 2
        noise = torch.randn(output.shape, generator=generator).to(output)
        return output * (1 + last_place * noise)

    return on_each_output(op, change)


# -- outputs that are nothing like the right ones -------------------------------------------------


class Lazy(torch.Tensor):
    """A tensor of another type, which could compute its values when they are read."""


@on_any_op(OUTPUTS)
def a_tensor_of_another_type(op: Op) -> Call:
    return on_each_output(op, lambda output: output.as_subclass(Lazy))


@on_any_op(OUTPUTS)
def nan(op: Op) -> Call:
    return on_each_output(op, lambda output: output * float("nan"))


@on_any_op(OUTPUTS)
def zeros(op: Op) -> Call:
    return on_each_output(op, lambda output: output * 0)


# -- the framework around a call ------------------------------------------------------------------


def wrong_if(op: Op, condition: Callable[[], bool]) -> Call:
    return on_each_output(op, lambda output: output * 1.05 if condition() else output)


@on_any_op("autocast")
def wrong_under_autocast(op: Op) -> Call:
    return wrong_if(op, lambda: torch.is_autocast_enabled("cpu"))


@on_any_op("fresh contents")
def wrong_in_inference_mode(op: Op) -> Call:
    return wrong_if(op, torch.is_inference_mode_enabled)


@on_any_op("compiled")
def wrong_when_compiled(op: Op) -> Call:
    return wrong_if(op, torch.compiler.is_compiling)


@on_any_op("compiled")
def graph_broken(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        torch._dynamo.graph_break()
        return EAGER[op.name](*args, **params)

    return call


class _WithoutSecond(torch.autograd.Function):
    """Gradients of an op, computed apart: no graph connects them with its inputs."""

    @staticmethod
    def forward(ctx: Any, op: Op, params: Any, *args: Any) -> Any:
        with torch.enable_grad():
            wanted = [
                arg.detach().requires_grad_(name in op.differentiable)
                for name, arg in zip(op.inputs, args, strict=True)
            ]
            results = EAGER[op.name](*wanted, **params)
        ctx.graph = (several(results), wanted)
        detached = tuple(result.detach() for result in ctx.graph[0])
        return detached if isinstance(results, tuple) else detached[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        results, wanted = ctx.graph
        pairs = [(r, g.detach()) for r, g in zip(results, grads, strict=True) if g is not None]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                [leaf for leaf in wanted if leaf.requires_grad],
                [gradient for _, gradient in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        )
        return None, None, *(next(found) if leaf.requires_grad else None for leaf in wanted)


@on_any_op("second derivative", double_backward=False)
def second_order(op: Op) -> Call:
    """Second derivatives are silently detached."""
    return lambda *args, **params: _WithoutSecond.apply(op, params, *args)


def ends_with_a_weight(op: Op) -> bool:
    """Whether the last input has a gradient, and no axis of the batch."""
    name, tensor = list(op.inputs.items())[-1]
    return name in op.differentiable and tensor.axes[0] not in op.inputs[first_leaf(op)].axes


@on_any_op("empty batch", fits=ends_with_a_weight)
def garbage_for_no_rows(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        if args[0].numel():
            return EAGER[op.name](*args, **params)
        last = with_upstream(args[-1], lambda gradient: gradient + 1)
        return EAGER[op.name](*args[:-1], last, **params)

    return call


@on_any_op(WANTED, fits=lambda op: len(op.differentiable) > 1)
def wrong_if_one_gradient_is_wanted(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        alone = sum(arg.requires_grad for arg in args if isinstance(arg, torch.Tensor)) == 1
        changed = [with_upstream(a, lambda g: g * 2) if a.requires_grad else a for a in args]
        return EAGER[op.name](*(changed if alone else args), **params)

    return call


@on_any_op(LAYOUTS, fits=lambda op: same_axes_first(op))
def strides_of_another_input(op: Op) -> Call:
    def call(*args: Any, **params: Any) -> Any:
        first, second, *rest = args
        plain = second.detach()
        misread = plain.as_strided(plain.shape, first.stride())
        return EAGER[op.name](first, second + (misread - plain), *rest, **params)

    return call


def same_axes_first(op: Op) -> bool:
    """Whether the first two inputs have the same axes."""
    first, *rest = [tensor.axes for tensor in op.inputs.values()]
    return bool(rest) and len(first) > 1 and first == rest[0]
