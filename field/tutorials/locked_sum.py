"""The sum of rows under a lock, as the gradients of tutorial 5 are summed."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import jit, next_power_of_2, tl


def declared(name: str) -> Op:
    op = Op(
        name,
        inputs={"x": Tensor("N D")},
        outputs={"total": "D"},
        cases=[Case(N=7, D=24), Case(N=2, D=16, why="two rows")],
        dtypes=(torch.float32,),
    )
    op.reference(lambda x_ND: x_ND.sum(0))
    return op


locked_sum = declared("locked_sum")


@jit
def locked_kernel(x, total, lock, width, BLOCK: tl.constexpr, BARRIER: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * width + at, mask=at < width, other=0.0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    before = tl.load(total + at, mask=at < width, other=0.0)
    tl.store(total + at, before + row, mask=at < width)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def summed(x_ND: torch.Tensor, barrier: bool) -> torch.Tensor:
    x_ND = x_ND.contiguous()
    N, D = x_ND.shape
    total = torch.zeros(D, dtype=x_ND.dtype, device=x_ND.device)
    lock = torch.zeros(1, dtype=torch.int32, device=x_ND.device)
    locked_kernel[(N,)](x_ND, total, lock, D, BLOCK=next_power_of_2(D), BARRIER=barrier)
    return total


@locked_sum.provider(
    "tutorials",
    requires=("triton",),
    double_backward=False,
    deterministic={"cpu"},
    races={"locked_sum.locked_kernel": "the lock orders the stores"},
)
def tutorials(x_ND: torch.Tensor) -> torch.Tensor:
    return summed(x_ND, barrier=True)
