"""A provider's own forward and backward, and the custom op that torch.compile sees as one node with
declared shapes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tinyllama.harness.declare.specs import Signature, shape_of, sizes_in
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.precision import compute_dtype

_COMPILED: ContextVar[bool] = ContextVar("compiled", default=False)


def shapes_are_fixed() -> bool:
    """Whether the forward pass that runs must save exactly the declared shapes: the compiler reads
    memory by them. In eager mode a provider may save a tensor in another one."""
    return _COMPILED.get()


@dataclass(frozen=True)
class Passes:
    """The passes of a provider that is a class, called with arguments by their places, and their
    custom op: a real version, which converts and copies what the compiler may not see, and a fake
    one, which has the declared shapes alone. `tinyllama.harness.declare.autograd` says what each
    part means."""

    op: Signature
    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Mapping[str, torch.Tensor | None]]
    keep: tuple[str, ...]
    saved: dict[str, Any]
    reads: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    replays: bool = False

    def as_read(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with inputs in the layouts that the kernels read."""
        if not self.reads:
            return args
        read = list(args)
        for place, name in enumerate(self.op.inputs):
            if name in self.reads:
                read[place] = self.reads[name](read[place])
        return tuple(read)

    def run_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        inputs, params = self.split(args)
        results = several(self.forward(*inputs, **params))
        expected = len(self.op.outputs) + len(self.saved)
        if len(results) != expected:
            text = f"returned {len(results)} tensors, declared are {expected} (outputs, then saved)"
            raise TypeError(f"{self.op.name}-{self.name}: forward {text}")
        return results

    def run_backward(self, grads: Any, saved: Any, params: Any, needs_grad: Any) -> tuple[Any, ...]:
        needs = {name for name, needed in zip(self.op.inputs, needs_grad, strict=False) if needed}
        of_keep = dict(zip(self.keep, saved, strict=False))
        rest = dict(zip(self.saved, saved[len(self.keep) :], strict=True))
        named = dict(zip(self.op.params, params, strict=True))
        gradients = self.backward(grads, of_keep, rest, needs, **named)
        if lost := sorted(name for name in needs if gradients.get(name) is None):
            text = f"backward returned no gradient for {lost}"
            raise RuntimeError(f"{self.op.name}-{self.name}: {text}")
        return tuple(map(gradients.get, self.op.inputs))

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(self.op.inputs)
        return args[:n], dict(zip(self.op.params, args[n:], strict=True))

    def tensors_to_keep(
        self, inputs: tuple[Any, ...], results: tuple[Any, ...]
    ) -> list[torch.Tensor]:
        """The tensors of ``keep``, among the inputs, and the outputs that come after them."""
        named = inputs + results
        return [named[place] for place in self._kept_places]

    @cached_property
    def without_elements(self) -> int:
        """How many saved tensors, the last ones, are read for their shape alone: of calls of one
        signature they are alike, so that a repeated one keeps none."""
        axes = [saved.axes for saved in self.saved.values()]
        having = [i for i, of in enumerate(axes, 1) if "0" not in of]
        return len(axes) - max(having, default=0) if self.replays else 0

    @cached_property
    def _kept_places(self) -> list[int]:
        """Where the kept tensors are among inputs and outputs."""
        names = (*self.op.inputs, *self.op.outputs)
        return [names.index(name) for name in self.keep]

    # -- for the compiler

    @cached_property
    def custom_op(self) -> Callable[..., Any]:
        """The same as a custom op with a fake version, for torch.compile and opcheck."""
        qualified = f"tinyllama::{self.op.name}_{self.name}"
        tensors = ", ".join(f"Tensor {name}" for name in self.op.inputs)
        params = "".join(f", {_schema_type(v)} {k}" for k, v in self.op.params.items())
        results = ", ".join(["Tensor"] * (len(self.op.outputs) + len(self.saved)))
        forward = torch.library.custom_op(
            qualified,
            lambda *args: _bare(separate(self.compiled_forward(*args), args)),
            mutates_args=(),
            schema=f"({tensors}{params}) -> ({results})",
        )
        forward.register_fake(lambda *args: _bare(self.fake_forward(*args)))

        grads = ", ".join(f"Tensor? g{i}" for i in range(len(self.op.outputs)))
        saved = "".join(f", Tensor s{i}" for i in range(len(self.keep) + len(self.saved)))
        names = self.op.differentiable
        backward = torch.library.custom_op(
            f"{qualified}_backward",
            lambda *args: _bare(separate(self.split_backward(args), args)),
            mutates_args=(),
            schema=f"({grads}{saved}{params}) -> ({', '.join(['Tensor'] * len(names))})",
        )

        backward.register_fake(lambda *args: _bare(self.fake_backward(*args)))

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.params = inputs[len(self.op.inputs) :]
            ctx.set_materialize_grads(False)
            results = several(output)
            keep = self.tensors_to_keep(inputs[: len(self.op.inputs)], results)
            ctx.save_for_backward(*keep, *results[len(self.op.outputs) :])

        def autograd_backward(ctx: Any, *grads: Any) -> Any:
            used = grads[: len(self.op.outputs)]
            results = backward(*used, *ctx.saved_tensors, *ctx.params)
            gradients = dict(zip(names, several(results), strict=True))
            return (*(gradients.get(name) for name in self.op.inputs), *[None] * len(ctx.params))

        forward.register_autograd(autograd_backward, setup_context=setup_context)
        return forward

    def fake_backward(self, *args: Any) -> list[torch.Tensor]:
        """Empty gradients of the declared shapes."""
        tensors = self._tensors(args)
        params = args[len(args) - len(self.op.params) :]
        sizes = self.sizes(tensors, dict(zip(self.op.params, params, strict=True)))
        first = next(iter(tensors.values()))
        return [
            first.new_empty(shape_of(self.op.inputs[name].axes, sizes), dtype=dtype)
            for name, dtype in self._gradient_dtypes(tensors).items()
        ]

    def split_backward(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        n_grads, names = len(self.op.outputs), [*self.keep, *self.saved]
        needs_grad = [tensor.grad for tensor in self.op.inputs.values()]
        tensors, params = args[n_grads:][: len(names)], args[n_grads + len(names) :]
        # A compiled call keeps its inputs as they came.
        saved = tuple(
            self.reads[name](tensor) if name in self.reads else tensor
            for name, tensor in zip(names, tensors, strict=True)
        )
        gradients = self.run_backward(args[:n_grads], saved, params, needs_grad)
        by_name = dict(zip(self.op.inputs, gradients, strict=False))
        dtypes = self._gradient_dtypes(self._tensors(args))
        return [by_name[name].to(dtype) for name, dtype in dtypes.items()]

    def _tensors(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors that a custom op's backward pass gets, by name."""
        names = [*self.op.outputs, *self.keep, *self.saved]
        return {name: x for name, x in zip(names, args, strict=False) if x is not None}

    def _gradient_dtypes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
        """The dtypes of compiled gradients: those of the inputs that are kept, else that of the
        first gradient; autograd converts them."""
        first = next(iter(tensors.values()))
        return {name: tensors.get(name, first).dtype for name in self.op.differentiable}

    def output_dtypes(self, args: Sequence[Any]) -> list[torch.dtype]:
        """The dtypes of compiled outputs: the reference's, if the dtypes of the inputs differ."""
        inputs, params = self.split(tuple(args))
        pairs = zip(inputs, self.op.inputs.values(), strict=True)
        if len({x.dtype for x, declared in pairs if not declared.dtype}) > 1:
            shapes = [torch.empty_like(x, device="meta") for x in inputs]
            op: Any = self.op  # an Op, which this file cannot import
            with contextlib.suppress(RuntimeError):  # the reference takes no mixed dtypes
                results = several(op["eager"].call(*shapes, **params))
                return [result.dtype for result in results]
        return [declared.dtype_beside(inputs[0]) for declared in self.op.outputs.values()]

    def compiled_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        before = _COMPILED.set(True)
        try:
            results = self.run_forward(*self.as_read(args))
        finally:
            _COMPILED.reset(before)
        dtypes = self.output_dtypes(args)
        for name, result, dtype in zip(self.op.outputs, results, dtypes, strict=False):
            if result.dtype != dtype:
                text = f"{name} has dtype {result.dtype}, the compiler was told {dtype}"
                fix = "give a compiled call inputs of one dtype"
                raise ValueError(f"{self.op.name}-{self.name}: {text}: {fix}")
        return results

    def fake_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Empty tensors of the declared shapes; what the compiler traces."""
        inputs, params = self.split(args)
        sizes = self.sizes(dict(zip(self.op.inputs, inputs, strict=True)), params)
        saved = [tensor.dtype_beside(inputs[0]) for tensor in self.saved.values()]
        tensors = [*self.op.outputs_for(params).values(), *self.saved.values()]
        return tuple(
            inputs[0].new_empty(shape_of(tensor.axes, sizes), dtype=dtype)
            for tensor, dtype in zip(tensors, [*self.output_dtypes(args), *saved], strict=True)
        )

    def sizes(self, tensors: dict[str, torch.Tensor], params: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of the dimensions that these named tensors have, as of `Signature.sizes_of`."""
        declared = {**self.op.inputs, **self.op.outputs_for(params), **self.saved}
        return sizes_in(
            axis_and_size
            for name, tensor in tensors.items()
            for axis_and_size in self.op.sizes_of(declared[name], tensor.shape) or ()
        )


def cast_by_autocast(args: Sequence[Any]) -> list[Any]:
    """Floating-point tensors in autocast's dtype, where it is on: what the compiler sees of an
    opaque op has one dtype. Uncompiled, a provider decides for itself what it computes in."""
    return [
        arg.to(compute_dtype(arg)) if isinstance(arg, torch.Tensor) and arg.requires_grad else arg
        for arg in args
    ]


def separate(results: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of an operator that the compiler sees: it reads them as contiguous ones, and none
    may share memory with another one or an argument. One that breaks either rule is
    copied. Uncompiled, such results stay views."""
    taken = {memory_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
    copies = []
    for result in results:
        dense = result.contiguous()
        if memory_of(dense) in taken:
            dense = dense.clone()
        taken.add(memory_of(dense))
        copies.append(dense)
    return copies


def _bare(results: Sequence[torch.Tensor]) -> Any:
    """What an operator with these results returns: one of them alone, without a tuple."""
    return tuple(results) if len(results) > 1 else results[0]


def _schema_type(value: Any) -> str:
    """Of a parameter with this default; an integer may be None, too."""
    kinds = {bool: "bool", int: "int?", float: "float", str: "str", type(None): "int?"}
    return kinds[type(value)]


def several(results: Any) -> tuple[torch.Tensor, ...]:
    """The results of an operator as a tuple, one alone too."""
    return results if isinstance(results, tuple) else (results,)
