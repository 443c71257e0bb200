"""Elements as multiples of a step, rounded to whole numbers; a few may be off by one."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.values import uniform

op = Op(
    "corpus_quantised_rows",
    inputs={"x": Tensor("N D"), "step": Tensor("N", values=uniform(0.001, 0.003))},
    outputs={"y": Tensor("N D", dtype=torch.int32, off_by=1)},
    cases=[Case(N=2, D=64)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, step):
    return torch.round(x / step[:, None]).to(torch.int32)


@op.provider("written_out")
def candidate(x, step):
    y = torch.round(x / step[:, None])
    return y.to(torch.int32)


# variants
from correctness_tests.corpus.variants import right, wrong

ROUND = "y = torch.round(x / step[:, None])"
RECIPROCAL = (ROUND, "y = torch.round(x * (1 / step[:, None]))")
HALF_UP = (ROUND, "y = torch.floor(x / step[:, None] + 0.5)")
TIES = [
    ("uniform(0.001, 0.003)", "constant(1.0)"),
    (
        "tinyllama.harness.values import uniform",
        "tinyllama.harness.declare.values import Values, constant\n\n\n"
        "def sixteenths(shape, generator):\n"
        "    return torch.randint(-64, 65, shape, generator=generator, device=generator.device).double() / 16\n\n",
    ),
    ('"x": Tensor("N D")', '"x": Tensor("N D", values=Values("sixteenths", sixteenths))'),
]
TWO_ROWS = (
    '"written_out")',
    '"written_out", supports=lambda dims: None if dims["N"] == 2 and dims["D"] == 64 else "other sizes")',
)
EXACT = (", off_by=1", "")
FIRST = "torch.arange(y.numel(), device=y.device).view(y.shape) == 0"

VARIANTS = [
    right(),
    right("equal", EXACT),
    # At a tie either neighbour is right.
    right("half_up", HALF_UP, EXACT, *TIES, TWO_ROWS),
    right(
        "half_up_in_any_size",
        HALF_UP,
        EXACT,
        *TIES,
        open="accused by sizes: by chance, 8 draws move a tie to the same neighbour",
    ),
    # A few more may be off by one than the reference is undecided about.
    right(
        "half_up_and_one_element_off_by_one",
        (ROUND, f"{HALF_UP[1]}\n    y = y + ({FIRST})"),
        *TIES,
        TWO_ROWS,
    ),
    right(
        "by_reciprocal",
        RECIPROCAL,
        open="accused by sizes: one of 3,072 elements is off by one, and none is undecided",
    ),
    wrong(
        "towards_zero",
        (ROUND, "y = torch.trunc(x / step[:, None])"),
        fault="constant",
        result="y: ",
    ),
    wrong(
        "one_element_off_by_two",
        (ROUND, f"{ROUND}\n    y = y + 2 * ({FIRST})"),
        fault="constant",
        result="y: ",
    ),
    # More are off by one than the reference is undecided about.
    wrong(
        "one_element_off_by_one",
        (ROUND, f"{ROUND}\n    y = y + ({FIRST})"),
        fault="constant",
        result="y: ",
    ),
    wrong(
        "one_element_off_by_one_undeclared",
        EXACT,
        (ROUND, f"{ROUND}\n    y = y + ({FIRST})"),
        fault="constant",
        result="y: ",
    ),
    wrong("all_zero", (ROUND, "y = 0 * x"), fault="constant", result="y: "),
]
