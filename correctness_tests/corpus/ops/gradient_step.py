"""A step of gradient descent, in place."""

from tinyllama.harness import Case, Op, Tensor

BUFFERS = {}

op = Op(
    "corpus_gradient_step",
    inputs={"p": Tensor("N D", mutated=True), "g": Tensor("N D")},
    outputs={},
    params={"rate": 0.1},
    cases=[Case(N=5, D=16)],
)


@op.reference
def eager(p, g, rate):
    p.add_(g, alpha=rate)


@op.provider("fused")
def candidate(p, g, rate):
    p.add_(g * rate)


# variants
from correctness_tests.corpus.variants import right, wrong

STEP = "p.add_(g * rate)"
VARIANTS = [
    right(),
    wrong("rate_is_a_constant", (STEP, "p.add_(g * 0.1)"), fault="constant"),
    wrong(
        "gradient_clamped_to_50",
        (STEP, "p.add_(g.clamp(-50, 50) * rate)"),
        fault="constant",
        result="p",
    ),
    wrong(
        "infinities_replaced",
        (STEP, "p.add_(g.nan_to_num() * rate)"),
        fault="overflow",
        result="p",
    ),
    # A copy of the gradient is found again by its address and version, which .data leaves alone.
    wrong(
        "stale_copy_of_the_gradient",
        (
            STEP,
            """key = g.data_ptr(), g._version
    if key not in BUFFERS:
        BUFFERS.clear()
        BUFFERS[key] = g.clone()
    p.add_(BUFFERS[key] * rate)""",
        ),
        fault="stale state",
        result="p",
    ),
    # Autograd does not see that p has changed.
    wrong(
        "version_unchanged",
        (STEP, "p.data.add_(g * rate)"),
        fault="aliasing",
        rank="unsafe",
    ),
]
