"""The configurations of kernels: each gives right results, and kernels compile for every chip."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from tinyllama.harness.check.candidate import NO_KERNELS, Candidate, Problem, Unsupported
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.judge import faults
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.kernels.configs import SPACES, recorded_keys
from tinyllama.harness.kernels.launch import HAS_TRITON, Launch
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking

FITS, SPILLS, UNFIT = range(3)
SECONDS = 60.0  # of this thread's processor time, after which no other configuration is tried
TIMED = ", launched twice, as where it is timed"
Forced = tuple[str, contextlib.AbstractContextManager[None]]


def resources(candidate: Candidate) -> Problem | Finding | str:
    """Each kernel of the largest case, and of cases with an axis of length 1, compiles for each
    chip and fits it: shared memory, threads. One that spills registers is right, and slow: that is
    a warning.

    Of a kernel under ``triton.autotune`` one configuration must fit, since those that do not are
    not chosen; the text names these.
    """
    if "triton" not in candidate.provider.requires:
        raise Unsupported(NO_KERNELS)
    compiled: set[str] = set()
    left_out: dict[str, None] = {}
    spilling: Problem = None
    for case, chip in _compiled_cases(candidate):
        try:
            launches = launches_of(case.op, case.provider, case.case, case.dtype, chip=chip)
        except Exception as error:
            text = f"its launches are recorded on tensors without values, which raised {error!r}"
            return Finding("resources", Outcome.BLOCKED, str(case), text)
        for launch in launches:
            kernel = compilation(launch, chip)
            if kernel.key in compiled:
                continue
            compiled.add(kernel.key)
            state, text = _state(kernel)
            text = f"{kernel.kernel}{_configured(launch)} on {chip}: {text}"
            of_configs = _other_configurations(case, chip, launch) if state is not FITS else []
            best = min([state, *of_configs])
            if best is FITS and state is not FITS:
                left_out[text] = None
            if of_configs and best is not FITS:
                text += f"; none of its {len(of_configs)} other configurations fits either"
            if best is UNFIT:
                return case, text
            if best is SPILLS:
                spilling = spilling or (case, text, Rank.WARNING)
    if not compiled:
        raise Unsupported(
            "it launches no kernel made by tinyllama.harness.kernels.jit or triton.jit"
        )
    if spilling:
        return spilling
    return f"configurations that autotune leaves out: {'; '.join(left_out)}" if left_out else ""


def _compiled_cases(candidate: Candidate) -> Iterator[tuple[OpCase, str]]:
    """The largest case in each dtype for each chip. For the first chip also the smallest case with
    each axis of length 1: Triton makes a constant of an argument that is 1, and a constant has no
    methods of a tensor."""
    chips = [name for name in CHIPS if lacking(name) is None]
    largest = _largest(candidate)
    for chip in chips:
        for dtype in candidate.dtypes:
            yield OpCase(candidate.op, candidate.provider, largest.case, dtype), chip
    base = candidate.smallest()
    for axis, size in base.case.dims.items():
        case = candidate.resized(base, axis, 1) if isinstance(size, int) and size > 1 else None
        if case is not None and case.case.dims[axis] == 1 and candidate.takes(case):
            yield from ((case, chip) for chip in chips[:1])


def _largest(candidate: Candidate) -> OpCase:
    timed = (
        OpCase(candidate.op, candidate.provider, case, candidate.dtypes[0])
        for case in reversed(candidate.op.timed)
    )
    return next((case for case in timed if case.unsupported() is None), candidate.smallest())


def _state(compiled: Compilation) -> tuple[int, str]:
    """Whether a kernel fits its chip, and what passes a limit, in words."""
    excesses, taken = compiled.verdict()
    unfit = taken is None or bool(taken.unfit())
    return (FITS if not excesses else UNFIT if unfit else SPILLS), "; ".join(excesses)


def _configured(launch: Launch) -> str:
    """`` [BLOCK=64, num_warps=8]``, of a launch under ``triton.autotune``."""
    if launch.tuned is None:
        return ""
    from tinyllama.harness.kernels.tuned import config_text

    return f" [{config_text(launch.tuned.chosen)}]"


def _other_configurations(case: OpCase, chip: str, launch: Launch) -> list[int]:
    """The states of a kernel in its other configurations, until one fits: of several launches of
    the kernel the worst."""
    states: list[int] = []
    tuned = launch.tuned
    for config in tuned.configs if tuned else ():
        if config is tuned.chosen or FITS in states:
            continue
        with tuned.forced(config):
            launches = launches_of(case.op, case.provider, case.case, case.dtype, chip=chip)
        same = (x for x in launches if x.tuned and x.tuned.kernel is tuned.kernel)
        states.append(max((_state(compilation(x, chip))[0] for x in same), default=UNFIT))
    return states


def configurations(candidate: Candidate) -> Finding | str:
    """Results are right in each configuration of ``triton.autotune`` and of a
    `tinyllama.harness.kernels.configs.Space`; the text says how many were tried. So they are where
    ``triton.autotune`` has timed a launch on the caller's own memory.

    An error refuses a configuration: out of resources, it is never chosen.

    Raises Unsupported where no kernel has several, or where right ones take so long that not all
    were tried.
    """
    case = candidate.general()
    settings = list(_settings(candidate, case))
    if not settings:
        raise Unsupported("it has no kernel with several configurations")
    configs = sum(TIMED not in name for name, _ in settings)
    refused: Finding | None = None
    started = time.thread_time()
    for count, (name, forced) in enumerate(settings):
        if time.thread_time() - started > SECONDS:
            text = f"{count} of {configs} configurations are right"
            raise Unsupported(f"{text}; those after {SECONDS:.0f} s were not tried")
        with forced:
            fault = next(faults(candidate, case), None)
        if fault is None:
            continue
        text = f"{name}: {fault.check}: {fault.message}"
        fault = replace(fault, check="configurations", message=text, special=fault.rank)
        if fault.outcome is not Outcome.CRASHED:
            return fault
        refused = refused or replace(fault, special=Rank.REFUSED)
    return refused or f"{configs} configurations"


def _settings(candidate: Candidate, case: OpCase) -> Iterator[Forced]:
    """Each configuration of each kernel that a case launches, and what forces it."""
    if not HAS_TRITON:
        return
    from tinyllama.harness.kernels.tuned import config_text, tuned

    with tuned() as kernels, recorded_keys() as keys:
        candidate.results(candidate.inputs(case))
    for kernel in (kernel for kernel in kernels.values() if len(kernel.configs) > 1):
        for config in kernel.configs:
            yield f"{kernel.identity} [{config_text(config)}]", kernel.forced(config)
        first = kernel.configs[0]
        name = f"{kernel.identity} [{config_text(first)}]{TIMED}"
        yield name, kernel.forced(first, timed=True)
    for (name, text), key in dict(keys).items():
        configs = SPACES[name].configs(**key)
        for choice in configs if len(configs) > 1 else ():
            yield f"{name} {text} [{choice}]", SPACES[name].force(choice, **key)
