"""What the checks of a provider say, and what that amounts to. Nothing here needs torch."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinyllama.harness.check.names import APART, INTERPRETED_ALONE, LAUNCHED

UNSAFE = {  # of resources: but for spills
    *("unwritten memory", "untouched inputs", "out of bounds", "races", "program order"),
    *("determinism", "resources", "side stream"),
}
# These call the candidate as its op declares: an error in a plain case refuses the author's case.
AS_DECLARED = (
    *("outputs", "gradients", "unwritten memory", "untouched inputs", "out of bounds", LAUNCHED),
    *("races", "program order", "determinism", "backward twice", APART),
)
LEAST = {"unsafe": 2, "refused": 3, "warning": 4}  # number of ranks that fail, from the worst
# In a message: a result that is wrong, the kernels that were launched, and a line of a file.
_RESULT = re.compile(r"((?:grad )?[\w\[\]]+)(?:: at \[| is missing)")
_KERNELS, _NAME = re.compile("; kernels: .*"), re.compile(r"([\w.]+) \(")
_LINE = re.compile(r"\S+:\d+: ")


class Outcome(enum.Enum):
    """How a check ended.

    PASSED. FAILED: a result is wrong, and the message names it. CRASHED: the candidate raised an
    error. UNSUPPORTED: the check cannot be made here, or the candidate does not claim to cover it.
    BLOCKED: it was not tried, since what it needs has failed; the message says what.
    """

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    BLOCKED = "blocked"

    @property
    def good(self) -> bool:
        return self in (Outcome.PASSED, Outcome.UNSUPPORTED)


class Rank(enum.Enum):
    """How much a fault matters, the worst first.

    WRONG: a result is wrong or missing. UNSAFE: memory of others is read or changed, results depend
    on order or chance, or a chip cannot run it. REFUSED: a call raises an error where the reference
    gives a result. WARNING: a likely misuse goes unnoticed.
    """

    WRONG = "wrong result"
    UNSAFE = "unsafe"
    REFUSED = "refused"
    WARNING = "warning"


class GpuLostError(RuntimeError):
    """No call on the GPU works in this process any more."""


@dataclass(frozen=True)
class Finding:
    """The answer of one check. case: the smallest that shows the fault; message: what was seen;
    traceback: of a crash; special: its rank, where it is not the rank of every fault of the check;
    untried: the dtypes in which a plain case could not be tried, such as ``bf16, fp16``.
    """

    check: str
    outcome: Outcome
    case: str = ""
    message: str = ""
    traceback: str = ""
    special: Rank | None = None
    untried: str = ""

    @property
    def rank(self) -> Rank | None:
        """How much the fault matters; None where the check found none, or was not tried."""
        if self.outcome.good or self.outcome is Outcome.BLOCKED:
            return None
        if self.outcome is Outcome.CRASHED:
            return self.special or Rank.REFUSED
        return self.special or (Rank.UNSAFE if self.check in UNSAFE else Rank.WRONG)

    @property
    def verdict(self) -> str:
        """The rank of a fault, else the outcome."""
        return self.rank.value if self.rank else self.outcome.value

    def as_dict(self) -> dict[str, str]:
        """As plain data, with outcome and rank as words; the rank of what holds is empty. A warning
        is its own outcome."""
        outcome = self.rank if self.rank is Rank.WARNING else self.outcome
        words = {"outcome": outcome.value, "rank": self.rank.value if self.rank else ""}
        return {**{k: v for k, v in vars(self).items() if k != "special"}, **words}

    def has_cause_of(self, other: "Finding") -> bool:
        """Whether one cause explains both faults: they are of one rank, and say the same results of
        the same kernels are wrong; or the same line raised an error or left its memory."""
        if self.rank is not other.rank:
            return False
        results, kernels, line = _named(self.message)
        results_of_other, kernels_of_other, line_of_other = _named(other.message)
        if results or results_of_other:
            alike = not (kernels and kernels_of_other) or bool(kernels & kernels_of_other)
            return alike and bool(results & results_of_other)
        return bool(line) and line == line_of_other


def _named(message: str) -> tuple[set[str], set[str], str]:
    """The wrong results, the kernels and the first ``FILE:LINE`` that a message names."""
    kernels, line = _KERNELS.search(message), _LINE.search(message)
    names = set(_NAME.findall(kernels[0])) if kernels else set[str]()
    return set(_RESULT.findall(message)), names, line[0] if line else ""


@dataclass(frozen=True)
class Provided:
    """A provider that is checked. with_reference: whether the file that declares it declares its
    reference too; plain_cases: their names, the smallest first; missing: why it cannot run on the
    device; notes: what is to be known of its declaration."""

    name: str
    with_reference: bool
    plain_cases: tuple[str, ...]
    missing: str | None = None
    notes: tuple[str, ...] = ()


def fails(finding: Finding, provided: Provided, least: str = "unsafe") -> bool:
    """Whether a finding has one of the failing ranks, or refuses a case that the author declares.

    least: the least rank that fails, one of `LEAST`.
    """
    if finding.rank in list(Rank)[: LEAST[least]]:
        return True
    declared = finding.check in AS_DECLARED and finding.case in ("", *provided.plain_cases)
    return finding.rank is Rank.REFUSED and declared


def undecided(findings: Sequence[Finding]) -> str:
    """What speaks against a verdict although nothing fails, in words: no check could be made, or
    outputs or gradients were not compared in some dtype. "" where there is a verdict."""
    for finding in findings:
        if finding.check not in ("outputs", "gradients"):
            continue
        if finding.outcome is Outcome.BLOCKED:
            return f"not judged: {finding.check} could not be tried"
        if finding.untried:
            return f"not judged in {finding.untried}"
    if all(finding.outcome is Outcome.UNSUPPORTED for finding in findings):
        return "nothing could be checked here"
    blocked = all(f.outcome in (Outcome.UNSUPPORTED, Outcome.BLOCKED) for f in findings)
    return "not judged: no check could be tried" if blocked else ""


def merged(on_gpu: Finding, interpreted: Finding | None, launched: bool = True) -> Finding:
    """The worse of two findings of one check; of two alike the interpreted one, which names lines.

    launched: whether a kernel was launched in the process that interprets. What it could not
    interpret is BLOCKED, unless the GPU shows as much.
    """
    if interpreted is None:
        return on_gpu
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
