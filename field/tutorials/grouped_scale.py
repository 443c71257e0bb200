"""Many tensors in one launch, by a table of their addresses (as in tutorial 8)."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.kernels import jit, tl

grouped_scale = Op(
    "grouped_scale",
    inputs={"x": Tensor("N"), "y": Tensor("M")},
    outputs={"twice_x": "N", "twice_y": "M"},
    cases=[Case(N=40, M=70), Case(N=1, M=64, why="one element")],
    dtypes=(torch.float32,),
)


@grouped_scale.reference
def eager(x_N: torch.Tensor, y_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * x_N, 2 * y_M


@jit
def grouped_kernel(table, sizes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.program_id(0)
    source = tl.load(table + 2 * which).to(tl.pointer_type(tl.float32))
    target = tl.load(table + 2 * which + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + which)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, 2 * tl.load(source + at, mask=at < size), mask=at < size)


@grouped_scale.provider("tutorials", requires=("triton",), double_backward=False)
def tutorials(x_N: torch.Tensor, y_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sources = [x_N.contiguous(), y_M.contiguous()]
    targets = [torch.empty_like(one) for one in sources]
    pairs = [one.data_ptr() for pair in zip(sources, targets, strict=True) for one in pair]
    table = torch.tensor(pairs, dtype=torch.int64, device=x_N.device)
    sizes = torch.tensor([one.numel() for one in sources], device=x_N.device)
    grouped_kernel[(len(sources),)](table, sizes, BLOCK=32)
    return targets[0], targets[1]
