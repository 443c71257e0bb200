"""Sums of each of several groups of columns; how many there are is a parameter that divides D."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_group_sums",
    inputs={"x": Tensor("N D")},
    outputs={"y": Tensor("N 2", shape_by=lambda params: f"N {params['groups']}")},
    params={"groups": 2},
    fits=lambda sizes: "D by groups" if sizes["D"] % sizes["groups"] else None,
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, groups):
    return x.unflatten(1, (groups, -1)).sum(-1)


@op.provider("written_out")
def candidate(x, groups):
    return x.reshape(len(x), groups, x.shape[1] // groups).sum(-1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    # Of no groups, `fits` divides by zero: that number is not tried.
    right(),
    wrong(
        "first_groups_alone",
        ("// groups).sum(-1)", "// groups)[..., 0]"),
        fault="accumulation",
        result="y",
    ),
]
