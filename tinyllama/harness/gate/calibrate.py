"""The noise of a device, from A/A blocks in which both sides run the same code, and the error rates
of the gate that follow from it.

Each device has ``results/<device>/gate/noise.json`` and ``certificate.json``, apart from the
records. Blocks of other versions stay in the file and do not count. JSON has no NaN: a number that
is none is refused when it is written, and when it is read.

A simulated merge draws whole blocks with replacement, the same ones for all benchmarks, since a
disturbed launch disturbs everything that is timed in it. Each block keeps or changes its sign at
random, since the sides of an A/A block are exchangeable. A slowdown is added to the blocks.

Such merges show how the rule handles noise like that of the recorded blocks, with its correlation,
tails and modes. They do not show noise that is not in these blocks: a disturbance of one launch in
1000 is rarely among 40 blocks. Blocks of one day do not contain the differences between days. A
side that is always slower is removed by the exchanged signs: `Detection.leaning` tests for that.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import scipy
from msgspec import Meta, Struct

from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.gate.sequential_test import (
    CONFIRM_BLOCKS,
    LEAST_SPREAD,
    LOOKS,
    Floats,
    Rule,
    Spread,
    bounds,
    confirmation_low,
    far_above,
)
from tinyllama.harness.machine.device import slug
from tinyllama.harness.machine.files import only_writer, read_regular, replace_text
from tinyllama.harness.records.results import folder, is_number, short

# 1: host time was of single calls; 2: a statistic was the median of single pairs; 3: the backward
# pass worked in autograd's thread.
SCHEMA = 4
LEAST_BLOCKS = 20
MERGES = 100_000
CHUNK = 20_000  # merges at a time
CONFIDENCE = 0.95
SLOWDOWNS = (0.01, 0.02, 0.05, 0.10)
GRID = (*(step / 200 for step in range(1, 21)), 0.12, 0.15, 0.2, 0.3, 0.5, 1.0)
ENOUGH = 0.99  # of the slowdowns
LEANING = 1e-3  # p, for all figures together, below which A/A blocks lean to one side
LEAST_LEANING = 0.2  # by at least this share of the margin

Text = Annotated[str, Meta(min_length=1)]
METRICS = (DEVICE, HOST)
Metric = Annotated[str, Meta(pattern=f"^({DEVICE}|{HOST})$")]


# -- A/A blocks -----------------------------------------------------------------------------------


class Block(Struct, frozen=True, forbid_unknown_fields=True):
    """One launch of two equal sides. ``statistics[benchmark][metric]`` is `of_block` of the logs of
    one side's times over the other's. wave: the name of the block's wave; empty in older
    files, which have no waves."""

    date: Text
    commit: Text
    versions: Annotated[dict[str, str], Meta(min_length=1)]
    pairs: Annotated[int, Meta(ge=1)]
    statistics: Annotated[dict[Text, dict[Metric, float]], Meta(min_length=1)]
    wave: str = ""

    def __post_init__(self) -> None:
        datetime.strptime(self.date, "%Y-%m-%dT%H:%M:%SZ")
        for name, metrics in self.statistics.items():
            for metric, value in metrics.items():
                if not is_number(value):
                    raise ValueError(f"{metric} of {name} is {value!r}, not a finite number")


class _Stored(Struct, forbid_unknown_fields=True):
    """The file of a device's blocks."""

    schema: int
    device: Text
    blocks: list[Block]


class Noise(Struct):
    """The blocks of one device, oldest first."""

    device: str
    blocks: list[Block] = msgspec.field(default_factory=list)

    def of(self, versions: Mapping[str, str]) -> list[Block]:
        """The blocks that were measured with exactly these versions."""
        return [block for block in self.blocks if block.versions == versions]

    def spread(self, benchmark: str, metric: str, versions: Mapping[str, str]) -> Spread:
        """The spread of one figure; without a block of it, one without a history."""
        blocks = [block.statistics.get(benchmark, {}) for block in self.of(versions)]
        return Spread.of([metrics[metric] for metrics in blocks if metric in metrics])

    def add(self, block: Block) -> None:
        """Raises ValueError for an invalid block, and for one that is stored already."""
        _checked(msgspec.to_builtins(block), Block)
        if block in self.blocks:
            raise ValueError(f"the block of {block.date} is stored already: a block counts once")
        self.blocks.append(block)

    def record(self, root: Path, block: Block) -> Path:
        """Add a block to those stored by now, and keep them all: another GPU of that name may be
        certified at the same time."""
        with only_writer(noise_path(root, self.device)):
            self.blocks = Noise.load(root, self.device).blocks
            self.add(block)
            return self.save(root)

    @staticmethod
    def load(root: Path, device: str) -> "Noise":
        """The device's blocks; none where no file is. Raises ValueError, naming file and field."""
        path = noise_path(root, device)
        try:
            stored = _read(path, _Stored)
            if stored.device != device:
                raise ValueError(f"device {stored.device!r} is not {device!r}")
            if any(block in stored.blocks[:at] for at, block in enumerate(stored.blocks)):
                raise ValueError("a block is there twice: it counts once")
        except FileNotFoundError:
            return Noise(device)
        except ValueError as error:
            raise ValueError(f"{path} holds no A/A blocks of this version: {error}") from error
        return Noise(device, stored.blocks)

    def save(self, root: Path) -> Path:
        """Replace the file, whole or not at all."""
        stored = msgspec.to_builtins(_Stored(SCHEMA, self.device, self.blocks))
        path = noise_path(root, self.device)
        replace_text(path, json.dumps(stored, indent=1, allow_nan=False) + "\n")
        return path


def noise_path(root: Path, device: str) -> Path:
    assert slug(device), f"{device!r} names no device"
    return folder(root, device) / "gate" / "noise.json"


def _read(path: Path, kind: Any) -> Any:
    """What is in a file of this schema. Raises ValueError with the field that is wrong."""
    try:
        data = msgspec.json.decode(read_regular(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema {data.get('schema')!r} is not {SCHEMA}: its blocks were measured in another "
            "way; delete the file and certify again"
        )
    return _checked(data, kind)


def _checked(data: Any, kind: Any) -> Any:
    """Data as an object of this kind. Raises ValueError, naming the field that is wrong."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


# -- certificates ---------------------------------------------------------------------------------


class Detection(Struct, frozen=True):
    """The slowdowns of one figure that the gate finds: those that are SLOWER and confirmed.

    detected: by slowdown, as "0.02", the share found. at_tolerance: the share found of the
    tolerance. smallest: the smallest slowdown of GRID of which 99% are found, or None. mean: of
    the blocks, 0 for equal sides. leaning: the p value of a true mean within a fifth of the margin.
    """

    benchmark: str
    metric: str
    spread: float
    smallest: float | None
    detected: dict[str, float]
    tolerance: float = 0.0
    blocks: int = 0
    mean: float = 0.0
    leaning: float = 1.0
    at_tolerance: float = 0.0


class Bar(Struct, frozen=True):
    """A requirement, whether it holds, and what was measured."""

    text: str
    held: bool
    measured: str


class Certificate(Struct, frozen=True):
    """Error rates of merges in which every figure is decided.

    date: of the last block; commits: of all. blocks: it is based on these; left_out: those that
    lack a figure. false_alarms: merges of equal sides with a confirmed SLOWER. false_alarms_bound:
    the upper bound of their share (Clopper and Pearson, 95%). all_green: the share of merges of
    equal sides that are all SAME or FASTER. claims: by benchmark and metric, its tolerance.
    """

    schema: int
    device: Text
    date: Text
    commits: list[str]
    versions: dict[str, str]
    blocks: int
    merges: int
    bars: list[Bar]
    found: list[Detection]
    left_out: int = 0
    seed: int = 0
    false_alarms: int = 0
    false_alarms_bound: float = 1.0
    all_green: float = 0.0
    claims: dict[str, dict[str, float]] = {}

    def save(self, path: Path) -> None:
        stored = msgspec.to_builtins(self)
        replace_text(path, json.dumps(stored, indent=1, allow_nan=False) + "\n")


def certificates(root: Path, device: str | None = None) -> list[dict[str, Any]]:
    """The certificates of all devices, or of one, in the order of their folders. Raises what `load`
    raises, and OSError for an unreadable file."""
    # The brackets: glob would skip a dangling link of a plain name.
    loaded = [load(path) for path in sorted(root.glob("*/gate/certificate.jso[n]"))]
    return [certificate for certificate in loaded if device in (None, certificate["device"])]


def load(path: Path) -> dict[str, Any]:
    """The certificate in a file. Raises ValueError, naming file and field, for an invalid one, and
    for one whose blocks were measured in another way than now."""
    try:
        certificate: Certificate = _read(path, Certificate)
        slowdowns = {tuple(figure.detected) for figure in certificate.found}
        if len(slowdowns) > 1:
            raise ValueError("found: detected is not of the same slowdowns everywhere")
        [float(slowdown) for keys in slowdowns for slowdown in keys]
    except ValueError as error:
        raise ValueError(f"{path} is no certificate: {error}: certify again") from error
    stored: dict[str, Any] = msgspec.to_builtins(certificate)
    return stored


def provenance(certificate: Mapping[str, Any]) -> str:
    """Where it comes from: device, versions, commits, date."""
    versions = ", ".join(f"{name} {version}" for name, version in certificate["versions"].items())
    commits = ", ".join(map(short, certificate["commits"]))
    return f"{certificate['device']}; {versions}; commit {commits}; {certificate['date'][:10]}"


# -- error rates ----------------------------------------------------------------------------------

Figure = tuple[str, str]  # benchmark, metric
Rules = Mapping[str, tuple[float, float]]  # by metric: margin, tolerance
Claims = Mapping[str, Mapping[str, float]]  # by benchmark and metric: a tolerance of its own
Judged = tuple[Floats, Rule, Spread]


def certify(
    noise: Noise,
    versions: Mapping[str, str],
    rules: Rules,
    claims: Claims | None = None,
    benchmarks: Collection[str] | None = None,
    merges: int = MERGES,
    seed: int = 0,
) -> Certificate:
    """Estimate the error rates of the gate on a device with these versions.

    claims: by benchmark and metric, its tolerance. rules: by metric, margin and tolerance; they
    decide all metrics of a benchmark without claims. benchmarks: of a merge, else all with blocks.
    Raises ValueError where fewer than 20 blocks hold every figure.
    """
    stated = {benchmark: dict(claim) for benchmark, claim in (claims or {}).items()}
    blocks = noise.of(versions)
    timed = {benchmark for block in blocks for benchmark in block.statistics}
    names = {*(timed if benchmarks is None else benchmarks), *stated}
    # Recorded or not: a figure that was never timed must not be certified.
    figures = sorted((name, metric) for name in names for metric in stated.get(name) or rules)
    if merges < 1 or (blocks and not figures) or {metric for _, metric in figures} - set(rules):
        raise ValueError(f"{merges} merges of {len(figures)} figures by rules of {sorted(rules)}")
    usable = [block for block in blocks if all(_holds(block, figure) for figure in figures)]
    if len(usable) < LEAST_BLOCKS:
        raise ValueError(_too_few(noise.device, blocks, usable, figures))
    table = np.array([[block.statistics[b][m] for b, m in figures] for block in usable])
    judged = []
    for (benchmark, metric), values in zip(figures, table.T, strict=True):
        margin, tolerance = rules[metric]
        tolerance = stated.get(benchmark, {}).get(metric, tolerance)
        judged.append((values, Rule(len(figures), margin, tolerance), Spread.of(values)))
    alarms, green, shares = _simulate(judged, merges, np.random.default_rng(seed))
    test = scipy.stats.binomtest(alarms, merges, alternative="less")
    certificate = Certificate(
        schema=SCHEMA,
        device=noise.device,
        date=max(block.date for block in blocks),
        commits=sorted({block.commit for block in blocks}),
        versions=dict(versions),
        blocks=len(usable),
        left_out=len(blocks) - len(usable),
        merges=merges,
        seed=seed,
        false_alarms=alarms,
        false_alarms_bound=float(test.proportion_ci(CONFIDENCE, method="exact").high),
        all_green=green / merges,
        claims=stated,
        found=list(map(_detection, figures, judged, shares)),
        bars=[],
    )
    return msgspec.structs.replace(certificate, bars=_bars(certificate))


def _holds(block: Block, figure: Figure) -> bool:
    benchmark, metric = figure
    return metric in block.statistics.get(benchmark, {})


def _too_few(device: str, blocks: list[Block], usable: list[Block], figures: list[Figure]) -> str:
    text = (
        f"{len(usable)} of {len(blocks)} A/A blocks of {device} with these versions hold every "
        f"figure, and a certificate needs {LEAST_BLOCKS} or more: record more"
    )
    lacking = {figure: sum(not _holds(block, figure) for block in blocks) for figure in figures}
    benchmark, metric = figure = max(lacking, key=lambda name: lacking[name], default=("", ""))
    missing = lacking.get(figure)
    return f"{text}; {metric} of {benchmark} is missing from {missing}" if missing else text


def _simulate(
    judged: list[Judged], merges: int, rng: np.random.Generator
) -> tuple[int, int, Floats]:
    """False alarms, merges that are all green, and by figure and slowdown the share found."""
    slowdowns = [np.log1p(_slowdowns(rule)) for _, rule, _ in judged]
    counts_found = np.zeros((len(judged), len(slowdowns[0])), dtype=np.int64)
    alarms = green = 0
    for start in range(0, merges, CHUNK):
        shape = (min(CHUNK, merges - start), LOOKS[-1] + CONFIRM_BLOCKS)
        drawn = rng.integers(0, len(judged[0][0]), shape)
        signs = rng.choice([-1.0, 1.0], shape)
        alarm, all_green = np.zeros(shape[0], dtype=bool), np.ones(shape[0], dtype=bool)
        for number, (values, rule, history) in enumerate(judged):
            statistics = values[drawn] * signs
            slower_above, green_below = critical(statistics[:, : LOOKS[-1]], rule, history)
            again = statistics[:, LOOKS[-1] :]
            confirmed_above = np.minimum(
                -confirmation_low(again, history), far_above(again[:, : LOOKS[0]], rule)
            )
            found_above = np.maximum(slower_above, confirmed_above)
            alarm |= found_above < 0
            all_green &= (green_below > 0) & (slower_above >= 0)
            counts_found[number] += np.searchsorted(np.sort(found_above), slowdowns[number])
        alarms, green = alarms + int(alarm.sum()), green + int(all_green.sum())
    return alarms, green, counts_found / merges


def critical(statistics: Floats, rule: Rule, history: Spread) -> tuple[Floats, Floats]:
    """For each merge, which slowdowns decide it: SLOWER for those above the first value, else green
    for those below the second, else inconclusive.

    A slowdown shifts all bounds alike, so this decides every slowdown at once.
    """
    slower_above = np.full(len(statistics), np.inf)
    green_below = np.full(len(statistics), -np.inf)
    for look, blocks in enumerate(LOOKS):
        now = bounds(statistics[:, :blocks], look, rule, history)
        above = np.log1p(rule.margin) - now.slower_low
        if look == 0:
            above = np.minimum(above, far_above(statistics[:, :blocks], rule))
        # SLOWER at this look, and green at no earlier one
        slower_above = np.minimum(slower_above, np.maximum(above, green_below))
        green_below = np.maximum(green_below, np.log1p(rule.tolerance) - now.green_high)
    return slower_above, green_below


def _slowdowns(rule: Rule) -> list[float]:
    return [*SLOWDOWNS, *GRID, rule.tolerance]


def _detection(figure: Figure, judged: Judged, shares: Floats) -> Detection:
    values, rule, history = judged
    share = dict(zip(_slowdowns(rule), map(float, shares), strict=True))
    error = max(values.std(ddof=1), LEAST_SPREAD) / np.sqrt(len(values))
    further = abs(values.mean()) - LEAST_LEANING * np.log1p(rule.margin)
    return Detection(
        *figure,
        tolerance=rule.tolerance,
        spread=history.deviation,
        blocks=len(values),
        mean=float(values.mean()),
        leaning=float(scipy.stats.t.sf(further / error, len(values) - 1)),
        smallest=next((s for s in GRID if share[s] >= ENOUGH), None),
        at_tolerance=share[rule.tolerance],
        detected={f"{s:g}": share[s] for s in SLOWDOWNS},
    )


def _bars(certificate: Certificate) -> list[Bar]:
    """The requirements on a gate. Every slowdown of 5% must be found by those that claim 2%; of the
    tolerance itself the rule may miss some."""
    c = certificate
    lean = LEANING / len(c.found)
    claimed = [f for f in c.found if f.metric in c.claims.get(f.benchmark, {})]
    fine = [f for f in claimed if f.tolerance <= 0.02]
    alarms = f"{c.false_alarms} of {c.merges}, so at most {c.false_alarms_bound:.2g}"
    bars = [
        Bar(
            "false alarms in under 0.1% of merges of equal sides",
            c.false_alarms_bound < 1e-3,
            f"{alarms}, from {c.blocks} blocks",
        ),
        Bar("95% of merges of equal sides all green", c.all_green >= 0.95, f"{c.all_green:.2%}"),
        _bar_of(
            "blocks of equal sides lean to neither by a fifth of the margin",
            [(f, f.leaning >= lean, f"{f.mean:+.2%}") for f in c.found],
        ),
        _bar_of(
            "99% of slowdowns of 2% found by those that state 2%",
            [_share(f, f.detected["0.02"]) for f in fine],
        ),
        _bar_of(
            "every slowdown of 5% found by those that state 2%",
            [_share(f, f.detected["0.05"], 1.0) for f in fine],
        ),
        _bar_of(
            "99% of slowdowns of the tolerance found", [_share(f, f.at_tolerance) for f in claimed]
        ),
    ]
    return [bar for bar in bars if bar]


def _bar_of(text: str, cases: Sequence[tuple[Detection, bool, str]]) -> Bar | None:
    """None where no figure is asked: a bar that nothing could miss is none."""
    missed = [f"{f.metric} of {f.benchmark} ({said})" for f, holds, said in cases if not holds]
    counted = f"{len(cases) - len(missed)} of {len(cases)}"
    return Bar(text, not missed, "; not ".join([counted, *missed])) if cases else None


def _share(figure: Detection, share: float, least: float = ENOUGH) -> tuple[Detection, bool, str]:
    smallest = "none" if figure.smallest is None else f"{figure.smallest:.1%}"
    return figure, share >= least, f"{share:.3%}, smallest {smallest}"
