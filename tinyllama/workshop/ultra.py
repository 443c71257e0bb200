"""The open exercise of V4: a file with the faults of a published ultra-fused block.

Its requirements are checked in order, and no page says what they are.
"""

from pathlib import Path
from types import ModuleType

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.check.run import Candidate, Outcome, run
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.kernels.launch import Kernel
from tinyllama.harness.machine.errors import UsageError
from tinyllama.ops import OPS

OP, PROVIDER = "add_rms_norm", "lesson"
HOLDS = "all that is required holds"


def judge(path: Path, device: torch.device) -> tuple[int, int, str]:
    """How many of how many requirements hold, and what is wrong with the first that does not.

    Raises UsageError for a file that cannot be imported, or that declares no provider ``lesson`` of
    ``add_rms_norm``.
    """
    op = OPS[OP]
    with providers_restored(OPS.values()):
        try:
            module = load_file(path, Registry())
        except Exception as error:
            text = f"{path} cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(text) from error
        if PROVIDER not in op.providers:
            raise UsageError(f"{path} declares no provider {PROVIDER!r} of {OP}: keep its name")
        return _judged(module, op, op[PROVIDER], device)


def _judged(
    module: ModuleType, op: Op, provider: Provider, device: torch.device
) -> tuple[int, int, str]:
    candidate = Candidate(op, provider, device)
    requirements = [
        lambda: _wrong(candidate, "outputs"),
        lambda: _idle(module, candidate),
        lambda: _wrong(candidate, "gradients"),
        lambda: _wrong(candidate, "absent gradients"),
    ]
    for index, requirement in enumerate(requirements):
        if fault := requirement():
            return index, len(requirements), fault
    return len(requirements), len(requirements), HOLDS


def _wrong(candidate: Candidate, check: str) -> str | None:
    (finding,) = run(candidate, only=[check])
    return None if finding.outcome is Outcome.PASSED else f"{finding.check}: {finding.message}"


def _idle(module: ModuleType, candidate: Candidate) -> str | None:
    """A kernel of the file that no call launches."""
    case = candidate.smallest()
    launches = launches_of(candidate.op, candidate.provider, case.case, case.dtype)
    launched = {id(launch.kernel) for launch in launches}
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, Kernel)}
    idle = [name for name, kernel in kernels.items() if id(kernel) not in launched]
    if not idle:
        return None
    return f"{', '.join(idle)}: never launched, so whatever is fast here is something else"
