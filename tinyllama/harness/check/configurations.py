"""Every configuration that a kernel may be tuned to gives right results, by its name."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Candidate, Finding, Outcome, Rank, Unsupported
from tinyllama.harness.check.judge import faults
from tinyllama.harness.check.resizing import general
from tinyllama.harness.kernels.configs import SPACES, recorded_keys
from tinyllama.harness.kernels.launch import HAS_TRITON

SECONDS = 60.0  # of this thread's processor time, after which no other configuration is tried
TIMED = ", launched twice, as where it is timed"
Forced = tuple[str, contextlib.AbstractContextManager[None]]


def configurations(candidate: Candidate) -> Finding | str:
    """Results are right in each configuration of ``triton.autotune`` and of a
    `tinyllama.harness.kernels.configs.Space`; the text says how many were tried. So they are where
    ``triton.autotune`` has timed a launch on the caller's own memory.

    An error refuses a configuration: out of resources, it is never chosen.

    Raises Unsupported where no kernel has several, or where right ones take so long that not all
    were tried.
    """
    case = general(candidate)
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
