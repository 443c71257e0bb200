"""What a comparison found, and the exit status of a run. It imports nothing, so that the process
that only starts a judge begins at once.
"""

from collections.abc import Iterable
from enum import Enum


class Outcome(Enum):
    """What a comparison found: its title, and the exit status of a run. The one that decides a run
    comes last: what is proved before what is only unknown."""

    IDENTICAL = "IDENTICAL", 0
    SAME = "SAME", 0
    FASTER = "FASTER", 0
    NEW = "NEW", 0
    NOT_DECIDED = "NOT DECIDED", 9  # since another decides, whose status a run has
    INCONCLUSIVE = "INCONCLUSIVE", 11
    NO_BASELINE = "NO BASELINE", 12
    OTHER_DEVICE_OR_VERSION = "OTHER DEVICE OR VERSION", 13
    BUSY = "BUSY", 14
    MISSING = "MISSING", 15
    NOT_JUDGED = "NOT JUDGED", 17
    SLOWER = "SLOWER", 10
    WRONG_RESULT = "WRONG RESULT", 16

    def __init__(self, title: str, status: int) -> None:
        self.title = title
        self.status = status

    @property
    def green(self) -> bool:
        return self.status == 0

    @property
    def may_be_baseline(self) -> bool:
        """Whether a record of this outcome may be a baseline: good, or the first of its kind."""
        return self.green or self in (Outcome.NO_BASELINE, Outcome.OTHER_DEVICE_OR_VERSION)


# Of the gate, in one line; docs/gate.md says more.
TO_DO = {
    Outcome.NOT_DECIDED: "fix what decides first",
    Outcome.SLOWER: "fix it, or accept it in accepted_slowdowns.toml; another run will not help",
    Outcome.INCONCLUSIVE: "find the source of the noise (tinyllama certify), or state a wider "
    "tolerance for the op in an earlier change",
    Outcome.NO_BASELINE: "restore the old name or inputs of the benchmark",
    Outcome.OTHER_DEVICE_OR_VERSION: "run both sides in one environment on one device",
    Outcome.BUSY: "nothing was judged: stop the other work, or cool the device, and run again",
    Outcome.MISSING: "do what the text of each MISSING verdict says; restore a benchmark that the "
    "candidate lacks, or accept its removal in accepted_slowdowns.toml",
    Outcome.WRONG_RESULT: "fix the result (tinyllama check FILE); a time counts only with it",
    Outcome.NOT_JUDGED: "remove the reason that the verdict begins with, and gate again",
}


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of several together, which decides a run; SAME of none."""
    return max(outcomes, key=list(Outcome).index, default=Outcome.SAME)
