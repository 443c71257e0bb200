"""Mean cross-entropy with label smoothing and labels that are ignored, one program a row, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import Values, integers


@triton.jit
def forward_kernel(x, label, loss, largest_of, log_sum_of, V, smoothing, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < V
    target = tl.load(label + row)
    value = tl.load(x + row * V + column, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.max(value, 0)
    log_sum = tl.log(tl.sum(tl.exp(value - largest), 0))
    shifted = tl.where(inside, value - largest - log_sum, 0.0)
    of_row = -(1.0 - smoothing) * tl.sum(tl.where(column == target, shifted, 0.0), 0)
    if smoothing != 0.0:
        of_row -= smoothing * tl.sum(shifted, 0) / V
    tl.store(loss + row, tl.where(target == -100, 0.0, of_row))
    tl.store(largest_of + row, largest)
    tl.store(log_sum_of + row, log_sum)


@triton.jit
def backward_kernel(
    x, label, largest_of, log_sum_of, dloss, count, dx, V, smoothing, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < V
    target = tl.load(label + row)
    value = tl.load(x + row * V + column, mask=inside, other=-float("inf")).to(tl.float32)
    p = tl.exp(value - tl.load(largest_of + row) - tl.load(log_sum_of + row))
    slope = p - smoothing / V - tl.where(column == target, 1.0 - smoothing, 0.0)
    slope = slope / tl.load(count) * tl.load(dloss)
    tl.store(dx + row * V + column, tl.where(target == -100, 0.0, slope), mask=inside)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, label, smoothing):
        x, label = x.contiguous(), label.contiguous()
        N, V = x.shape
        loss, largest, log_sum = (
            torch.empty(N, dtype=torch.float32, device=x.device) for _ in range(3)
        )
        if x.numel():
            BLOCK = triton.next_power_of_2(V)
            forward_kernel[(N,)](x, label, loss, largest, log_sum, V, float(smoothing), BLOCK=BLOCK)
        count = (label != -100).sum().to(torch.float32)
        ctx.save_for_backward(x, label, largest, log_sum, count)
        ctx.smoothing = float(smoothing)
        return loss.sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        x, label, largest, log_sum, count = ctx.saved_tensors
        N, V = x.shape
        dx = torch.empty(N, V, dtype=x.dtype, device=x.device)
        if x.numel():
            backward_kernel[(N,)](
                *(x, label, largest, log_sum, dloss.contiguous(), count, dx, V, ctx.smoothing),
                BLOCK=triton.next_power_of_2(V),
            )
        return dx, None, None


def labels(sizes):
    V = max(1, sizes["V"])

    def sample(shape, generator):
        label = integers(V).sample(shape, generator)
        label[1::3] = -100
        return label

    return Values(f"labels({V})", sample, -100)


op = Op(
    "corpus_smoothed_cross_entropy",
    inputs={"x": Tensor("N V", grad=True), "label": Tensor("N", dtype=torch.int64, values=labels)},
    params={"smoothing": 0.1},
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=[
        Case(N=5, V=64),
        Case(N=8, V=100, why="vocabulary that is no power of two"),
        Case(N=5, V=64, params={"smoothing": 0.0}, why="no smoothing"),
    ],
)


@op.reference
def eager(x, label, smoothing):
    wide = torch.promote_types(x.dtype, torch.float32)
    logp = torch.log_softmax(x.to(wide), -1)
    counts = label != -100
    of_label = logp.gather(1, torch.where(counts, label, 0).long()[:, None])[:, 0]
    row = -(1 - smoothing) * of_label
    if smoothing != 0:
        row = row - smoothing * logp.mean(-1)
    return torch.where(counts, row, 0.0).sum() / counts.sum()


@op.independent("torch.nn.functional.cross_entropy")
def stock(x, label, smoothing):
    return torch.nn.functional.cross_entropy(
        x, label.long(), label_smoothing=smoothing, ignore_index=-100
    )


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, label, smoothing):
    return CrossEntropy.apply(x, label, smoothing)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Right only where backward() starts at this loss, whose upstream gradient is 1.
    wrong(
        "upstream_gradient_ignored",
        ("slope / tl.load(count) * tl.load(dloss)", "slope / tl.load(count)"),
        fault="gradient missing",
        result="grad x",
    ),
]
