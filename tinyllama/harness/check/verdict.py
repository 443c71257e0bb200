"""What findings amount to: which one ends ``tinyllama check`` with 1, and which of two counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.names import APART, INTERPRETED_ALONE, LAUNCHED

# These call the candidate as its op declares: an error in a plain case refuses the author's case.
AS_DECLARED = (
    *("outputs", "gradients", "unwritten memory", "untouched inputs", "out of bounds", LAUNCHED),
    *("races", "program order", "determinism", "backward twice", APART),
)
LEAST = {"unsafe": 2, "refused": 3, "warning": 4}  # number of ranks that fail, from the worst


@dataclass(frozen=True)
class Provided:
    """A provider that is checked. with_reference: whether the file that declares it declares its
    reference too; plain_cases: their names, the smallest first; op: the op's name; missing: why it
    cannot run on the device."""

    name: str
    with_reference: bool
    plain_cases: tuple[str, ...]
    op: str = ""
    missing: str | None = None


def fails(finding: Finding, provided: Provided, least: str = "unsafe") -> bool:
    """Whether a finding has one of the failing ranks, or refuses a case that the author declares.

    least: the least rank that fails, one of `LEAST`.
    """
    if finding.rank in list(Rank)[: LEAST[least]]:
        return True
    declared = finding.check in AS_DECLARED and finding.case in ("", *provided.plain_cases)
    return finding.rank is Rank.REFUSED and declared


def undecided(findings: Sequence[Finding], provided: Provided) -> bool:
    """Whether no check could be made, or outputs or gradients were compared in no case: not even in
    the smallest, which is tried first."""
    smallest = ("", *provided.plain_cases[:1])
    return all(finding.outcome is Outcome.UNSUPPORTED for finding in findings) or any(
        finding.outcome is Outcome.BLOCKED and finding.case in smallest
        for finding in findings
        if finding.check in ("outputs", "gradients")
    )


def merged(on_gpu: Finding, interpreted: Finding, launched: bool = True) -> Finding:
    """The worse of two findings of one check; of two alike the interpreted one, which names lines.

    launched: whether a kernel was launched in the process that interprets. What it could not
    interpret is BLOCKED, unless the GPU shows as much.
    """
    alone = interpreted.check in INTERPRETED_ALONE
    if alone and not launched and interpreted.outcome.good:
        text = "no kernel launched for tensors on the CPU"
        interpreted = Finding(interpreted.check, Outcome.BLOCKED, message=text)
    if interpreted.outcome in (Outcome.CRASHED, Outcome.BLOCKED):
        text = f"not interpreted: {interpreted.message}"
        interpreted = replace(interpreted, outcome=Outcome.BLOCKED, special=None, message=text)
        if not alone and on_gpu.outcome is Outcome.PASSED:
            return on_gpu
    return min((interpreted, on_gpu), key=_severity)


def _severity(finding: Finding) -> int:
    if finding.rank is not None:
        return list(Rank).index(finding.rank)
    return len(Rank) + (Outcome.BLOCKED, Outcome.PASSED, Outcome.UNSUPPORTED).index(finding.outcome)
