"""Kernels compiled for every chip that the machine has a compiler for, and held to its limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tinyllama.harness.cases import OpCase
from tinyllama.harness.checks.finding import Candidate, Problem, Unsupported
from tinyllama.harness.kernels import Launch
from tinyllama.harness.limits import Known, verdict
from tinyllama.harness.resources import CHIPS, compilation, lacking, launches_of


def resources(candidate: Candidate, known: Sequence[Known] = ()) -> Problem:
    """Each kernel of the largest case compiles for each chip: shared memory, threads, no spills.

    known: excesses that are declared.
    """
    if "triton" not in candidate.provider.requires:
        raise Unsupported("it launches no kernels of Triton's")
    case = _largest(candidate)
    compiled: set[str] = set()
    chips = [name for name in CHIPS if lacking(name) is None]
    for chip in chips:
        for dtype in candidate.dtypes:
            for launch in _launches(candidate, case, dtype, chip):
                found = compilation(launch, chip)
                if found.key in compiled:
                    continue
                compiled.add(found.key)
                excesses, _ = verdict(found, known)
                if excesses:
                    where = OpCase(candidate.op, candidate.provider, case.case, dtype)
                    return where, f"{found.kernel} on {chip}: {'; '.join(excesses)}"
    if not compiled:
        raise Unsupported(
            "it launches no kernel made by tinyllama.harness.kernels.jit or triton.jit"
        )
    return None


def _launches(
    candidate: Candidate, case: OpCase, dtype: torch.dtype, chip: str
) -> Sequence[Launch]:
    """Raises Unsupported where the code around the kernels looks at values."""
    try:
        return launches_of(candidate.op, candidate.provider, case.case, dtype, chip=chip)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise Unsupported(
            f"it reads values, and is compiled on tensors without: {error}"
        ) from error


def _largest(candidate: Candidate) -> OpCase:
    timed = [
        OpCase(candidate.op, candidate.provider, case, candidate.dtypes[0])
        for case in candidate.op.timed
    ]
    fitting = [case for case in timed if case.unsupported() is None]
    return fitting[-1] if fitting else candidate.plain()[-1]
