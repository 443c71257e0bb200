"""SwiGLU's activation on tiles, with the tree's spaces of configurations."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.ops.silu_mul import ACTIVATE, ACTIVATE_BACKWARD


@triton.jit
def forward_kernel(gate, up, h, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at, mask = row * F + column, (row < N) & (column < F)
    a = tl.load(gate + at, mask=mask, other=0.0)
    b = tl.load(up + at, mask=mask, other=0.0)
    value = a * tl.sigmoid(a) * b
    tl.store(h + at, value, mask=mask)


@triton.jit
def backward_kernel(dh, gate, up, dgate, dup, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at, mask = row * F + column, (row < N) & (column < F)
    upstream = tl.load(dh + at, mask=mask, other=0.0)
    a = tl.load(gate + at, mask=mask, other=0.0)
    b = tl.load(up + at, mask=mask, other=0.0)
    sigmoid = tl.sigmoid(a)
    tl.store(dgate + at, upstream * b * sigmoid * (1 + a * tl.sigmoid(-a)), mask=mask)
    tl.store(dup + at, upstream * a * sigmoid, mask=mask)


def launch(kernel, space, *tensors):
    N, F = tensors[0].shape
    if tensors[0].numel():
        config = space.choose(tensors[0].device, F=triton.next_power_of_2(F), dtype="fp32")
        grid = (triton.cdiv(N, config["ROWS"]), triton.cdiv(F, config["COLUMNS"]))
        kernel[grid](*tensors, N, F, **config.kwargs())


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        launch(forward_kernel, ACTIVATE, gate, up, h)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        launch(backward_kernel, ACTIVATE_BACKWARD, dh.contiguous(), gate, up, dgate, dup)
        return dgate, dup


op = Op(
    "corpus_tiled_silu_mul",
    inputs={"gate": Tensor("N F", grad=True), "up": Tensor("N F", grad=True)},
    outputs={"h": "N F"},
    dtypes=(torch.float32,),
    cases=[Case(N=6, F=24)],
)


@op.reference
def eager(gate, up):
    return gate * torch.sigmoid(gate) * up


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(gate, up):
    return SiluMul.apply(gate, up)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong(
        "wrong_in_the_largest_tile",
        (
            "value = a * tl.sigmoid(a) * b",
            "value = a * tl.sigmoid(a) * b * tl.where(ROWS == 128, 1.25, 1.0)",
        ),
        fault="configuration",
        result="h: ",
    ),
    wrong(
        "backward_wrong_in_the_smallest_tile",
        ("upstream * a * sigmoid,", "upstream * a * sigmoid * tl.where(ROWS == 16, 1.25, 1.0),"),
        fault="configuration",
        result="grad up",
    ),
]
