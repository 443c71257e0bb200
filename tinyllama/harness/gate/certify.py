"""The gate's error rates on a device, estimated from the A/A blocks recorded there.

A simulated merge draws whole blocks with replacement, the same ones for all benchmarks, since a
disturbed launch disturbs everything that is timed in it. Each block keeps or changes its sign at
random, since the sides of an A/A block are exchangeable. A slowdown is added to the blocks.

Such merges show how the rule handles noise like that of the recorded blocks, with its correlation,
tails and modes. They do not show:

- noise that is not in these blocks. A disturbance of one launch in 1000 is rarely among 40 blocks,
  and then in no merge; ``false_alarms_bound`` holds for merges of these blocks, not for the device;
- a history that does not fit: the spread comes from the same blocks. Blocks of several days contain
  the differences between days, blocks of one day do not;
- a side that is always slower: exchanging signs removes it. `Detection.leaning` tests for that.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy

from tinyllama.harness.gate.decision import (
    CONFIRM_BLOCKS,
    LEAST_SPREAD,
    LOOKS,
    Floats,
    Rule,
    Spread,
    bounds,
    confirmation_low,
    smallest_found,
)
from tinyllama.harness.gate.noise import METRICS, Block, Noise

LEAST_BLOCKS = 20
MERGES = 100_000
CHUNK = 20_000  # merges at a time
CONFIDENCE = 0.95
SLOWDOWNS = (0.01, 0.02, 0.05, 0.10)
GRID = (*(step / 200 for step in range(1, 21)), 0.12, 0.15, 0.2, 0.3, 0.5, 1.0)
ENOUGH = 0.99  # of the slowdowns
LEANING = 1e-3  # p, for all figures together, below which A/A blocks lean to one side
LEAST_LEANING = 0.2  # by at least this share of the margin

Figure = tuple[str, str]  # benchmark, metric
Rules = Mapping[str, tuple[float, float]]  # by metric: margin, tolerance
Claims = Mapping[str, Mapping[str, float]]  # by benchmark and metric: a tolerance of its own


@dataclass(frozen=True)
class Detection:
    """The slowdowns of one figure that the gate finds: those that are SLOWER and confirmed.

    detected: by slowdown, the share found. at_tolerance: the share found of the tolerance.
    smallest: the smallest slowdown of GRID of which 99% are found, or None. by_formula: the same
    for a normal distribution, without stops at SAME and without confirmation. mean: of the blocks,
    0 for equal sides. leaning: the p value of a true mean within a fifth of the margin.
    """

    benchmark: str
    metric: str
    tolerance: float
    spread: float
    blocks: int
    mean: float
    leaning: float
    by_formula: float
    smallest: float | None
    at_tolerance: float
    detected: dict[float, float]


@dataclass(frozen=True)
class Certificate:
    """Error rates of merges in which every figure is decided.

    blocks: it is based on these; left_out: those that lack a figure. false_alarms: merges of equal
    sides with a confirmed SLOWER. false_alarms_bound: the upper bound of their share (Clopper and
    Pearson, 95%). all_green: the share of merges of equal sides that are all SAME or FASTER.
    """

    device: str
    versions: dict[str, str]
    blocks: int
    left_out: int
    merges: int
    seed: int
    false_alarms: int
    false_alarms_bound: float
    all_green: float
    claims: Claims
    found: tuple[Detection, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, whose keys are strings: ``detected`` has keys such as "0.02"."""
        found = [
            {**asdict(each), "detected": {f"{s:g}": share for s, share in each.detected.items()}}
            for each in self.found
        ]
        return {**asdict(self), "found": found}


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
    claims = {benchmark: dict(stated) for benchmark, stated in (claims or {}).items()}
    blocks = noise.of(versions)
    figures = _figures(blocks, rules, claims, benchmarks)
    if merges < 1 or (blocks and not figures):
        raise ValueError(f"{merges} merges of {len(figures)} figures: give one or more of both")
    whole = [block for block in blocks if all(_holds(block, figure) for figure in figures)]
    if len(whole) < LEAST_BLOCKS:
        raise ValueError(_too_few(noise.device, blocks, whole, figures))
    table = np.array([[block.statistics[b][m] for b, m in figures] for block in whole])
    judged = []
    for (benchmark, metric), values in zip(figures, table.T, strict=True):
        margin, tolerance = rules[metric]
        tolerance = claims.get(benchmark, {}).get(metric, tolerance)
        judged.append((values, Rule(len(figures), margin, tolerance), Spread.of(values)))
    alarms, green, shares = _simulate(judged, merges, np.random.default_rng(seed))
    test = scipy.stats.binomtest(alarms, merges, alternative="less")
    return Certificate(
        device=noise.device,
        versions=dict(versions),
        blocks=len(whole),
        left_out=len(blocks) - len(whole),
        merges=merges,
        seed=seed,
        false_alarms=alarms,
        false_alarms_bound=float(test.proportion_ci(CONFIDENCE, method="exact").high),
        all_green=green / merges,
        claims=claims,
        found=tuple(map(_found, figures, judged, shares)),
    )


def common_share(blocks: Iterable[Block]) -> float | None:
    """The share of the variance of blocks that is common to the blocks of one wave, pooled over all
    figures: the intraclass correlation of a one-way analysis of variance, and at least 0 (Donner,
    Int. Stat. Review 54, 1986). None where fewer than two waves have several blocks.

    The gate's rule assumes that blocks are independent, which is a share of 0.
    """
    waves: dict[str, list[Block]] = {}
    for block in blocks:
        if block.wave:
            waves.setdefault(block.wave, []).append(block)
    groups = [each for each in waves.values() if len(each) > 1]
    if len(groups) < 2:
        return None
    counts = np.array([len(each) for each in groups])
    total, many = counts.sum(), len(groups)
    size = (total - (counts**2).sum() / total) / (many - 1)
    between, within = [], []
    figures = sorted((b, m) for b, metrics in groups[0][0].statistics.items() for m in metrics)
    for b, m in figures:
        if not all(_holds(one, (b, m)) for each in groups for one in each):
            continue
        values = [np.array([one.statistics[b][m] for one in each]) for each in groups]
        every = np.concatenate(values)
        if not (spread := every.var()):
            continue
        means = np.array([each.mean() for each in values])
        between.append((counts * (means - every.mean()) ** 2).sum() / (many - 1) / spread)
        within.append(sum(((v - v.mean()) ** 2).sum() for v in values) / (total - many) / spread)
    if not between:
        return None
    one, other = float(np.mean(between)), float(np.mean(within))
    return max(0.0, (one - other) / (one + (size - 1) * other))


def _figures(
    blocks: list[Block], rules: Rules, claims: Claims, benchmarks: Collection[str] | None
) -> list[Figure]:
    """Every metric of every benchmark, recorded or not: an untimed one must not be certified."""
    claimed = {metric for stated in claims.values() for metric in stated}
    if not rules or set(rules) - set(METRICS) or claimed - set(rules):
        wanted = ", ".join(sorted(claimed)) or "one or more"
        raise ValueError(f"rules of {sorted(rules)}: of {', '.join(METRICS)} give {wanted}")
    timed = {benchmark for block in blocks for benchmark in block.statistics}
    asked = {*(timed if benchmarks is None else benchmarks), *claims}
    return sorted((one, metric) for one in asked for metric in claims.get(one) or rules)


def _holds(block: Block, figure: Figure) -> bool:
    benchmark, metric = figure
    return metric in block.statistics.get(benchmark, {})


def _too_few(device: str, blocks: list[Block], whole: list[Block], figures: list[Figure]) -> str:
    text = (
        f"{len(whole)} of {len(blocks)} A/A blocks of {device} with these versions hold every "
        f"figure, and a certificate needs {LEAST_BLOCKS} or more: record more"
    )
    lacking = {figure: sum(not _holds(block, figure) for block in blocks) for figure in figures}
    benchmark, metric = figure = max(lacking, key=lambda each: lacking[each], default=("", ""))
    missing = lacking.get(figure)
    return f"{text}; {metric} of {benchmark} is missing from {missing}" if missing else text


Judged = tuple[Floats, Rule, Spread]


def _simulate(
    judged: list[Judged], merges: int, rng: np.random.Generator
) -> tuple[int, int, Floats]:
    """False alarms, merges that are all green, and by figure and slowdown the share found."""
    slowdowns = [np.log1p(_slowdowns(rule)) for _, rule, _ in judged]
    found = np.zeros((len(judged), len(slowdowns[0])), dtype=np.int64)
    alarms = green = 0
    for start in range(0, merges, CHUNK):
        shape = (min(CHUNK, merges - start), LOOKS[-1] + CONFIRM_BLOCKS)
        drawn = rng.integers(0, len(judged[0][0]), shape)
        signs = rng.choice([-1.0, 1.0], shape)
        alarm, all_green = np.zeros(shape[0], dtype=bool), np.ones(shape[0], dtype=bool)
        for number, (values, rule, history) in enumerate(judged):
            statistics = values[drawn] * signs
            slower_above, green_below = critical(statistics[:, : LOOKS[-1]], rule, history)
            found_above = np.maximum(
                slower_above, -confirmation_low(statistics[:, LOOKS[-1] :], history)
            )
            alarm |= found_above < 0
            all_green &= (green_below > 0) & (slower_above >= 0)
            found[number] += np.searchsorted(np.sort(found_above), slowdowns[number])
        alarms, green = alarms + int(alarm.sum()), green + int(all_green.sum())
    return alarms, green, found / merges


def critical(statistics: Floats, rule: Rule, history: Spread) -> tuple[Floats, Floats]:
    """For each merge, which slowdowns decide it: SLOWER for those above the first value, else green
    for those below the second, else inconclusive.

    A slowdown shifts all bounds alike, so this decides every slowdown at once.
    """
    slower_above = np.full(len(statistics), np.inf)
    green_below = np.full(len(statistics), -np.inf)
    for look, blocks in enumerate(LOOKS):
        now = bounds(statistics[:, :blocks], look, rule, history)
        # SLOWER at this look, and green at no earlier one
        enough = np.maximum(np.log1p(rule.margin) - now.slower_low, green_below)
        slower_above = np.minimum(slower_above, enough)
        green_below = np.maximum(green_below, np.log1p(rule.tolerance) - now.green_high)
    return slower_above, green_below


def _slowdowns(rule: Rule) -> list[float]:
    return [*SLOWDOWNS, *GRID, rule.tolerance]


def _found(figure: Figure, judged: Judged, shares: Floats) -> Detection:
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
        by_formula=smallest_found(rule, history),
        smallest=next((s for s in GRID if share[s] >= ENOUGH), None),
        at_tolerance=share[rule.tolerance],
        detected={s: share[s] for s in SLOWDOWNS},
    )


class Bar(NamedTuple):
    """A requirement, whether it holds, and what was measured."""

    text: str
    held: bool
    measured: str


def bars(certificate: Certificate) -> list[Bar]:
    """The requirements on a gate. Every slowdown of 5% must be found by those that claim 2%; of the
    tolerance itself the rule may miss some."""
    c = certificate
    lean = LEANING / len(c.found)
    claimed = [f for f in c.found if f.metric in c.claims.get(f.benchmark, {})]
    fine = [f for f in claimed if f.tolerance <= 0.02]
    result = [
        Bar(
            "false alarms in under 0.1% of merges of equal sides",
            c.false_alarms_bound < 1e-3,
            f"{c.false_alarms} of {c.merges}, so at most {c.false_alarms_bound:.2g}, "
            f"from {c.blocks} blocks",
        ),
        Bar("95% of merges of equal sides all green", c.all_green >= 0.95, f"{c.all_green:.2%}"),
        _each(
            "blocks of equal sides lean to neither by a fifth of the margin",
            [(f, f.leaning >= lean, f"{f.mean:+.2%}") for f in c.found],
        ),
        _each(
            "99% of slowdowns of 2% found by those that state 2%",
            [_share(f, f.detected[0.02]) for f in fine],
        ),
        _each(
            "every slowdown of 5% found by those that state 2%",
            [_share(f, f.detected[0.05], 1.0) for f in fine],
        ),
        _each(
            "99% of slowdowns of the tolerance found", [_share(f, f.at_tolerance) for f in claimed]
        ),
    ]
    return [bar for bar in result if bar]


def _each(text: str, cases: list[tuple[Detection, bool, str]]) -> Bar | None:
    """None where no figure is asked: a bar that nothing could miss is none."""
    missed = [f"{f.metric} of {f.benchmark} ({said})" for f, held, said in cases if not held]
    counted = f"{len(cases) - len(missed)} of {len(cases)}"
    return Bar(text, not missed, "; not ".join([counted, *missed])) if cases else None


def _share(found: Detection, share: float, least: float = ENOUGH) -> tuple[Detection, bool, str]:
    smallest = "none" if found.smallest is None else f"{found.smallest:.1%}"
    return found, share >= least, f"{share:.3%}, smallest {smallest}"
