"""Kernels compiled for every chip that the machine has a compiler for, and held to its limits."""

from __future__ import annotations

import torch

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks.finding import Candidate, Problem, Unsupported
from tinyllama.harness.correct.launched import launches_of
from tinyllama.harness.kernels.launch import Launch
from tinyllama.harness.kernels.limits import verdict
from tinyllama.harness.kernels.resources import CHIPS, compilation, lacking


def resources(candidate: Candidate) -> Problem:
    """Each kernel of the largest case compiles for each chip: shared memory, threads, no spills."""
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
                excesses, _ = verdict(found, ())
                if excesses:
                    where = OpCase(candidate.op, candidate.provider, case.case, dtype)
                    return where, f"{found.kernel} on {chip}: {'; '.join(excesses)}"
    if not compiled:
        raise Unsupported(
            "it launches no kernel made by tinyllama.harness.kernels.jit or triton.jit"
        )
    return None


def _launches(candidate: Candidate, case: OpCase, dtype: torch.dtype, chip: str) -> list[Launch]:
    """Raises Unsupported where the code around the kernels looks at values."""
    try:
        return launches_of(candidate.op, candidate.provider, case.case, dtype, chip=chip)
    except RuntimeError as error:
        if not _is_of_meta_tensors(error):
            raise
        text = f"it reads values, and is compiled on tensors that have none: {error}"
        raise Unsupported(text) from error


def _is_of_meta_tensors(error: RuntimeError) -> bool:
    """Whether torch refuses to read a value of a tensor on the ``meta`` device.

    It has no type for that, only words: "Tensor.item() cannot be called on meta tensors"
    (aten/src/ATen/native/Scalar.cpp), "Cannot copy out of meta tensor; no data!" (Copy.cpp), and
    "... with arguments from the 'Meta' backend" of an operator without a meta version.
    """
    return "meta" in str(error).lower()


def _largest(candidate: Candidate) -> OpCase:
    timed = [
        OpCase(candidate.op, candidate.provider, case, candidate.dtypes[0])
        for case in candidate.op.timed
    ]
    fitting = [case for case in timed if case.unsupported() is None]
    return fitting[-1] if fitting else candidate.smallest()
