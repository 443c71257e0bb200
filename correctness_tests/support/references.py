"""A reference beside code of the same op that is not ours."""

import math

import torch

from tinyllama.harness import Op
from tinyllama.harness.correct.evaluate import Inputs, evaluate

# Two float64 computations of one formula in another order differ by some thousand roundings
# at most; a wrong formula is off by percents.
RELATIVE = 1e-11
ROUNDING = 8 * torch.finfo(torch.float64).eps


def disagreements(op: Op, source: str, inputs: Inputs) -> list[str]:
    """The results on which the reference and an independent implementation disagree."""
    ours = evaluate(op, op["eager"].call, inputs)
    theirs = evaluate(op, op.independents[source], inputs)
    scale = max(value.nan_to_num().norm().item() for value in theirs.values())
    wrong = [] if set(ours) == set(theirs) else [f"results {sorted(set(ours) ^ set(theirs))}"]
    for name in set(ours) & set(theirs):
        one, other = ours[name], theirs[name]
        both = one.isnan() & other.isnan()  # as the mean of no tokens
        one, other = (x.masked_fill(both, 0.0) for x in (one, other))
        error, size = (x.norm().item() for x in (one - other, other))
        # A result that cancels (nearly) to zero keeps the rounding of the terms that cancel.
        if not error <= RELATIVE * size + ROUNDING * scale < math.inf:
            wrong.append(f"{name}: differs by {error:.3g} of {size:.3g}")
    return wrong
