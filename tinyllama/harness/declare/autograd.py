"""From a provider's forward and backward: the autograd function and the custom op.

A provider that autograd cannot differentiate (a kernel) is a class:

    @rms_norm.provider("triton", saved={"rstd": Tensor("B T", dtype=torch.float32)},
                       keep=("x", "weight"))
    class Triton:
        @staticmethod
        def forward(x, weight, eps):            # -> outputs, then the saved tensors
            return y, rstd

        @staticmethod
        def backward(
            grads: Grads, kept: Named, saved: Named, needs: Needs, eps: float
        ) -> Named:                             # -> gradients by input name
            return {"x": dx, "weight": dweight}

``grads`` holds one upstream gradient per output, None where that output was not used;
``kept`` the inputs or outputs named in ``keep``; ``needs`` the names whose gradient is
wanted. ``reads={"x": contiguous}`` says by which function an input gets a layout that the
kernels read: both passes get its result, and where it is a copy, the copy is what is kept, so
that an input is copied once. (A compiled call keeps its inputs, and copies in both passes.)

``replays=True`` says that what forward and backward allocate and launch follows from the
layouts of their tensors and from the parameters alone, and that every kernel is launched through
`tinyllama.harness.kernels.jit`. On a GPU they are then run three times for each signature, and
repeated after that by a plan (`tinyllama.harness.kernels.plans`).

In eager mode the autograd function is called directly (a custom op's dispatch
costs microseconds a call); under torch.compile the custom op is called, which the compiler sees
as one opaque node with declared shapes. A second derivative raises an error, because a gradient
that is silently detached would be wrong and nobody would notice.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.calls import Calls, plain
from tinyllama.harness.declare.checked import BySignature, Check, named
from tinyllama.harness.declare.specs import DeclarationError, Signature, add_derived, shape_of
from tinyllama.harness.kernels.layout import memory_of
from tinyllama.harness.kernels.precision import compute_dtype

# What a backward takes and returns; gradients of several outputs are `SomeGrads`.
Grads = Sequence[torch.Tensor]
SomeGrads = Sequence[torch.Tensor | None]
Named = Mapping[str, torch.Tensor]
Needs = set[str]


_COMPILED: ContextVar[bool] = ContextVar("compiled", default=False)


def shapes_are_fixed() -> bool:
    """Whether the forward pass that runs must save exactly the declared shapes: the compiler reads
    memory by them. In eager mode a provider may save a tensor in another one."""
    return _COMPILED.get()


@dataclass(frozen=True)
class Derived:
    """A provider given as forward and backward, and what the harness derives from it."""

    op: Signature
    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Mapping[str, torch.Tensor | None]]
    keep: tuple[str, ...]
    saved: dict[str, Any]
    reads: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    replays: bool = False
    known: "BySignature[Calls]" = field(default_factory=BySignature, repr=False)

    def __post_init__(self) -> None:
        _ = self.custom_op  # declared at once: while it traces, the compiler cannot

    def caller(self, check: Check = lambda args, params: None) -> Callable[..., Any]:
        """The provider as a function of the inputs in order and the parameters by name. check: is
        called for each new signature before anything else, and raises an error for a wrong one."""
        apply, defaults, known = self.function.apply, self.op.params, self.known
        # Without what `apply` does in Python for tensors that were a transform's (`torch.func`).
        above: Any = super(torch.autograd.Function, self.function)
        bare = above.apply
        single = len(self.op.outputs) == 1

        def call(*args: Any, **params: Any) -> Any:
            if torch.compiler.is_compiling():  # once, when the call is traced
                check(args, params)
                params = {**defaults, **params}
                outputs = several(self.custom_op(*cast_by_autocast(args), *params.values()))
                return outputs[0] if single else outputs[: len(self.op.outputs)]
            calls = known.last(args, params)
            if calls is not None:
                return bare(*args, calls)
            args = plain(args)
            calls = known.find(args, params)
            if calls is None:
                check(args, params)
                calls = Calls(self, {**defaults, **params})
                outputs = apply(*args, calls)  # raises an error for tensors of a transform
                known.put(args, params, calls)
                return outputs
            return apply(*args, calls)

        return named(call, f"{self.op.name}_{self.name}")

    @cached_property
    def function(self) -> type[torch.autograd.Function]:
        """The autograd function: the inputs in order, and last what is known of such calls."""
        derived, n_outputs = self, len(self.op.outputs)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                ctx.set_materialize_grads(False)
                ctx.calls = calls = args[-1]
                inputs = calls.as_read(args[:-1])
                results = calls.forward.run(*inputs)
                ctx.save_for_backward(*derived.kept(inputs, results), *results[n_outputs:])
                return results[0] if n_outputs == 1 else results[:n_outputs]

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                # A graph of this would not reach the inputs: some second derivatives would be
                # missing silently, so all raise an error.
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        f"{derived.op.name}-{derived.name} has no second derivative: "
                        "leave create_graph out, or use the provider 'eager'"
                    )
                if all(grad is None for grad in grads):  # whoever used the outputs gave none
                    return (None,) * len(ctx.needs_input_grad)
                return ctx.calls.backward(ctx.needs_input_grad, (*grads, *ctx.saved_tensors))

        Function.__name__ = f"{self.op.name}_{self.name}"
        return Function

    @cached_property
    def custom_op(self) -> Callable[..., Any]:
        """The same as a custom op with a fake version, for torch.compile and opcheck."""
        qualified = f"tinyllama::{self.op.name}_{self.name}"
        tensors = ", ".join(f"Tensor {name}" for name in self.op.inputs)
        params = "".join(f", {_schema_type(v)} {k}" for k, v in self.op.params.items())
        results = ", ".join(["Tensor"] * (len(self.op.outputs) + len(self.saved)))
        forward = torch.library.custom_op(
            qualified,
            lambda *args: _bare(apart(self.compiled_forward(*args), args)),
            mutates_args=(),
            schema=f"({tensors}{params}) -> ({results})",
        )
        forward.register_fake(lambda *args: _bare(self.fake_forward(*args)))

        grads = ", ".join(f"Tensor? g{i}" for i in range(len(self.op.outputs)))
        kept = "".join(f", Tensor s{i}" for i in range(len(self.keep) + len(self.saved)))
        wanted = self.op.differentiable
        backward = torch.library.custom_op(
            f"{qualified}_backward",
            lambda *args: _bare(apart(self.split_backward(args), args)),
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
            found = dict(zip(wanted, several(results), strict=True))
            return (*(found.get(name) for name in self.op.inputs), *[None] * len(ctx.params))

        forward.register_autograd(autograd_backward, setup_context=setup_context)
        return forward

    # -- the provider's own code, called with positional arguments ---------------------------

    def as_read(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with inputs in the layouts that the kernels read."""
        if not self.reads:
            return args
        read = list(args)
        for place, function in self._reads:
            read[place] = function(read[place])
        return tuple(read)

    @cached_property
    def _reads(self) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
        """Where the inputs are that have to be in some layout, and what gives it."""
        names = list(self.op.inputs)
        return [(names.index(name), function) for name, function in self.reads.items()]

    def run_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        inputs, params = self.split(args)
        results = several(self.forward(*inputs, **params))
        expected = len(self.op.outputs) + len(self.saved)
        if len(results) != expected:
            raise TypeError(
                f"{self.op.name}-{self.name}: forward returned {len(results)} tensors, "
                f"declared are {expected} (outputs, then saved)"
            )
        return results

    def run_backward(self, grads: Any, saved: Any, params: Any, needs_grad: Any) -> tuple[Any, ...]:
        needs = {name for name, wanted in zip(self.op.inputs, needs_grad, strict=False) if wanted}
        kept = dict(zip(self.keep, saved, strict=False))
        rest = dict(zip(self.saved, saved[len(self.keep) :], strict=True))
        named = dict(zip(self.op.params, params, strict=True))
        found = self.backward(grads, kept, rest, needs, **named)
        lost = [name for name in needs if found.get(name) is None]
        if lost:
            raise RuntimeError(
                f"{self.op.name}-{self.name}: backward returned no gradient for {sorted(lost)}"
            )
        return tuple(map(found.get, self.op.inputs))

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
        found = self.run_backward(args[:n_grads], saved, args[n_grads + n_saved :], needs_grad)
        by_name = dict(zip(self.op.inputs, found, strict=False))
        dtypes = self.gradient_dtypes(self.given(args))
        named = zip(self.op.differentiable, dtypes, strict=True)
        return [by_name[name].to(dtype) for name, dtype in named]

    # -- what the compiler is told of dtypes: it reads memory by it ---------------------------

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

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(self.op.inputs)
        return args[:n], dict(zip(self.op.params, args[n:], strict=True))

    def kept(self, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> list[torch.Tensor]:
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


def derive(op: Signature, name: str, implementation: Any, traits: dict[str, Any]) -> Derived | None:
    """The derived form of a class with forward and backward; None for a plain function."""
    if not isinstance(implementation, type):
        return None
    saved = traits.pop("saved", {})
    keep = tuple(traits.pop("keep", ()))
    reads, replays = traits.pop("reads", {}), traits.pop("replays", False)
    if unknown := sorted(set(reads) - set(op.inputs)):
        raise DeclarationError(
            f"op {op.name!r}: {name!r} reads unknown inputs {unknown}: use {', '.join(op.inputs)}"
        )
    if any(tensor.optional for tensor in op.inputs.values()):
        raise DeclarationError(
            f"op {op.name!r}: {name!r} is a class, whose inputs are never None: register a "
            "function that applies an autograd.Function of your own"
        )
    forward, backward = (getattr(implementation, which) for which in ("forward", "backward"))
    return Derived(op, name, spread(forward), backward, keep, saved, reads, replays)


def cast_by_autocast(args: Sequence[Any]) -> list[Any]:
    """Floating-point tensors in autocast's dtype, where it is on: what the compiler sees of an
    opaque op has one dtype. Uncompiled, a provider decides for itself what it computes in."""
    return [
        arg.to(compute_dtype(arg)) if isinstance(arg, torch.Tensor) and arg.requires_grad else arg
        for arg in args
    ]


def apart(results: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of an operator that the compiler sees: it reads them as contiguous ones, and none
    may share memory with another one or an argument. One that breaks either rule is
    copied. Uncompiled, such results stay views."""
    taken = {memory_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
    found = []
    for result in results:
        own = result.contiguous()
        if memory_of(own) in taken:
            own = own.clone()
        taken.add(memory_of(own))
        found.append(own)
    return found


def _bare(results: Sequence[torch.Tensor]) -> Any:
    """What an operator with these results returns: one of them alone, without a tuple."""
    return tuple(results) if len(results) > 1 else results[0]


def several(results: Any) -> tuple[torch.Tensor, ...]:
    """The results of an operator as a tuple, one alone too."""
    return results if isinstance(results, tuple) else (results,)


def _schema_type(value: Any) -> str:
    """Of a parameter with this default; one of None is an integer that may be left out."""
    kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "int?"}
    return kinds[type(value)]
