"""Rows of a matrix by their index, no row twice in a declared case, with a gradient, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values


@triton.jit
def gather_kernel(w, index, y, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(w + source * D + column, mask=column < D, other=0.0)
    tl.store(y + row * D + column, value, mask=column < D)


@triton.jit
def scatter_kernel(dy, index, dw, D, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(dy + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.atomic_add(dw + source * D + column, value, mask=column < D)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, index):
        w, index = w.contiguous(), index.contiguous()
        N, D = index.shape[0], w.shape[1]
        y = torch.empty(N, D, dtype=w.dtype, device=w.device)
        if y.numel():
            gather_kernel[(N,)](w, index, y, D, BLOCK=triton.next_power_of_2(D))
        ctx.save_for_backward(index)
        ctx.shape = w.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        dy = dy.contiguous()
        N, D = dy.shape
        dw = torch.zeros(ctx.shape, dtype=torch.float32, device=dy.device)
        if dy.numel():
            scatter_kernel[(N,)](dy, index, dw, D, BLOCK=triton.next_power_of_2(D))
        return dw.to(dy.dtype), None


def chosen(sizes):
    V = max(1, sizes["V"])

    def sample(shape, generator):
        order = torch.randperm(max(V, *shape), generator=generator, device=generator.device)
        return order[: shape[0]] % V

    return Values(f"chosen({V})", sample, 0)


op = Op(
    "corpus_gathered_rows",
    inputs={"w": Tensor("V D", grad=True), "index": Tensor("N", dtype=torch.int64, values=chosen)},
    outputs={"y": "N D"},
    cases=[Case(V=9, D=32, N=5), Case(V=7, D=50, N=7, why="a permutation of all rows")],
    dtypes=(torch.float32,),
    computes=False,
)


@op.reference
def eager(w, index):
    return w[index.long()]


@op.independent("a product with one-hot rows")
def written_out(w, index):
    return torch.nn.functional.one_hot(index.long(), w.shape[0]).to(w.dtype) @ w


@op.provider(
    "triton", requires=("triton",), double_backward=False, deterministic=frozenset({"cpu"})
)
def candidate(w, index):
    return Gather.apply(w, index)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    right("every_dtype", ("    dtypes=(torch.float32,),\n", "")),
    # Of a row that is gathered twice, the gradient is that of one of both.
    wrong(
        "gradient_of_a_repeated_row_stored",
        ("tl.atomic_add(dw + source", "tl.store(dw + source"),
        fault="accumulation",
        result="grad w",
    ),
]
