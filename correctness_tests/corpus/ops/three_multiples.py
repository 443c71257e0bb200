"""Multiples of three tensors: three results, each of an input of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_three_multiples",
    inputs={name: Tensor("N D", grad=True) for name in ("first", "second", "third")},
    outputs={"double": "N D", "triple": "N D", "fivefold": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(first, second, third):
    return first * 2, second * 3, third * 5


@op.provider("sums")
def candidate(first, second, third):
    double = first + first
    triple = second + second + second
    fivefold = third + third + third + third + third
    return double, triple, fivefold


# variants
from correctness_tests.corpus.variants import right, wrong

INPUTS = {"double": "first", "triple": "second", "fivefold": "third"}
RETURN = "    return double, triple, fivefold\n"


def cleared(name):
    """A call clears a result of the call before, whose memory it takes for its own."""
    return wrong(
        f"{name}_cleared_by_the_next_call",
        ("\n\n@op.reference", "\nLAST = []\n\n\n@op.reference"),
        (
            RETURN,
            f"    for last in LAST:\n        last.zero_()\n    LAST[:] = [{name}.detach()]\n{RETURN}",
        ),
        fault="aliasing",
        result=name,
    )


def nan_lost(name):
    return wrong(
        f"nan_lost_in_{name}",
        (RETURN, f"    {name} = torch.where({name}.isnan(), 0.0, {name})\n{RETURN}"),
        fault="overflow",
        rank="warning",
        result=name,
    )


def nan_spread(name):
    """A NaN anywhere in an input makes a NaN of each element of a result."""
    return wrong(
        f"nan_spread_in_{name}",
        (
            RETURN,
            f'    {name} = {name}.masked_fill({INPUTS[name]}.isnan().any(), float("nan"))\n{RETURN}',
        ),
        fault="overflow",
        rank="warning",
        result=name,
    )


VARIANTS = [right(), *(fault(name) for fault in (cleared, nan_lost, nan_spread) for name in INPUTS)]
