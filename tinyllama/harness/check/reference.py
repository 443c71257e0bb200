"""Is the reference itself right? What it gives, against the op's independent code; and whether it
computes in float64 where it is the oracle.

A verdict is no better than the reference: one that contradicts the code that was declared to check
it, or that rounds to float32 on the way, must not pass in silence.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import apart, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, evaluate, make_inputs
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.bounds import author_line
from tinyllama.harness.machine.modes import DispatchMode

# Both sides compute in float64 (eps 2e-16), and sums of thousands of terms may lose four digits
# at most; a wrong formula is off by percents.
RELATIVE = 1e-11
ROUNDING = 8 * torch.finfo(torch.float64).eps


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
    """That the reference leaves float64, and where, in words; empty where it does not."""
    op = case.op
    declared = {tensor.dtype for tensor in (*op.inputs.values(), *op.outputs.values())}
    with StaysInDouble(declared) as mode:
        evaluate(op, op["eager"].call, make_inputs(op, case.case, torch.float64, seed=seed))
    if not mode.rounded:
        return ""
    return (
        f"{mode.rounded}, but the reference is the oracle in float64: compute in "
        "torch.promote_types(x.dtype, torch.float32), not in float32"
    )


class StaysInDouble(DispatchMode):
    """While active, notes the author's line that first rounds float64 to a narrower dtype.

    meant: dtypes to which an op may round.
    """

    def __init__(self, meant: Collection[torch.dtype | None] = ()) -> None:
        super().__init__()
        self.meant, self.rounded = meant, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.rounded and not _makes_new_values(func):
            before = {x.dtype for x in tree_leaves((args, kwargs)) if _is_float(x)}
            dtypes = [x.dtype for x in tree_leaves(result) if _is_float(x) and x.itemsize < 8]
            if torch.float64 in before and dtypes and dtypes[0] not in self.meant:
                dtype = str(dtypes[0]).removeprefix("torch.")
                self.rounded = f"{author_line() or 'torch: '}rounds float64 to {dtype}"
        return result


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _makes_new_values(func: Any) -> bool:
    """Whether an op takes no more than the shape of its input: ``empty_like``, ``new_zeros``."""
    name = str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else ""
    return name.startswith("new_") or name.endswith("_like")
