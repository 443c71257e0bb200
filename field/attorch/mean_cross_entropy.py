"""Cross-entropy, mean over the batch: a partial sum for each program, and too few places."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, tl
from tinyllama.ops.cross_entropy import TARGETS

ROWS = 4  # of the batch, for each program

mean_cross_entropy = Op(
    "mean_cross_entropy",
    inputs={"logits": Tensor("N V"), "targets": TARGETS},
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=[Case(N=8, V=20), Case(N=10, V=33, why="a batch that no block divides")],
    dtypes=(torch.float32,),
)


@mean_cross_entropy.reference
def eager(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    true_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return (logits_NV.logsumexp(-1) - true_N).mean()


@jit
def partial_kernel(  # type: ignore[no-untyped-def]
    logits, targets, partials, batch, classes, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_V)[None, :]
    inside = (row[:, None] < batch) & (at < classes)
    value = tl.load(logits + row[:, None] * classes + at, mask=inside, other=-float("inf"))
    value = tl.where(row[:, None] < batch, value, 0.0)
    highest = tl.max(value, axis=1)
    total = tl.sum(tl.exp(value - highest[:, None]), axis=1)
    target = tl.load(targets + row, mask=row < batch, other=0)
    true = tl.load(logits + row * classes + target, mask=row < batch, other=0.0)
    losses = tl.where(row < batch, tl.log(total) + highest - true, 0.0)
    tl.store(partials + tl.program_id(0), tl.sum(losses, axis=0) / batch)


@mean_cross_entropy.provider("attorch", requires=("triton",), double_backward=False)
def attorch(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    logits_NV, targets_N = logits_NV.contiguous(), targets_N.contiguous()
    N, V = logits_NV.shape
    partials = torch.empty(max(1, N // ROWS), dtype=torch.float32, device=logits_NV.device)
    partial_kernel[(cdiv(N, ROWS),)](
        logits_NV, targets_N, partials, N, V, BLOCK_N=ROWS, BLOCK_V=next_power_of_2(V)
    )
    return partials.sum()
