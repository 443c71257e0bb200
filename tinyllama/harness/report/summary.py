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
from tinyllama.harness.report.tables import last_passes, latest

LINES = 20  # that a terminal gets
WORDS = {
    Outcome.SLOWER: "worse",
    Outcome.INCONCLUSIVE: "perhaps worse",
    Outcome.FASTER: "better",
}


@dataclass(frozen=True)
class Part:
    """A sentence about a device, and the lines that it sums up."""

    name: str
    sentence: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Summary:
    """The newest record of each group of a device, and what they say. bars: about what ran."""

    device: str
    records: Sequence[Record]
    bars: Sequence[Bar]
    parts: Sequence[Part]

    def lines(self, most: int) -> list[str]:
        """The summary for a terminal, with at most so many lines of each part."""
        newest = self.records[-1]
        lines = [f"{self.device}, {newest.day}: {newest.software}"]
        for part in self.parts:
            cut = list(part.lines) if len(part.lines) <= most else list(part.lines[: most - 1])
            if len(cut) < len(part.lines):
                cut.append(f"and {len(part.lines) - len(cut)} more: --all")
            lines.append(f"  {part.name:<9}{part.sentence}")
            lines += [f"  {'':<9}{text}" for text in cut]
        return lines


def terminal_lines(devices: Sequence[Summary]) -> list[str]:
    """At most `LINES` lines of some devices: as many of each part as fit, newest device first."""
    for most in (10, 6, 4, 3, 2, 1):
        lines = [line for summary in devices for line in summary.lines(most)]
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
    parts = [_fastest(newest), _missed(newest, bars, targets), _changed(newest, records)]
    return Summary(device, newest, bars, parts)


# -- fastest ----------------------------------------------------------------------------------


def _fastest(records: Iterable[Record]) -> Part:
    """Of each record of steps the fastest tier beside the fastest peer and the floor; of each
    record of ops the provider that is fastest in most cases."""
    lines, sentences = [], []
    names, over_peers = Counter[str](), list[float]()
    steps = [(record, tier) for record in records if (tier := fastest_of(record, "tier"))]
    for record, tier in sorted(steps, key=lambda pair: pair[1].time):
        names[tier.who] += 1
        text = f"{_title(record)}: {tier.who} {milliseconds(tier)}"
        if peer := fastest_of(record, "peer"):
            ratio = (tier.over or {}).get(peer.who)
            over_peers.append(ratio.median if ratio else peer.time / tier.time)
            times = ratio or f"{over_peers[-1]:.2f}"
            text += f", {times} times as fast as {peer.who} ({milliseconds(peer)})"
        if tier.floor_share is not None:
            text += f", {tier.floor_share.median:.2f} of the floor's speed"
        lines.append(text)
    if steps:
        [(name, count)] = names.most_common(1)
        sentence = f"{name} in {count} of {len(steps)} groups of steps"
        if over_peers:
            span = " to ".join(dict.fromkeys(f"{f(over_peers):.2f}" for f in (min, max)))
            sentence += f", where our fastest tier has {span} times the fastest peer's speed"
        sentences.append(sentence)
    for record in records:
        if provider := _fastest_provider(record):
            sentences.append(provider.partition(", ")[0])
            lines.append(f"{_title(record)}: {provider}")
    return Part("fastest", "; ".join(sentences) or "no complete record of a step or an op", lines)


def fastest_of(record: Record, role: str) -> StepEntry | None:
    """The fastest step of a role; None without one."""
    steps = [step for step in record.of(StepEntry) if step.ran and step.role == role]
    return min(steps, key=lambda step: step.time, default=None)


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
    text = f"{provider} in {cases} of {len(orders)} cases of ops"
    if over := [order[1].time / order[0].time for order in first if len(order) > 1]:
        text += f", {median(over):.2f} times as fast as the next in the median"
    return text


def _title(record: Record) -> str:
    return record.group if record.complete else f"{record.group} (incomplete)"


# -- missed -----------------------------------------------------------------------------------


def _bars(record: Record, targets: Iterable[Target]) -> Iterator[Bar]:
    """The targets that are about a record's device and what ran in it."""
    timed = [entry for entry in record.entries if isinstance(entry, (StepEntry, OpEntry))]
    for target, call, entries in covered(targets, timed):
        if target.concerns(record.device) and target.who in entries and entries[target.who].ran:
            ratio = target.measured(entries)
            why = "not measured" if ratio is None else ""
            yield judged(target, ratio, record.device, why, f"{' '.join(call)}: ")


def _missed(newest: Iterable[Record], bars: Sequence[Bar], targets: Sequence[Target]) -> Part:
    """The bars that are missed. Without targets, what the runs themselves said: bars of this
    project may have changed since, and those of other repositories have no targets here."""
    lines = [bar.text for bar in bars if bar.standing is Standing.MISSED]
    if not targets:
        lines = [f"{record.group}: {line}" for record in newest for line in record.missed]
    asserted = sum(bar.standing is not Standing.NOT_APPLICABLE for bar in bars)
    if lines:
        of = f" of {asserted}" if asserted else ""
        return Part("missed", f"{len(lines)}{of} bars", lines)
    none = f"none of {asserted} bars" if asserted else "no bar is about these records"
    return Part("missed", none, [])


# -- changed ----------------------------------------------------------------------------------


def _changed(newest: Iterable[Record], records: Sequence[Record]) -> Part:
    """What differs in the newest record of each group from the record before; what is worse
    first."""
    changes: dict[str, list[str]] = {word: [] for word in WORDS.values()}
    uncompared = list[str]()
    compared = 0
    for record in newest:
        series = [r for r in records if r.group == record.group and r.complete]
        if len(series) < 2:
            continue
        before = series[-2]
        if not before.same_setting(record):
            pairs = sorted(before.other_versions(record).items())
            words = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in pairs)
            uncompared.append(f"{record.group} not compared with {before.day}: {words}")
            continue
        compared += 1
        for word, line in _differences(before, record):
            changes[word].append(line)
    counts = [f"{len(lines)} figures {word}" for word, lines in changes.items() if lines]
    nothing = "nothing beyond the scatter since the record before"
    alone = "nothing to compare: one record of each group with these versions"
    sentence = ", ".join(counts) or (nothing if compared else alone)
    return Part(
        "changed", sentence, [*(line for of in changes.values() for line in of), *uncompared]
    )


def _differences(before: Record, after: Record) -> Iterator[tuple[str, str]]:
    """Each gated figure that changed beyond its scatter: the word for it, and a line."""
    for verdict in compare(before, after):
        for figure in verdict.figures if verdict.gated else ():
            if word := WORDS.get(figure.outcome):
                old, new = (_value(figure.metric, value) for value in (figure.before, figure.after))
                name = f"{word}: {verdict.name} {figure.metric}"
                yield word, f"{name} {old} -> {new} since {before.day}"


def milliseconds(entry: Timed) -> str:
    return f"{entry.time * 1e3:.3g} ms"


def _value(metric: str, value: float | Ratio | None) -> str:
    if not isinstance(value, (int, float)):
        return "none"
    if metric.endswith("seconds"):
        return f"{value * 1e3:.4g} ms"
    return f"{value / 2**20:,.1f} MiB" if metric.endswith("bytes") else f"{value:g}"
