"""Values of a candidate, judged in a process that never imports it.

The judge draws a seed that nobody else knows, computes the references for its inputs, and decides.
The candidate's process gets that seed, and gives back its results as one file of safetensors; the
rest is JSON. So a candidate that replaces its runner, the inputs, the reference or a function of
torch changes nothing here but its own results. It can give those of the reference instead of
computing them: that, only a review sees.
"""

import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import ContractError, evaluate
from tinyllama.harness.declare.op import Op


def cases_of(op: Op) -> list[OpCase]:
    """Those that are judged: every shape in every dtype; on the first shape, extreme values and
    strides that no two tensors share."""
    eager, first = op["eager"], OpCase(op, op["eager"], op.cases[0], op.dtypes[0])
    cases = [OpCase(op, eager, case, dtype) for dtype in op.dtypes for case in op.cases]
    extremes = [replace(first, extreme=name) for name in op.extremes]
    return [*cases, *extremes, replace(first, layout="distinct")]


def answer(candidate: Candidate, number: int, seed: int, file: Path) -> None:
    """In the candidate's process: write the results for the inputs that a seed gives in the case of
    this number."""
    results = candidate.results(cases_of(candidate.op)[number].inputs(candidate.device, seed))
    dense = torch.contiguous_format
    save_file({name: x.clone(memory_format=dense).cpu() for name, x in results.items()}, file)


def faults(case: OpCase, ask: Callable[[int, Path], None]) -> str:
    """In the judge's: what is wrong with a candidate's results of a case; "" where nothing is.

    ask: has the candidate's process write its results for a seed to a file. Raises what it raises.
    """
    seed = secrets.randbelow(2**62)
    inputs = case.inputs(seed=seed)
    expected = evaluate(case.op, case.provider.call, inputs)
    with tempfile.TemporaryDirectory(prefix="judged-") as folder:
        file = Path(folder) / "results"
        ask(seed, file)
        try:
            results = load_file(file)
        except Exception as error:  # the answer may be any
            return f"its results cannot be read: {type(error).__name__}: {error}"
    for name, result in results.items():
        if name not in expected:
            return f"{name} is not asked for"
        right = expected[name].dtype, expected[name].shape
        if (result.dtype, result.shape) != right:
            return f"{name} is {(result.dtype, tuple(result.shape))}, not {right}"
    try:
        comparisons = case.judge(results, inputs)
    except ContractError as error:
        return str(error)
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)
