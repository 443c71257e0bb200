"""Elements times two."""

import threading

import torch

from tinyllama.harness import Case, Op, Tensor

LOCAL = threading.local()


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        dx = 2 * dy
        return dx


op = Op(
    "corpus_doubling",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(D=16, N=3)],
)


@op.reference
def eager(x):
    return x + x


@op.provider("fused", double_backward=False)
def candidate(x):
    return Doubling.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

OF_THREE_AXES = (
    ('Tensor("N D", grad=True)', 'Tensor("N M D", grad=True)'),
    ('{"y": "N D"}', '{"y": "N M D"}'),
    ("Case(D=16, N=3)", "Case(D=4, M=3, N=2)"),
)
VARIANTS = [
    right(),
    right("of_three_axes", *OF_THREE_AXES),
    # The factor is in memory of the thread that called, which another thread does not have.
    wrong(
        "factor_of_the_thread",
        ("y = 2 * x", "y = 2 * x\n        LOCAL.factor = 2"),
        ("dx = 2 * dy", 'dx = getattr(LOCAL, "factor", 0) * dy'),
        fault="stale state",
        result="x",
    ),
    # A gradient overflows in float16 on the way, as soon as a loss is scaled.
    wrong(
        "gradient_overflows_with_a_loss_scale",
        ("dx = 2 * dy", "dx = 64 * dy / 32"),
        fault="overflow",
        result="grad x",
    ),
    # In float16 no more than 64 rows are written.
    wrong(
        "rows_beyond_64_in_float16",
        ("y = 2 * x", "y = 2 * x\n        if x.dtype is torch.float16:\n            y[64:] = 0"),
        (
            '"fused", double_backward=False',
            """"fused",
    double_backward=False,
    supports=lambda dims: "more than 100 rows" if dims["N"] > 100 else None,
""",
        ),
        ("Case(D=16, N=3)", "Case(N=5, D=2)"),
        fault="tail",
        result="y",
    ),
    # A long row of 16 bits is written in vectors of 8, and its tail is not.
    wrong(
        "tail_of_vectors_of_16_bits",
        (
            "y = 2 * x",
            """y = 2 * x
        if x.element_size() == 2 and x.shape[-1] > 1024:
            y[:, x.shape[-1] // 8 * 8 :] = 0""",
        ),
        fault="tail",
        result="y",
    ),
    # The tail behind one whole block of 2,048 is not written; behind two it is.
    wrong(
        "tail_behind_one_block_of_2048",
        (
            "y = 2 * x",
            "y = 2 * x\n        if x.shape[1] // 2048 == 1:\n            y[:, 2048:] = 0",
        ),
        fault="tail",
        result="y",
    ),
    wrong(
        "tail_behind_one_block_of_128",
        ("y = 2 * x", "y = 2 * x\n        if x.shape[1] // 128 == 1:\n            y[:, 128:] = 0"),
        fault="tail",
        result="y",
    ),
    # The last of several blocks has a length of zero where it is whole.
    wrong(
        "last_block_of_2048_where_it_is_whole",
        (
            "y = 2 * x",
            """y = torch.zeros_like(x)
        start = (x.shape[1] - 1) // 2048 * 2048
        end = start + x.shape[1] % 2048
        y[:, :start], y[:, start:end] = 2 * x[:, :start], 2 * x[:, start:end]""",
        ),
        fault="tail",
        result="y",
    ),
    # The block that is the second one along all three axes is not written.
    wrong(
        "second_block_of_three_axes",
        *OF_THREE_AXES,
        ("y = 2 * x", "y = 2 * x\n        y[64:, 64:, 64:] = 0"),
        (
            '"fused", double_backward=False',
            """"fused",
    double_backward=False,
    supports=lambda dims: "more than 150" if max(dims.values()) > 150 else None,
""",
        ),
        fault="tail",
        result="y",
    ),
]
