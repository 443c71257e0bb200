"""Is the reference itself right? What it gives, against the op's independent code; and whether it
computes in float64 where it is the oracle.

A verdict is no better than the reference: one that contradicts the code that was declared to check
it, or that converts its inputs to float32, must not pass in silence.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import apart, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, evaluate, make_inputs
from tinyllama.harness.declare.op import Op

# Both sides compute in float64 (eps 2e-16), and sums of thousands of terms may lose four digits
# at most; a wrong formula is off by percents.
RELATIVE = 1e-11
ROUNDING = 8 * torch.finfo(torch.float64).eps
# Values are moved by less than a rounding of float32. What is smooth then bends by their square,
# 2^-50; a rounding to float32 on the way jumps by up to 2^-24, a step of the op itself by far more.
MOVE = 2.0**-25
BEND, STEP = 2.0**-36, 2.0**-19


def disagreements(op: Op, source: str, inputs: Inputs) -> list[str]:
    """The results on which the reference and an independent implementation disagree."""
    ours = evaluate(op, op["eager"].call, inputs)
    theirs = evaluate(op, op.independents[source], inputs)
    scale = max(map(norm_of_finite, theirs.values()))
    wrong = [] if set(ours) == set(theirs) else [f"results {sorted(set(ours) ^ set(theirs))}"]
    for name in ours.keys() & theirs.keys():
        difference = apart(ours[name], theirs[name])  # a NaN in both is as the mean of no tokens
        error, size = difference.norm().item(), norm_of_finite(theirs[name])
        # A result that cancels (nearly) to zero keeps the rounding of the terms that cancel.
        if not error <= RELATIVE * size + ROUNDING * scale < math.inf:
            wrong.append(f"{name}: differs by {error:.3g} of {size:.3g}")
    return wrong


def narrowed(op: Op, inputs: Inputs) -> list[str]:
    """The results that the reference rounds to float32 on the way, for inputs in float64."""
    minus, middle, plus = (
        evaluate(op, op["eager"].call, _moved(inputs, by)) for by in (-MOVE, 0.0, MOVE)
    )
    names = []
    for name, value in middle.items():
        if value.is_floating_point():
            bend = (plus[name] - 2 * value + minus[name]).nan_to_num(0.0, 0.0, 0.0)
            size = value.nan_to_num(0.0, 0.0, 0.0).norm()
            if BEND * size < bend.norm() < STEP * size:
                names.append(name)
    return names


def _moved(inputs: Inputs, by: float) -> Inputs:
    """Each value times 1 + by r, with r at random from -1 to 1, the same in each call."""
    generator = torch.Generator().manual_seed(0)

    def move(value: torch.Tensor) -> torch.Tensor:
        r = torch.empty(value.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        return value * (1 + by * r.to(value.device))

    return inputs.mapped(move)


def faults(case: OpCase, seed: int) -> Iterator[tuple[str, str]]:
    """What is wrong with the reference on a plain or an extreme case: the name of a result, and
    words. Nothing of other providers and dtypes, which say no more about it. On the CPU: a formula
    is the same on every device, and a GPU's independent code may round parts of it to float32."""
    op = case.op
    varied = replace(case, extreme=None).varied
    if case.provider.name != "eager" or case.dtype is not op.dtypes[0] or varied:
        return
    inputs = make_inputs(op, case.case, torch.float64, seed=seed, extreme=case.extreme)
    for source in op.independents:
        for text in disagreements(op, source, inputs):
            name = text.partition(":")[0]
            yield name, f"the reference contradicts the independent code {source!r}: {text}"


def narrow(case: OpCase, seed: int) -> str:
    """That the reference leaves float64, in words; empty where it does not."""
    inputs = make_inputs(case.op, case.case, torch.float64, seed=seed)
    if not (names := narrowed(case.op, inputs)):
        return ""
    return (
        f"{', '.join(names)}: the reference is the oracle in float64, but rounds to float32 on the "
        "way: compute in torch.promote_types(x.dtype, torch.float32), not in float32"
    )
