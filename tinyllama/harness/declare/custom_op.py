"""A provider's passes as a custom op, which torch.compile sees as one node with declared shapes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tinyllama.harness.declare.passes import Passes, several
from tinyllama.harness.declare.specs import add_derived, shape_of
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.precision import compute_dtype

_COMPILED: ContextVar[bool] = ContextVar("compiled", default=False)


def shapes_are_fixed() -> bool:
    """Whether the forward pass that runs must save exactly the declared shapes: the compiler reads
    memory by them. In eager mode a provider may save a tensor in another one."""
    return _COMPILED.get()


@dataclass(frozen=True)
class CompiledPasses(Passes):
    """A provider's passes and their custom op: a real version, which converts and copies what the
    compiler may not see, and a fake one, which has the declared shapes alone."""

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
        kept = "".join(f", Tensor s{i}" for i in range(len(self.keep) + len(self.saved)))
        wanted = self.op.differentiable
        backward = torch.library.custom_op(
            f"{qualified}_backward",
            lambda *args: _bare(separate(self.split_backward(args), args)),
            mutates_args=(),
            schema=f"({grads}{kept}{params}) -> ({', '.join(['Tensor'] * len(wanted))})",
        )

        def fake_backward(*args: Any) -> Any:
            by_name = self.given(args)
            params = args[len(args) - len(self.op.params) :]
            sizes = self.sizes(by_name, dict(zip(self.op.params, params, strict=True)))
            axes = [self.op.inputs[name].axes for name in wanted]
            dtypes = self.gradient_dtypes(by_name)
            first = next(iter(by_name.values()))
            return _bare(
                [
                    first.new_empty(shape_of(named, sizes), dtype=dtype)
                    for named, dtype in zip(axes, dtypes, strict=True)
                ]
            )

        backward.register_fake(fake_backward)

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.params = inputs[len(self.op.inputs) :]
            ctx.set_materialize_grads(False)
            results = several(output)
            kept = self.kept(inputs[: len(self.op.inputs)], results)
            ctx.save_for_backward(*kept, *results[len(self.op.outputs) :])

        def autograd_backward(ctx: Any, *grads: Any) -> Any:
            used = grads[: len(self.op.outputs)]
            results = backward(*used, *ctx.saved_tensors, *ctx.params)
            gradients = dict(zip(wanted, several(results), strict=True))
            return (*(gradients.get(name) for name in self.op.inputs), *[None] * len(ctx.params))

        forward.register_autograd(autograd_backward, setup_context=setup_context)
        return forward

    def split_backward(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        n_grads, n_saved = len(self.op.outputs), len(self.keep) + len(self.saved)
        needs_grad = [tensor.grad for tensor in self.op.inputs.values()]
        given = args[n_grads : n_grads + n_saved]
        # A compiled call keeps its inputs as they came.
        kept = [
            self.reads[name](tensor) if name in self.reads else tensor
            for name, tensor in zip(self.keep, given, strict=False)
        ]
        saved = (*kept, *given[len(kept) :])
        gradients = self.run_backward(args[:n_grads], saved, args[n_grads + n_saved :], needs_grad)
        by_name = dict(zip(self.op.inputs, gradients, strict=False))
        dtypes = self.gradient_dtypes(self.given(args))
        named = zip(self.op.differentiable, dtypes, strict=True)
        return [by_name[name].to(dtype) for name, dtype in named]

    def given(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors that a custom op's backward pass gets, by name."""
        names = [*self.op.outputs, *self.keep, *self.saved]
        return {name: x for name, x in zip(names, args, strict=False) if x is not None}

    def gradient_dtypes(self, given: Mapping[str, torch.Tensor]) -> list[torch.dtype]:
        """The dtypes of compiled gradients: those of the inputs that are kept, else that of the
        first gradient; autograd converts them."""
        first = next(iter(given.values()))
        return [given.get(name, first).dtype for name in self.op.differentiable]

    def output_dtypes(self, args: Sequence[Any]) -> list[torch.dtype]:
        """The dtypes of compiled outputs: the reference's, if the dtypes of the inputs differ."""
        inputs, params = self.split(tuple(args))
        usual = [x for x, of in zip(inputs, self.op.inputs.values(), strict=True) if not of.dtype]
        if len({x.dtype for x in usual}) > 1:
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
        for name, result, dtype in zip(
            self.op.outputs, results, self.output_dtypes(args), strict=False
        ):
            if result.dtype != dtype:
                raise ValueError(
                    f"{self.op.name}-{self.name}: {name} has dtype {result.dtype}, the compiler "
                    f"was told {dtype}: give a compiled call inputs of one dtype"
                )
        return results

    def fake_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Empty tensors of the declared shapes; what the compiler traces."""
        inputs, params = self.split(args)
        sizes = self.sizes(dict(zip(self.op.inputs, inputs, strict=True)), params)
        first = inputs[0]
        saved = [declared.dtype_beside(first) for declared in self.saved.values()]
        declared = [*self.op.outputs_for(params).values(), *self.saved.values()]
        return tuple(
            first.new_empty(shape_of(one.axes, sizes), dtype=dtype)
            for one, dtype in zip(declared, [*self.output_dtypes(args), *saved], strict=True)
        )

    def sizes(self, tensors: dict[str, torch.Tensor], params: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of the dimensions that these named tensors have, as of `Signature.sizes_of`."""
        declared = {**self.op.inputs, **self.op.outputs_for(params), **self.saved}
        axes = [
            axis_and_size
            for name, tensor in tensors.items()
            for axis_and_size in self.op.sizes_of(declared[name], tensor.shape) or ()
        ]
        sizes = {axis: size for axis, size in axes if axis.isidentifier()}
        add_derived(sizes, [(axis, size) for axis, size in axes if not axis.isidentifier()])
        return sizes


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
    """Of a parameter with this default; one of None is an integer that may be left out."""
    kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "int?"}
    return kinds[type(value)]
