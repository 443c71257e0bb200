"""The open exercise of V4: a file with the faults of a published ultra-fused block.

What is asked of it is asked one thing after the other, and no page says what it is.
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
HOLDS = "all that is asked holds"


def judge(path: Path, device: torch.device) -> tuple[int, int, str]:
    """How many of how many demands hold, and what the first one that does not has found.

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
    demands = [
        lambda: _wrong(candidate, "outputs"),
        lambda: _idle(module, candidate),
        lambda: _wrong(candidate, "gradients"),
        lambda: _wrong(candidate, "absent gradients"),
    ]
    for index, demand in enumerate(demands):
        if found := demand():
            return index, len(demands), found
    return len(demands), len(demands), HOLDS


def _wrong(candidate: Candidate, check: str) -> str | None:
    (found,) = run(candidate, only=[check])
    return None if found.outcome is Outcome.PASSED else f"{found.check}: {found.message}"


def _idle(module: ModuleType, candidate: Candidate) -> str | None:
    """A kernel of the file that no call launches."""
    case = candidate.smallest()
    launches = launches_of(candidate.op, candidate.provider, case.case, case.dtype)
    ran = {id(launch.kernel) for launch in launches}
    idle = [n for n, one in vars(module).items() if isinstance(one, Kernel) and id(one) not in ran]
    if not idle:
        return None
    return f"{', '.join(idle)}: never launched, so whatever is fast here is something else"
