"""Kernels compiled for every chip that the machine has a compiler for, and held to its limits."""

from collections.abc import Iterator

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import (
    NO_KERNELS,
    Candidate,
    Problem,
    Rank,
    Unsupported,
)
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.check.resizing import resized
from tinyllama.harness.kernels.launch import Launch
from tinyllama.harness.kernels.limits import verdict
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking


def resources(candidate: Candidate) -> Problem | str:
    """Each kernel of the largest case compiles for each chip: shared memory, threads, no spills.
    A kernel that spills is right, and slow: that is advice.

    Of a kernel under ``triton.autotune`` one configuration must fit, since those that do not are
    not chosen; the text names these.
    """
    if "triton" not in candidate.provider.requires:
        raise Unsupported(NO_KERNELS)
    case = _largest(candidate)
    compiled: set[str] = set()
    skipped: dict[str, None] = {}
    spilling: Problem = None
    chips = [name for name in CHIPS if lacking(name) is None]
    for chip in chips:
        for dtype in candidate.dtypes:
            for launch in _launches(candidate, case, dtype, chip):
                found = compilation(launch, chip)
                if found.key in compiled:
                    continue
                compiled.add(found.key)
                excesses, unfit = _excesses(found)
                if not excesses:
                    continue
                text = f"{found.kernel}{_configured(launch)} on {chip}: {'; '.join(excesses)}"
                if others := len(launch.tuned.configs) - 1 if launch.tuned else 0:
                    if _another_fits(candidate, case, dtype, chip, launch, unfit):
                        skipped[text] = None
                        continue
                    text += f"; none of its {others} other configurations fits either"
                where = OpCase(candidate.op, candidate.provider, case.case, dtype)
                if unfit:
                    return where, text
                spilling = spilling or (where, text, Rank.WARNING)
    for one in _of_one_entry(candidate) if compiled else ():
        for launch in _launches(candidate, one, one.dtype, chips[0]):
            found = compilation(launch, chips[0])
            excesses, unfit = ([], False) if found.key in compiled else _excesses(found)
            compiled.add(found.key)
            if unfit:
                return one, f"{found.kernel}{_configured(launch)} on {chips[0]}: {excesses[0]}"
    if not compiled:
        raise Unsupported(
            "it launches no kernel made by tinyllama.harness.kernels.jit or triton.jit"
        )
    if spilling:
        return spilling
    return f"configurations that autotune leaves out: {'; '.join(skipped)}" if skipped else ""


def _of_one_entry(candidate: Candidate) -> Iterator[OpCase]:
    """The smallest case with each axis of one entry: Triton makes a constant of an argument that is
    1, and a constant has no methods of a tensor."""
    base = candidate.smallest()
    for axis, size in base.case.dims.items():
        one = resized(candidate, base, axis, 1) if isinstance(size, int) and size > 1 else None
        if one is not None and one.case.dims[axis] == 1 and candidate.takes(one):
            yield one


def _excesses(found: Compilation) -> tuple[list[str], bool]:
    """What passes a limit of the chip, in words, and whether the chip can therefore not run it."""
    excesses, taken = verdict(found, ())
    return excesses, bool(excesses) and (taken is None or bool(taken.unfit()))


def _configured(launch: Launch) -> str:
    """`` [BLOCK=64, num_warps=8]``, of a launch under ``triton.autotune``."""
    if launch.tuned is None:
        return ""
    from tinyllama.harness.kernels.tuned import config_text

    return f" [{config_text(launch.tuned.chosen)}]"


def _another_fits(
    candidate: Candidate,
    case: OpCase,
    dtype: torch.dtype,
    chip: str,
    launch: Launch,
    may_spill: bool,
) -> bool:
    """Whether another configuration of a launch's kernel is within a chip's limits."""
    for config in (one for one in launch.tuned.configs if one is not launch.tuned.chosen):
        with launch.tuned.forced(config):
            again = _launches(candidate, case, dtype, chip)
        own = [one for one in again if one.tuned and one.tuned.kernel is launch.tuned.kernel]
        each = [_excesses(compilation(one, chip)) for one in own]
        if own and not any(unfit if may_spill else excesses for excesses, unfit in each):
            return True
    return False


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
