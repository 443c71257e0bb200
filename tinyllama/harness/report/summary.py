"""What a reader wants of a device's records first: what is fastest, missed, and changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry, Timed
from tinyllama.harness.records.outcome import Outcome
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import SPEED, Target, covered, shown
from tinyllama.harness.records.verdict import Figure, compare
from tinyllama.harness.report.tables import escaped, last_passes, latest

LINES = 20  # that a terminal gets
PHRASES = {
    SPEED: "speed",
    "bandwidth_share": "share of a copy's bandwidth",
    "gradient_share": "share of right gradients",
    "held_bytes": "memory between uncaptured steps",
    "held_peak_bytes": "peak memory of an uncaptured step",
    "joules_per_sample": "energy of a sample",
    "live_bytes": "live memory",
    "peak_bytes": "peak memory",
    "repeated_host_seconds": "host time of calls in a row",
}


@dataclass(frozen=True)
class FastestStep:
    """Of one group of steps the fastest of ours, and the fastest peer where one ran."""

    group: str  # says so where its record is incomplete
    step: StepEntry
    peer: StepEntry | None

    @property
    def over_peer(self) -> Ratio | None:
        """How many times as long the peer takes; without an interval where none was recorded."""
        if self.peer is None:
            return None
        times = self.peer.time / self.step.time
        return (self.step.over or {}).get(self.peer.who, Ratio(times, times, times))

    def __str__(self) -> str:
        text = f"{self.group}: {self.step.who} {milliseconds(self.step)}"
        if self.peer is not None and self.over_peer is not None:
            text += f", {times_as_fast(self.over_peer)} {self.peer.who} ({milliseconds(self.peer)})"
        if self.step.floor_share is not None:
            text += f", {self.step.floor_share.median:.2f} of the floor's speed"
        return text


@dataclass(frozen=True)
class FastestProvider:
    """Of a group of ops the provider that is fastest in most cases."""

    group: str
    provider: str
    cases: int
    all_cases: int
    over_next: float  # the median, over the cases in which it is fastest and somebody else ran

    def __str__(self) -> str:
        return (
            f"{self.group}: {self.provider} in {self.cases} of {self.all_cases} cases, "
            f"{self.over_next:.2f} times as fast as the next in the median"
        )


@dataclass(frozen=True)
class HeldBar:
    """A bar of a device, and what was measured; None where the record has no such figure."""

    target: Target
    call: tuple[str, ...]
    ratio: Ratio | None

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.target.met(self.ratio)

    def __str__(self) -> str:
        target = self.target
        metric = PHRASES.get(target.metric, target.metric.replace("_", " "))
        of = f" times that of {' or '.join(target.over)}" if target.over else ""
        value = "not measured" if self.ratio is None else shown(self.ratio, target.bound) + of
        bound = {">=": "at least", "<=": "at most"}[target.direction]
        caveat = f" ({target.caveat})" if target.caveat else ""
        where = f"{'-'.join(self.call) if target.kind is StepEntry else ' '.join(self.call)}"
        return f"{where}, {target.who}: {metric} {value}; {bound} {target.bound:g} is asked{caveat}"


@dataclass(frozen=True)
class Change:
    """A figure that is not what it was in the record before. day: of that record."""

    name: str
    figure: Figure
    day: str

    @property
    def word(self) -> str:
        words = {Outcome.FASTER: "better", Outcome.SLOWER: "worse"}
        return words.get(self.figure.outcome, "perhaps worse")

    def __str__(self) -> str:
        figure = self.figure
        before, after = (_value(figure.metric, value) for value in (figure.before, figure.after))
        return f"{self.word}: {self.name} {figure.metric} {before} -> {after} since {self.day}"


@dataclass(frozen=True)
class Summary:
    """A device's newest records, and what they say.

    misses: what runs said was missed, where no target of this project says it anew.
    compared: the days of the records that the newest are compared with.
    not_compared: why a group is not compared with the record before.
    history: a line for each group of which several records are.
    """

    device: str
    records: Sequence[Record]
    steps: Sequence[FastestStep]
    ops: Sequence[FastestProvider]
    bars: Sequence[HeldBar]
    misses: Sequence[str]
    changes: Sequence[Change]
    compared: Sequence[str]
    not_compared: Sequence[str]
    history: Sequence[str]

    @property
    def fastest(self) -> str:
        """One sentence."""
        parts = list(map(str, self.steps))
        ratios = [(ratio.median, fast) for fast in self.steps if (ratio := fast.over_peer)]
        if len(ratios) > 1:
            [(who, wins)] = Counter(fast.step.who for fast in self.steps).most_common(1)
            least = min(ratio for ratio, _ in ratios)
            most, best = max(ratios, key=lambda pair: pair[0])
            parts = [
                f"{who} is the fastest of ours in {wins} of {len(self.steps)} groups of steps, and "
                f"ours are {least:.2f} to {most:.2f} times as fast as the fastest "
                f"peer ({best})"
            ]
        parts += map(str, self.ops)
        return "; ".join(parts) or "no complete record of a step or an op"

    @property
    def missed(self) -> str:
        """One sentence."""
        missed = [*(str(bar) for bar in self.bars if bar.met is False), *self.misses]
        measured = sum(bar.met is not None for bar in self.bars)
        of = f" of {measured} bars" if measured else ""
        if not missed:
            return f"none{of}" if measured else "no bar is about these records"
        return f"{len(missed)}{of}: {_some(missed, 2)}"

    @property
    def any_missed(self) -> bool:
        return bool(self.misses) or any(bar.met is False for bar in self.bars)

    @property
    def changed(self) -> str:
        """One sentence."""
        if not self.compared:
            return _some(self.not_compared, 1) or "nothing to compare: one record of each group"
        days = ", ".join(dict.fromkeys(self.compared))
        if not self.changes:
            return f"nothing beyond the scatter since the records of {days}"
        counts = Counter(change.word for change in self.changes)
        words = ", ".join(f"{count} {word}" for word, count in counts.items())
        return f"{words}: {_some(list(map(str, self.changes)), 2)}"

    def lines(self, most: int) -> list[str]:
        """The summary for a terminal, with at most so many lines of each part."""
        newest = self.records[-1]
        fastest = [str(line) for line in (*self.steps, *self.ops)]
        missed = [str(bar) for bar in self.bars if bar.met is False] + list(self.misses)
        changed = [*map(str, self.changes), *self.not_compared]
        parts = {
            "fastest": fastest or [self.fastest],
            "missed": missed or [self.missed],
            "changed": changed or [self.changed],
        }
        lines = [f"{self.device}, {newest.day}: {newest.software}"]
        for name, texts in parts.items():
            cut = texts if len(texts) <= most else texts[: most - 1]
            if len(cut) < len(texts):
                cut = [*cut, f"and {len(texts) - len(cut)} more: --all"]
            lines += [f"  {'' if n else name:<9}{text}" for n, text in enumerate(cut)]
        return lines


def milliseconds(entry: Timed) -> str:
    return f"{entry.time * 1e3:.3g} ms"


def times_as_fast(ratio: Ratio) -> str:
    return f"{ratio if ratio.low != ratio.high else f'{ratio.median:.2f}'} times as fast as"


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return "none"
    if metric.endswith("seconds"):
        return f"{value * 1e3:.4g} ms"
    return f"{value / 2**20:,.1f} MiB" if metric.endswith("bytes") else f"{value:g}"


def _some(texts: Sequence[str], most: int) -> str:
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def terminal_lines(summaries: Sequence[Summary]) -> list[str]:
    """At most `LINES` lines of some devices: as many of each part as fit, newest device first."""
    for most in (10, 6, 4, 3, 2, 1):
        lines = [line for summary in summaries for line in summary.lines(most)]
        if len(lines) <= LINES:
            return lines
    return [*lines[: LINES - 1], "and other devices: --all, or --device NAME"]


def markdown_summary(summary: Summary) -> str:
    """The three sentences of a device in Markdown."""
    parts = {"Fastest": summary.fastest, "Missed": summary.missed, "Changed": summary.changed}
    lines = (f"- {name}: {escaped(text)}." for name, text in parts.items())
    return "\n".join([f"## {escaped(summary.device)}", "", *lines, ""])


def summaries(records: Iterable[Record], targets: Sequence[Target] = ()) -> list[Summary]:
    """A summary of each device, the newest device first."""
    by_device: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.date):
        by_device.setdefault(record.device, []).append(record)
    devices = [_summary(device, records, targets) for device, records in by_device.items()]
    return sorted(devices, key=lambda summary: summary.records[-1].date, reverse=True)


def _summary(device: str, records: Sequence[Record], targets: Sequence[Target]) -> Summary:
    newest = latest(records)
    changes: list[Change] = []
    compared: list[str] = []
    not_compared: list[str] = []
    history: list[str] = []
    for record in newest:
        series = [r for r in records if r.group == record.group and r.complete]
        if len(series) < 2:
            continue
        before = series[-2]
        history.append(history_line(series))
        if before.same_setting(record):
            compared.append(before.day)
            changes += _changes(before, record)
        else:
            pairs = sorted(before.other_versions(record).items())
            words = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in pairs)
            not_compared.append(f"{record.group} not compared with {before.day}: {words}")
    changes.sort(key=lambda change: change.figure.outcome is Outcome.FASTER)
    bars = [bar for record in newest for bar in held_bars(record, targets)]
    return Summary(
        device,
        newest,
        sorted(filter(None, map(fastest_step, newest)), key=lambda fastest: fastest.step.time),
        list(filter(None, map(fastest_provider, newest))),
        sorted(bars, key=lambda bar: {False: 0, None: 1, True: 2}[bar.met]),
        [f"{r.group}: {line}" for r in newest for line in r.missed if not (bars and _target(line))],
        changes,
        compared,
        not_compared,
        history,
    )


def _target(line: str) -> bool:
    """Whether a line of `Record.missed` is about a target, which is judged anew."""
    return ": measured " in line


def held_bars(record: Record, targets: Iterable[Target]) -> Iterator[HeldBar]:
    """The targets that are about a record's device and what ran in it."""
    about = [target for target in targets if target.concerns(record.device)]
    timed = [entry for entry in record.entries if isinstance(entry, (StepEntry, OpEntry))]
    for target, call, entries in covered(about, timed):
        if target.who in entries and entries[target.who].ran:
            yield HeldBar(target, call, target.measured(entries))


def fastest_step(record: Record) -> FastestStep | None:
    """The fastest tier of a record of steps; None where it has none."""
    ran = [step for step in record.of(StepEntry) if step.ran]

    def first(role: str) -> StepEntry | None:
        return min((s for s in ran if s.role == role), key=lambda s: s.time, default=None)

    ours = first("tier")
    return FastestStep(_title(record), ours, first("peer")) if ours else None


def fastest_provider(record: Record) -> FastestProvider | None:
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
    over = [order[1].time / order[0].time for order in first if len(order) > 1]
    return FastestProvider(
        _title(record), provider, cases, len(orders), median(over) if over else 1.0
    )


def _title(record: Record) -> str:
    return record.group if record.complete else f"{record.group} (incomplete)"


def _changes(before: Record, after: Record) -> Iterator[Change]:
    for verdict in compare(before, after):
        for figure in verdict.figures if verdict.gated else ():
            if figure.outcome in (Outcome.FASTER, Outcome.SLOWER, Outcome.INCONCLUSIVE):
                yield Change(verdict.name, figure, before.day)


def history_line(series: Sequence[Record]) -> str:
    """The time of the newest record's fastest step or kernels in each record of a group."""
    fastest = fastest_step(series[-1])
    if fastest is None:
        return f"{series[-1].group}: recorded on {', '.join(record.day for record in series)}"
    times = []
    for record in series:
        step = {step.who: step for step in record.of(StepEntry)}.get(fastest.step.who)
        times.append(f"{milliseconds(step) if step and step.ran else 'none'} ({record.day})")
    return f"{series[-1].group}, {fastest.step.who}: {', '.join(times)}"
