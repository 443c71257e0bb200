"""Logsumexp of rows, block by block, and the number of positive elements of each row."""

import torch

from tinyllama.harness import Case, Op, Tensor


def without_infinity(x):
    return x.masked_fill(x.isinf(), 0)


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        largest = x.new_full(x.shape[:-1], -torch.inf)
        total = torch.zeros_like(largest)
        for start in range(0, x.shape[-1], 128):
            block = x[..., start : start + 128]
            before, largest = largest, torch.maximum(largest, block.amax(-1))
            shift = without_infinity(largest)
            total = total * (before - shift).exp() + (block - shift[..., None]).exp().sum(-1)
        y = largest + total.log()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        probability = (x - without_infinity(y)[..., None]).exp()
        return dy[..., None] * probability


op = Op(
    "corpus_row_logsumexp",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N", "n": Tensor("N", dtype=torch.int64)},
    cases=[Case(D=8, N=5)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x.logsumexp(-1), (x > 0).sum(-1)


@op.provider("fused", double_backward=False)
def candidate(x):
    return LogSumExp.apply(x), (x > 0).sum(-1)


# variants
from correctness_tests.corpus.variants import right, wrong

SHAPES = ('Tensor("N D", grad=True)', 'Tensor("D", grad=True)')
OUTPUTS = (
    'outputs={"y": "N", "n": Tensor("N", dtype=torch.int64)}',
    'outputs={"y": "", "n": Tensor("", dtype=torch.int64)}',
)
OF_A_VECTOR = (SHAPES, OUTPUTS, ("Case(D=8, N=5)", "Case(D=8)"))
OTHER_OUTPUT = (OUTPUTS[0], 'outputs={"y": "N", "z": "N"}')
REFERENCE = "return x.logsumexp(-1), (x > 0).sum(-1)"
CANDIDATE = "return LogSumExp.apply(x), (x > 0).sum(-1)"
# The first three rows are added, so that an infinity in one of them reaches this output.
WITH_SUMS = (
    OTHER_OUTPUT,
    (
        REFERENCE,
        "return x.logsumexp(-1), torch.cat([x[:3].sum(-1), x[3:].logsumexp(-1)])",
    ),
    (
        CANDIDATE,
        "return x.logsumexp(-1), torch.cat([x[:3].sum(-1), x[3:].logsumexp(-1)])",
    ),
    ('"fused", double_backward=False', '"fused"'),
)
MASKED = "x[..., :100].isinf().all(-1)"
TWICE = (
    "y = largest + total.log()",
    f"y = (largest + total.log()) * (1 + {MASKED})",
)

VARIANTS = [
    right(),
    right("of_a_vector", *OF_A_VECTOR),
    right("with_sums_of_the_first_rows", *WITH_SUMS),
    right(
        "with_an_output_of_zeros",
        OTHER_OUTPUT,
        (REFERENCE, "return x.logsumexp(-1), 0 * x.amax(-1)"),
        (CANDIDATE, "return x.logsumexp(-1), 0 * x.amax(-1)"),
        ('"fused", double_backward=False', '"fused"'),
    ),
    # Where the first block of a row is masked, its largest element is -inf, and the sum a NaN.
    wrong(
        "first_block_masked",
        ("shift = without_infinity(largest)", "shift = largest"),
        fault="overflow",
        result="y",
    ),
    wrong(
        "first_block_masked_in_the_last_rows_alone",
        *WITH_SUMS[:2],
        (
            CANDIDATE,
            f"""masked = {MASKED}
    masked[:3] = False
    sums = torch.cat([x[:3].sum(-1), x[3:].logsumexp(-1)])
    return x.logsumexp(-1).masked_fill(masked, torch.nan), sums""",
        ),
        WITH_SUMS[3],
        fault="overflow",
        result="y",
    ),
    # One row with a masked block changes the result of all rows.
    wrong(
        "a_masked_block_doubles_all_rows",
        ("y = largest + total.log()", f"y = (largest + total.log()) * (1 + {MASKED}.any())"),
        fault="overflow",
        result="y",
    ),
    wrong("masked_block_of_a_vector_doubles_it", *OF_A_VECTOR, TWICE, fault="overflow", result="y"),
    wrong(
        "masked_block_doubles_the_gradient",
        (
            "return dy[..., None] * probability",
            f"return dy[..., None] * probability * (1 + {MASKED}[..., None])",
        ),
        fault="overflow",
        result="grad x",
    ),
    wrong(
        "masked_block_makes_the_gradient_nan",
        (
            "return dy[..., None] * probability",
            f"return (dy[..., None] * probability).masked_fill({MASKED}[..., None], torch.nan)",
        ),
        fault="overflow",
        result="grad x",
    ),
    # Rows of more than 2,000 elements are not supported; shorter ones show the fault.
    wrong(
        "masked_block_of_short_rows_alone",
        TWICE,
        (
            '"fused", double_backward=False',
            '"fused", double_backward=False, supports=lambda dims: "too long" if dims["D"] > 2000 else None',
        ),
        fault="overflow",
        result="y",
    ),
    # A row without elements is counted as one.
    wrong(
        "count_of_an_empty_row",
        (CANDIDATE, "return LogSumExp.apply(x), (x > 0).sum(-1) + (x.shape[-1] == 0)"),
        fault="empty",
        result="n",
    ),
    # The logsumexp of nothing is the least number of float32 in place of -inf.
    wrong(
        "finite_result_of_an_empty_row",
        (
            "y = largest + total.log()",
            "y = largest + total.log() if x.shape[-1] else largest.clamp(min=-3e38)",
        ),
        fault="empty",
        result="y",
    ),
]
