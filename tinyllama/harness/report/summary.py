"""What a reader wants of a device's records first: what is fastest, missed, and changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry, Timed
from tinyllama.harness.records.outcome import Outcome
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Bar, Standing, Target, covered, judged
from tinyllama.harness.records.verdict import compare
from tinyllama.harness.report.tables import escaped, last_passes, latest

LINES = 20  # that a terminal gets
WORDS = {
    Outcome.FASTER: "better",
    Outcome.SLOWER: "worse",
    Outcome.INCONCLUSIVE: "perhaps worse",
}


@dataclass(frozen=True)
class Summary:
    """The newest record of each group of a device, and what they say, in lines.

    bars: the targets about what ran. misses: what a run said was missed, where no target says it
    anew.
    """

    device: str
    records: Sequence[Record]
    fastest: Sequence[str]
    bars: Sequence[Bar]
    misses: Sequence[str]
    changed: Sequence[str]

    @property
    def missed(self) -> list[str]:
        return [*(bar.text for bar in self.of(Standing.MISSED)), *self.misses]

    @property
    def parts(self) -> dict[str, Sequence[str]]:
        """Lines about what is fastest, missed and changed; at least one of each."""
        judged_bars = len(self.bars) - len(self.of(Standing.NOT_APPLICABLE))
        met = f"none of {judged_bars} bars" if judged_bars else "no bar is about these records"
        return {
            "fastest": self.fastest or ["no complete record of a step or an op"],
            "missed": self.missed or [met],
            "changed": self.changed or ["nothing to compare: one record of each group"],
        }

    def of(self, standing: Standing) -> list[Bar]:
        """The bars of a standing."""
        return [bar for bar in self.bars if bar.standing is standing]

    def lines(self, most: int) -> list[str]:
        """The summary for a terminal, with at most so many lines of each part."""
        newest = self.records[-1]
        lines = [f"{self.device}, {newest.day}: {newest.software}"]
        for name, texts in self.parts.items():
            cut = list(texts) if len(texts) <= most else list(texts[: most - 1])
            if len(cut) < len(texts):
                cut.append(f"and {len(texts) - len(cut)} more: --all")
            lines += [f"  {'' if n else name:<9}{text}" for n, text in enumerate(cut)]
        return lines

    def markdown(self) -> str:
        """The summary as lists under headings."""
        lines = [f"## {escaped(self.device)}"]
        for name, texts in self.parts.items():
            items = (f"- {escaped(text)}" for text in texts)
            lines += ["", f"{name.capitalize()}:", "", *items]
        return "\n".join([*lines, ""])


def terminal_lines(summaries: Sequence[Summary]) -> list[str]:
    """At most `LINES` lines of some devices: as many of each part as fit, newest device first."""
    for most in (10, 6, 4, 3, 2, 1):
        lines = [line for summary in summaries for line in summary.lines(most)]
        if len(lines) <= LINES:
            return lines
    return [*lines[: LINES - 1], "and other devices: --all, or --device NAME"]


def summaries(records: Iterable[Record], targets: Sequence[Target] = ()) -> list[Summary]:
    """A summary of each device, the newest device first."""
    by_device: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.date):
        by_device.setdefault(record.device, []).append(record)
    devices = [_summary(device, records, targets) for device, records in by_device.items()]
    return sorted(devices, key=lambda summary: summary.records[-1].date, reverse=True)


def _summary(device: str, records: Sequence[Record], targets: Sequence[Target]) -> Summary:
    newest = latest(records)
    bars = [bar for record in newest for bar in _bars(record, targets)]
    # A line about a target is judged anew; those of other repositories have no targets here.
    lines = [(record.group, line) for record in newest for line in record.missed]
    return Summary(
        device,
        newest,
        [*_fastest_steps(newest), *filter(None, map(_fastest_provider, newest))],
        bars,
        [f"{group}: {line}" for group, line in lines if not (bars and ": measured " in line)],
        list(_changes(newest, records)),
    )


def _bars(record: Record, targets: Iterable[Target]) -> Iterator[Bar]:
    """The targets that are about a record's device and what ran in it."""
    timed = [entry for entry in record.entries if isinstance(entry, (StepEntry, OpEntry))]
    for target, call, entries in covered(targets, timed):
        if target.concerns(record.device) and target.who in entries and entries[target.who].ran:
            ratio = target.measured(entries)
            why = "not measured" if ratio is None else ""
            yield judged(target, ratio, record.device, why, f"{' '.join(call)}: ")


def _fastest_steps(records: Iterable[Record]) -> Iterator[str]:
    """Of each record of steps the fastest of ours, over the fastest peer and the floor."""
    steps = [(record, _fastest(record.of(StepEntry), "tier")) for record in records]
    for record, ours in sorted(steps, key=lambda pair: pair[1].time if pair[1] else 0.0):
        if ours is None:
            continue
        text = f"{_title(record)}: {ours.who} {milliseconds(ours)}"
        peer = _fastest(record.of(StepEntry), "peer")
        if peer is not None:
            times = (ours.over or {}).get(peer.who) or f"{peer.time / ours.time:.2f}"
            text += f", {times} times as fast as {peer.who} ({milliseconds(peer)})"
        if ours.floor_share is not None:
            text += f", {ours.floor_share.median:.2f} of the floor's speed"
        yield text


def _fastest(steps: Iterable[StepEntry], role: str) -> StepEntry | None:
    ran = [step for step in steps if step.ran and step.role == role]
    return min(ran, key=lambda step: step.time, default=None)


def _fastest_provider(record: Record) -> str | None:
    """The provider that is fastest in most cases of a record of ops; None where it has none."""
    calls: dict[tuple[str, ...], list[OpEntry]] = {}
    for entry in last_passes(record):
        if entry.ran:
            calls.setdefault(entry.call, []).append(entry)
    orders = [sorted(entries, key=lambda entry: entry.time) for entries in calls.values()]
    if not orders:
        return None
    [(provider, cases)] = Counter(order[0].provider for order in orders).most_common(1)
    first = [order for order in orders if order[0].provider == provider]
    text = f"{_title(record)}: {provider} in {cases} of {len(orders)} cases"
    if over := [order[1].time / order[0].time for order in first if len(order) > 1]:
        text += f", {median(over):.2f} times as fast as the next in the median"
    return text


def _title(record: Record) -> str:
    return record.group if record.complete else f"{record.group} (incomplete)"


def _changes(newest: Iterable[Record], records: Sequence[Record]) -> Iterator[str]:
    """What differs in the newest record of each group from the record before; what is worse
    first."""
    worse, better, others = list[str](), list[str](), list[str]()
    for record in newest:
        series = [r for r in records if r.group == record.group and r.complete]
        if len(series) < 2:
            continue
        before = series[-2]
        if not before.same_setting(record):
            pairs = sorted(before.other_versions(record).items())
            words = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in pairs)
            others.append(f"{record.group} not compared with {before.day}: {words}")
            continue
        changes = list(_changed(before, record))
        worse += [line for outcome, line in changes if outcome is not Outcome.FASTER]
        better += [line for outcome, line in changes if outcome is Outcome.FASTER]
        if not changes:
            others.append(f"{record.group}: nothing beyond the scatter since {before.day}")
    yield from (*worse, *better, *others)


def _changed(before: Record, after: Record) -> Iterator[tuple[Outcome, str]]:
    for verdict in compare(before, after):
        for figure in verdict.figures if verdict.gated else ():
            if figure.outcome in WORDS:
                old, new = (_value(figure.metric, value) for value in (figure.before, figure.after))
                name = f"{WORDS[figure.outcome]}: {verdict.name} {figure.metric}"
                yield figure.outcome, f"{name} {old} -> {new} since {before.day}"


def milliseconds(entry: Timed) -> str:
    return f"{entry.time * 1e3:.3g} ms"


def _value(metric: str, value: float | Ratio | None) -> str:
    if not isinstance(value, (int, float)):
        return "none"
    if metric.endswith("seconds"):
        return f"{value * 1e3:.4g} ms"
    return f"{value / 2**20:,.1f} MiB" if metric.endswith("bytes") else f"{value:g}"
