"""A stack of L transformer blocks as one op: what a step has between its embedding and its head.

Nothing between two products is a kernel of its own: norms, rotation, activation and residual sums
are in the products' epilogues, across the blocks' borders too (see `tinyllama.ops.stack.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.arguments import spread
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels.layout import contiguous, dense_matrices, dense_rows
from tinyllama.ops.attention import lse_dtype
from tinyllama.ops.block import block, stock, unfit
from tinyllama.ops.block.passes import WEIGHTS
from tinyllama.ops.stack import passes, single
from tinyllama.ops.stack.configs import PRODUCTS, pays, pays_beside
from tinyllama.ops.stack.fused import InSeveral
from tinyllama.ops.stack.passes import Inputs, receiving
from tinyllama.ops.stack.single import InOne

__all__ = ["Fused", "Inputs", "Single", "provider_of", "receiving", "stack"]


def _bytes(kind: str) -> Callable[..., float]:
    return lambda size, L, **dims: L * block.bytes[kind](size, **dims)


def _flops(kind: str) -> Callable[..., float]:
    return lambda L, **dims: L * block.flops[kind](**dims)


stack = Op(
    "stack",
    fits=unfit,
    inputs={
        name: tensor if name in ("x", "cos", "sin") else replace(tensor, shape=f"L {tensor.shape}")
        for name, tensor in block.inputs.items()  # what is a layer's own is stacked
    },
    params={"eps": 1e-5},
    outputs={"y": "B T D"},
    small_kernels={
        name: "calls kernels that have a large case, each time for the rows of one sequence"
        for name in ("single_forward_kernel", "single_backward_kernel")
    },
    cases=[
        Case(L=2, B=2, T=9, D=32, Q=32, R=16, F=48, C=8),
        Case(L=1, B=1, T=33, D=48, Q=64, R=64, F=40, C=16, why="Q wider than D, no grouping"),
        Case(L=1, B=3, T=2, D=16, Q=8, R=8, F=24, C=4, why="one head"),
        Case(L=3, B=1, T=5, D=16, Q=16, R=16, F=8, C=4, why="a block between two others"),
        Case(L=1, B=2, T=32, D=64, Q=64, R=64, F=64, C=16, why="tiles that divide every size"),
    ],
    timed=[
        Case(L=2, B=4, T=64, D=128, Q=128, R=64, F=256, C=16),
        Case(L=8, B=8, T=128, D=512, Q=512, R=256, F=2048, C=32),
    ],
    slowdowns={"device_seconds": 0.10},  # gaps between short kernels are a process's own
    extremes={"tiny": {"x": normal(2e-3)}, "huge": {"x": normal(100.0)}},
    bytes={"forward": _bytes("forward"), "backward": _bytes("backward")},
    flops={"forward": _flops("forward"), "backward": _flops("backward")},
)


@stack.random_dims
def _sizes(draw: Callable[[int, int], int]) -> dict[str, int]:
    assert block.dims_of is not None
    return {"L": draw(1, 2), **block.dims_of(draw)}


def _in_turn(apply_block: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The stack that applies a block to the result of the block before."""

    def stacked(inputs: Inputs, eps: float) -> torch.Tensor:
        x = inputs.x
        for index in range(inputs.w_q.shape[0]):
            x = apply_block(*inputs.layer(x, index), eps=eps)
        return x

    return spread(stacked)


# Its calls are short kernels: those of eight blocks are more than the queue of a device takes.
eager = stack.provider("eager", waits=True)(_in_turn(block["eager"].call))
stack.independent("torch.nn.functional, end to end")(_in_turn(spread(stock)))


@stack.magnitude(shared=True)
def terms(
    upstream: dict[str, torch.Tensor], eps: float, **inputs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The magnitude of what cancels in each block (see `tinyllama.ops.block.terms`)."""
    of_stack = Inputs(**{name: tensor.detach() for name, tensor in inputs.items()})
    xs = [of_stack.x]
    with torch.enable_grad():
        for index in range(of_stack.w_q.shape[0]):
            x = xs[-1].requires_grad_()
            xs.append(block["eager"].call(*of_stack.layer(x, index), eps=eps))
        dys = torch.autograd.grad(xs[-1], xs[1:], upstream["y"])
    assert block.magnitudes is not None
    magnitudes = [
        block.magnitudes(upstream={"y": dy}, eps=eps, **of_stack.layer(x, index)._asdict())
        for index, (x, dy) in enumerate(zip(xs, dys, strict=False))
    ]
    return {
        name: torch.stack([of_block[name] for of_block in magnitudes]) for name in magnitudes[0]
    }


# What a forward pass keeps for the backward pass, in whichever launches.
SAVED = {
    "narrow": Tensor("0"),  # the weights in autocast's dtype; empty without autocast
    "between": Tensor("L+-1 B*T D"),  # the inputs of the blocks but the first
    "low_1": Tensor("L B*T D"),
    "qkv": Tensor("L B T Q+2*R"),
    "o": Tensor("L B T Q"),
    "lse": Tensor("L B Q/2/C T", dtype_of=lse_dtype),
    "sum": Tensor("L B*T D"),
    "low_2": Tensor("L B*T D"),
    "gate_up": Tensor("L B*T 2*F"),
    "h": Tensor("L B*T F"),
    "rstd": Tensor("L 2 B*T", dtype=torch.float32),
    # Of a pass from transposes, whose low_1, low_2 and h are transposes as well; else empty.
    "o_turned": Tensor("0"),
    "qkv_turned": Tensor("0"),
    "turned_weights": Tensor("0"),  # where the optimizer keeps them
}
READS = {  # what is copied once, where it has another layout
    **dict.fromkeys(("x", "cos", "sin"), contiguous),
    **dict.fromkeys(("attention_norm", "mlp_norm"), dense_rows),
    **dict.fromkeys(WEIGHTS, dense_matrices),
}
MANY = (Large("B", "T*D", {"L": 1, "T": 8, "D": 64, "Q": 16, "R": 16, "F": 8, "C": 8}),)


@stack.provider(
    "fused", requires=("triton",), keep=Inputs._fields, reads=READS, saved=SAVED, large=MANY
)
class Fused:
    """Five launches for a block forward and six backward, one more for long sequences; more where
    the chip's table chooses the vendor's BLAS for a product.

    Products are in autocast's dtype where it is on; the residual stream and all statistics keep
    x's dtype or float32.
    """

    way = InSeveral

    @classmethod
    def forward(cls, inputs: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        return passes.forward(inputs, eps, cls.way)

    @classmethod
    def backward(cls, grads: Grads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        return passes.backward(grads, inputs, saved, cls.way)


def choices(x_BTD: torch.Tensor, dtype: torch.dtype) -> None:
    """Whether the blocks are a stack at all, and when they are updated."""
    pays(x_BTD, dtype)
    pays_beside(x_BTD, dtype)


stack.asks["fused"] = choices


def provider_of(plan: str) -> str:
    """The provider of a plan: its own name, or that of `Fused` with exactly these products as
    kernels of ours, whatever the chip's table says: names of `configs.PRODUCTS` joined by "+",
    ``all`` of them, or ``none``. It is registered when it is first asked for.

    Raises ValueError for a product that does not exist.
    """
    if plan in stack.providers:
        return plan
    names = {"all": list(PRODUCTS), "none": []}.get(plan, plan.split("+"))
    if unknown := [name for name in names if name not in PRODUCTS]:
        raise ValueError(
            f"plan {plan!r} does not exist: use fused, single, all, none, or products joined by +, "
            f"of {', '.join(PRODUCTS)} (not {', '.join(map(repr, unknown))})"
        )
    name = plan if plan in ("all", "none") else "_and_".join(n for n in PRODUCTS if n in names)
    if name not in stack.providers:
        way = type("Chosen", (InSeveral,), {"plan": frozenset(names)})
        stack.provider(
            name, requires=("triton",), keep=Inputs._fields, reads=READS, saved=SAVED, large=MANY
        )(type("Chosen", (Fused,), {"way": way}))
    return name


@stack.provider(
    "single",
    requires=("triton", "cooperative"),
    keep=Inputs._fields,
    reads=READS,
    saved=SAVED,
    dtypes=(torch.float32, torch.bfloat16),  # float16 takes the way of bfloat16
    large=(Large("B", "T*D", {"L": 1, "T": 8, "D": 64, "Q": 32, "R": 32, "F": 8, "C": 16}),),
    supports=single.unfit,
)
class Single:
    """One cooperative launch for a block forward and one backward, and one for the gradients of its
    weights. Sums and dtypes are those of `Fused`, and so are the bits where tiles are equal."""

    @staticmethod
    def forward(inputs: Inputs, eps: float) -> tuple[torch.Tensor, ...]:
        return passes.forward(inputs, eps, InOne)

    @staticmethod
    def backward(grads: Grads, inputs: Named, saved: Named, needs: Needs, eps: float) -> Named:
        return passes.backward(grads, inputs, saved, InOne)
