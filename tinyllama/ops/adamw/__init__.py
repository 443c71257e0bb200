"""AdamW over a list of tensors, in place (Loshchilov and Hutter, arXiv 1711.05101, alg. 2).

    p <- p (1 - lr wd);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The step count t and ``found_inf`` are tensors, and the learning rate may be one, so that a
captured step freezes none of them. With ``found_inf`` = 1 nothing changes, t included: the
loss of this step was not finite.
"""

import math
from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw as torch_adamw

from tinyllama.harness import Case, Large, Op, Tensor
from tinyllama.harness.declare.values import constant, normal, uniform
from tinyllama.ops.adamw.kernels import UPDATE, Rate, State, count, impossible, update
from tinyllama.ops.adamw.matrix_kernels import update_matrices

__all__ = ["UPDATE", "State", "adamw", "count", "update", "update_matrices"]

adamw = Op(
    "adamw",
    fits=impossible,
    inputs={
        "param": Tensor("P", mutated=True, many=True),
        "grad": Tensor("P", many=True),
        "exp_avg": Tensor("P", mutated=True, many=True, values=normal(0.1)),
        "exp_avg_sq": Tensor("P", mutated=True, many=True, values=uniform(0.0, 1.0)),
        "step": Tensor("", dtype=torch.float32, mutated=True, values=constant(2.0)),
        "found_inf": Tensor("", dtype=torch.float32, values=constant(0.0)),
    },
    params={"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    outputs={},
    calls=3,
    dtypes=(torch.float32,),
    cases=[
        Case(P=(50, 1, 33), params={"lr": 0.05}),
        Case(P=(1000,), params={"lr": 0.05, "weight_decay": 0.0}, why="no decay"),
        Case(P=(64, 7), params={"lr": 0.05, "weight_decay": 0.5}, why="decay that dominates"),
        Case(P=(64,), params={"lr": 0.05, "eps": 0.1}, why="epsilon that matters"),
        Case(P=(33,), params={"lr": 0.05, "beta1": 0.5, "beta2": 0.7}, why="other betas"),
        Case(P=(2048, 2047, 2049), params={"lr": 0.05}, why="tensors that end beside a block"),
        Case(P=tuple(range(1, 20)), params={"lr": 0.05}, why="many tensors"),
    ],
    timed=[
        Case(P=(128_000, 32_768, 128)),
        Case(P=(512_000, 1_048_576, 512)),
        Case(P=(32_500_000,)),
    ],
    extremes={
        "first": {"step": constant(0.0), "exp_avg": constant(0.0), "exp_avg_sq": constant(0.0)},
        "faint": {"grad": normal(1e-8), "exp_avg": normal(1e-8), "exp_avg_sq": uniform(0.0, 1e-16)},
        "skipped": {
            "found_inf": constant(1.0),
            "grad": constant(math.inf),
        },  # 0 times it is NaN
        "still": {"grad": constant(0.0)},  # decay, and what earlier gradients have left
        "late": {"step": constant(3000.0)},
    },
    bytes={"forward": lambda size, P: 7 * sum(P) * size},
    flops={"forward": lambda P: 15 * sum(P)},
    small_kernels={"_advance": "writes three numbers"},
)


@adamw.random_dims
def _sizes(draw: Callable[[int, int], int]) -> dict[str, tuple[int, ...]]:
    return {"P": (draw(1, 2000), draw(1, 70), draw(1, 3))}


@adamw.reference
def eager(
    state: State, lr: Rate, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """Each element of each tensor by itself, as the formulas at the head of this file say."""
    param, grad, exp_avg, exp_avg_sq, step, found_inf = state
    keep = found_inf == 0
    step.add_(keep.to(step.dtype))
    t = step.double()
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    for p, g, m, v in zip(param, grad, exp_avg, exp_avg_sq, strict=True):
        new_m = m + (g - m) * (1 - beta1)
        new_v = v * beta2 + g * g * (1 - beta2)
        size = (new_v / correction2.to(v)).sqrt() + eps
        new_p = p * (1 - lr * weight_decay) - lr * (new_m / correction1.to(m)) / size
        for old, new in ((p, new_p), (m, new_m), (v, new_v)):
            old.copy_(torch.where(keep, new, old))


@adamw.provider("default", counts_on_host=True)
def default(
    state: State, lr: Rate, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """What torch.optim.AdamW does when no flag is given (foreach on a GPU, a loop elsewhere).

    Reads ``step`` and ``found_inf`` on the host: keep both on the CPU, as torch does, or each
    call waits for the device.
    """
    if state.found_inf.item():
        return
    steps = list(state.step.cpu().expand(len(state.param)).clone().unbind())
    torch_adamw(
        *state[:4],
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    state.step.add_(1)


# On a GPU it rounds 1 - beta^t to float32, where 1 - 0.999 is off by 1.3e-5.
@adamw.provider("torch", slack={torch.float32: 4.0})
def fused(
    state: State, lr: Rate, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """torch's fused kernel, everything on the device; one launch for some hundred tensors.

    The kernel takes every tensor for a dense array and reads past it when it is not (found by this
    op's strided case), so those are made contiguous here, and what was updated is written back.
    """
    step, found_inf = state.step, state.found_inf
    step.add_(1 - found_inf)
    param, grad, exp_avg, exp_avg_sq = ([x.contiguous() for x in tensors] for tensors in state[:4])
    torch._fused_adamw_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        [],
        [step] * len(param),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )
    updated = (state.param, param), (state.exp_avg, exp_avg), (state.exp_avg_sq, exp_avg_sq)
    for tensors, copies in updated:
        for mine, copy in zip(tensors, copies, strict=True):
            if copy is not mine:
                mine.copy_(copy)


@adamw.independent("torch.optim.AdamW")
def optimizer(
    state: State, lr: Rate, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """The class itself, given these states."""
    param, grad, exp_avg, exp_avg_sq, step, found_inf = state
    if found_inf.item():
        return
    stock = torch.optim.AdamW(
        param, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
    )
    for p, g, m, v in zip(param, grad, exp_avg, exp_avg_sq, strict=True):
        p.grad = g
        stock.state[p] = {"step": step.detach().clone(), "exp_avg": m, "exp_avg_sq": v}
    stock.step()
    for p in param:
        p.grad = None
    step.add_(1)


@adamw.provider("triton", requires=("triton",), large=(Large("P", "1"),))
def one_launch(
    state: State, lr: Rate, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """One launch for all tensors, after a launch of one program that counts the step.

    All tensors are on one device, and those of a list have one dtype; float32 is used inside. A
    state that is not dense is updated in a copy, which is then written back. Autograd learns that
    the tensors were changed: it refuses a backward pass of what was computed with them before.
    """
    update(state, lr, beta1, beta2, eps, weight_decay)
    for tensor in (*state.param, *state.exp_avg, *state.exp_avg_sq, state.step):
        increment_version(tensor)  # one by one, as every torch takes them
