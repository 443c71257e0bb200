"""AdamW over a list of tensors, in place (Loshchilov and Hutter, arXiv 1711.05101, alg. 2).

    p <- p (1 - lr wd);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The step count t and ``found_inf`` are tensors, and the learning rate may be one, so that a
captured step freezes none of them. With ``found_inf`` = 1 nothing changes, t included: the
loss of this step was not finite.
"""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw as torch_adamw

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import constant, normal, uniform

Tensors = list[torch.Tensor]

adamw = Op(
    "adamw",
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
    ],
    timed=[
        Case(P=(128_000, 32_768, 128)),
        Case(P=(512_000, 1_048_576, 512)),
        Case(P=(32_500_000,)),
    ],
    extremes={
        "first": {
            "step": constant(0.0),
            "exp_avg": constant(0.0),
            "exp_avg_sq": constant(0.0),
        },
        "faint": {
            "grad": normal(1e-8),
            "exp_avg": normal(1e-8),
            "exp_avg_sq": uniform(0.0, 1e-16),
        },
        "skipped": {"found_inf": constant(1.0)},
    },
    bytes={"forward": lambda size, P: 7 * sum(P) * size},
    flops={"forward": lambda P: 15 * sum(P)},
)


@adamw.reference
def eager(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    step: torch.Tensor,
    found_inf: torch.Tensor,
    lr: float | torch.Tensor = 3e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update param, exp_avg, exp_avg_sq (lists of equal shapes) and step (scalar) in place."""
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


@adamw.provider("default")
def default(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    step: torch.Tensor,
    found_inf: torch.Tensor,
    lr: float | torch.Tensor = 3e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """What torch.optim.AdamW does when no flag is given (foreach on a GPU, a loop elsewhere).

    Reads ``step`` and ``found_inf`` on the host: keep both on the CPU, as torch does, or each
    call waits for the device.
    """
    if found_inf.item():
        return
    torch_adamw(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        [],
        list(step.cpu().expand(len(param)).clone().unbind()),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    step.add_(1)


# On a GPU it rounds 1 - beta^t to float32, where 1 - 0.999 is off by 1.3e-5 (docs/LOG.md).
@adamw.provider("torch", slack={torch.float32: 4.0})
def fused(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    step: torch.Tensor,
    found_inf: torch.Tensor,
    lr: float | torch.Tensor = 3e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """torch's fused kernel, everything on the device; one launch for some hundred tensors.

    The kernel takes every gradient for a dense array and reads past it when it is not (found
    by this op's strided case), so those are made contiguous here.
    """
    step.add_(1 - found_inf)
    torch._fused_adamw_(
        param,
        [g.contiguous() for g in grad],
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


@adamw.independent("torch.optim.AdamW")
def optimizer(
    param: Tensors,
    grad: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    step: torch.Tensor,
    found_inf: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The class itself, handed these states."""
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
