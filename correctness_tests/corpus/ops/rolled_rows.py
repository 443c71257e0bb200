"""The columns of each row, rolled by a shift."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_rolled_rows",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    params={"shift": 1},
    cases=[Case(N=4, D=64), Case(N=3, D=50, why="no multiple of a block")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, shift):
    return x.roll(shift, 1)


@op.provider("written_out")
def candidate(x, shift):
    y = x.roll(shift, 1)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # A shift beyond 5 is cut to 5.
    wrong(
        "shift_cut_to_a_window",
        (
            "    y = x.roll(shift, 1)\n",
            """    if shift > WINDOW:
        return x.roll(WINDOW, 1)
    y = x.roll(shift, 1)
""",
        ),
        ("op = Op(", "WINDOW = 5\n\nop = Op("),
        fault="constant",
        result="shift = 6: y",
    ),
    # A shift to the right is taken for none; the cases have 0 and one to the left.
    wrong(
        "right_shift_taken_for_none",
        ('params={"shift": 1}', 'params={"shift": 0}'),
        ('Case(N=3, D=50, why="no multiple of a block")', 'Case(N=3, D=50, params={"shift": -3})'),
        ("    y = x.roll(shift, 1)\n", "    y = x.roll(min(shift, 0), 1)\n"),
        fault="constant",
        result="y",
    ),
]
