"""The colour and the mark of every contender and provider: the same wherever a page shows one."""

from collections.abc import Iterable

from tinyllama.harness.page.svg import COLOURS, MARKS, Key
from tinyllama.harness.records.entries import OpEntry, StepEntry, SweepEntry, Timed
from tinyllama.harness.records.results import Record

FLOOR = Key("floor: the parts of a step alone", "floor", "bar")
SHOWN = (StepEntry, OpEntry, SweepEntry)  # the kinds of entries that a page has rows of
ORDER = ("tier", "ours")  # what is not a peer


class Keys:
    """The keys of all contenders and providers of some records.

    The n-th name has colour n, and mark n shifted by one after each turn of the colours: up to 64
    names are pairs of their own, and seven names that follow each other differ in both. Peers are
    counted apart, are hollow, and have the mark four further.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        timed = [e for record in records for e in record.entries if isinstance(e, SHOWN)]
        found = {(e.who, e.role) for e in timed if e.role != "floor"}
        placed = sorted((_place(role), who) for who, role in found if role != "peer")
        ours = list(dict.fromkeys(who for _, who in placed))
        peers = sorted({who for who, role in found if role == "peer"})
        self.all: dict[tuple[str, bool], Key] = {}
        for hollow, names in ((False, ours), (True, peers)):
            for n, name in enumerate(names):
                mark = MARKS[(n + n // len(COLOURS) + 4 * hollow) % len(MARKS)]
                label = f"{name} (peer)" if hollow else name
                key = Key(label, COLOURS[n % len(COLOURS)], mark, hollow)
                self.all[name, hollow] = key

    def of(self, entry: Timed) -> Key:
        """The key of whom an entry is about."""
        return FLOOR if entry.role == "floor" else self.all[entry.who, entry.role == "peer"]


def _place(role: str) -> int:
    return ORDER.index(role) if role in ORDER else len(ORDER)
