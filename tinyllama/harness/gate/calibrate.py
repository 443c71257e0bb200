"""The noise of a device, from A/A blocks in which both sides run the same code, and the error rates
of the gate that follow from it.

Each device has ``results/<device>/gate/noise.json`` and ``certificate.json``, apart from the
records. Blocks of other versions stay in the file and do not count.

A simulated merge draws whole blocks with replacement, the same ones for all benchmarks, since a
disturbed launch disturbs everything that is timed in it. Each block keeps or changes its sign at
random, since the sides of an A/A block are exchangeable. A slowdown is added to the blocks.

Such merges show how the rule handles noise like that of the recorded blocks, with its correlation,
tails and modes. They do not show noise that is not in these blocks: a disturbance of one launch in
1000 is rarely among 40 blocks. Blocks of one day do not contain the differences between days.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import scipy
from msgspec import Meta, Struct

from tinyllama.harness.gate.sequential_test import (
    CONFIRM_BLOCKS,
    LOOKS,
    Floats,
    Rule,
    Spread,
    bounds,
    confirmation_low,
    far_above,
)
from tinyllama.harness.machine.files import only_writer, read_regular, replace_text
from tinyllama.harness.records.results import folder

# 1: host time was of single calls; 2: a statistic was the median of single pairs; 3: the backward
# pass worked in autograd's thread; 4: nothing was read but the figure, and no side was stopped.
SCHEMA = 5
LEAST_BLOCKS = 20
MERGES = 100_000
CHUNK = 20_000  # merges at a time
CONFIDENCE = 0.95
GRID = (*(step / 200 for step in range(1, 21)), 0.12, 0.15, 0.2, 0.3, 0.5, 1.0)
ENOUGH = 0.99  # of the slowdowns

Text = Annotated[str, Meta(min_length=1)]


# -- A/A blocks -----------------------------------------------------------------------------------


class Block(Struct, frozen=True):
    """One launch of two equal sides. ``statistics[benchmark][metric]`` is `of_block` of the logs of
    one side's times over the other's."""

    date: Text
    commit: Text
    versions: Annotated[dict[str, str], Meta(min_length=1)]
    pairs: Annotated[int, Meta(ge=1)]
    statistics: Annotated[dict[Text, dict[Text, float]], Meta(min_length=1)]


class Noise(Struct):
    """The blocks of one device, oldest first."""

    device: Text
    blocks: list[Block] = []
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA

    def of(self, versions: Mapping[str, str]) -> list[Block]:
        """The blocks that were measured with exactly these versions."""
        return [block for block in self.blocks if block.versions == versions]

    def spread(self, benchmark: str, metric: str, versions: Mapping[str, str]) -> Spread:
        """The spread of one figure; without a block of it, one without a history."""
        blocks = [block.statistics.get(benchmark, {}) for block in self.of(versions)]
        return Spread.of([metrics[metric] for metrics in blocks if metric in metrics])

    def record(self, root: Path, block: Block) -> None:
        """Add a block to those stored by now, and keep them all: another GPU of that name may be
        certified at the same time."""
        with only_writer(noise_path(root, self.device)):
            self.blocks = Noise.load(root, self.device).blocks
            self.blocks.append(block)
            self.save(root)

    @staticmethod
    def load(root: Path, device: str) -> "Noise":
        """The device's blocks; none where no file is. Raises ValueError, naming file and field."""
        path = noise_path(root, device)
        try:
            noise = msgspec.json.decode(read_regular(path), type=Noise)
            if noise.device != device:
                raise ValueError(f"device {noise.device!r} is not {device!r}")
        except FileNotFoundError:
            return Noise(device)
        except ValueError as error:
            raise ValueError(
                f"{path} holds no A/A blocks of this version: {error}: delete it and certify again"
            ) from error
        return noise

    def save(self, root: Path) -> None:
        _write(self, noise_path(root, self.device))


def noise_path(root: Path, device: str) -> Path:
    return folder(root, device) / "gate" / "noise.json"


def _write(content: Struct, path: Path) -> None:
    """Replace a file, whole or not at all."""
    replace_text(path, msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n")


# -- certificates ---------------------------------------------------------------------------------


class Detection(Struct, frozen=True):
    """The slowdowns of one figure that the gate finds: those that are SLOWER and confirmed.

    spread: of the blocks. at_tolerance: the share found of slowdowns of the tolerance. smallest:
    the smallest slowdown of GRID of which 99% are found, or None.
    """

    benchmark: str
    metric: str
    tolerance: float
    spread: float
    at_tolerance: float
    smallest: float | None


class Certificate(Struct, frozen=True):
    """Error rates of merges in which every figure is decided.

    date: of the last block. blocks: it is based on these; left_out: those that lack a figure.
    false_alarms: merges of equal sides with a confirmed SLOWER. false_alarms_bound: the upper bound
    of their share (Clopper and Pearson, 95%). all_green: the share of merges of equal sides that
    are all SAME or FASTER.
    """

    device: str
    date: str
    versions: dict[str, str]
    blocks: int
    left_out: int
    merges: int
    false_alarms: int
    false_alarms_bound: float
    all_green: float
    found: list[Detection]

    def save(self, root: Path) -> Path:
        path = noise_path(root, self.device).with_name("certificate.json")
        _write(self, path)
        return path

    def bars(self) -> dict[str, bool]:
        """The requirements on a gate with what was measured, and whether each holds."""
        alarms = f"{self.false_alarms} of {self.merges}, so at most {self.false_alarms_bound:.2g}"
        found = sum(detection.at_tolerance >= ENOUGH for detection in self.found)
        return {
            f"false alarms in under 0.1% of merges of equal sides: {alarms}": (
                self.false_alarms_bound < 1e-3
            ),
            f"95% of merges of equal sides all green: {self.all_green:.2%}": self.all_green >= 0.95,
            f"99% of slowdowns of the tolerance found: of {found} of {len(self.found)} figures": (
                found == len(self.found)
            ),
        }


# -- error rates ----------------------------------------------------------------------------------

Figure = tuple[str, str]  # benchmark, metric
Judged = tuple[Floats, Rule, Spread]


def certify(
    noise: Noise,
    versions: Mapping[str, str],
    rules: Mapping[Figure, tuple[float, float]],
    merges: int = MERGES,
) -> Certificate:
    """Estimate the error rates of the gate on a device with these versions.

    rules: margin and tolerance of each figure of a merge. Raises ValueError where fewer than 20
    blocks hold every figure: one that was never timed must not be certified.
    """
    blocks, figures = noise.of(versions), sorted(rules)
    usable = [block for block in blocks if all(_holds(block, figure) for figure in figures)]
    if len(usable) < LEAST_BLOCKS:
        raise ValueError(_too_few(noise.device, blocks, usable, figures))
    judged = []
    for figure in figures:
        benchmark, metric = figure
        values = np.array([block.statistics[benchmark][metric] for block in usable])
        judged.append((values, Rule(len(figures), *rules[figure]), Spread.of(values)))
    alarms, green, shares = _simulate(judged, merges, np.random.default_rng(0))
    test = scipy.stats.binomtest(alarms, merges, alternative="less")
    return Certificate(
        device=noise.device,
        date=max(block.date for block in blocks),
        versions=dict(versions),
        blocks=len(usable),
        left_out=len(blocks) - len(usable),
        merges=merges,
        false_alarms=alarms,
        false_alarms_bound=float(test.proportion_ci(CONFIDENCE, method="exact").high),
        all_green=green / merges,
        found=list(map(_detection, figures, judged, shares)),
    )


def _holds(block: Block, figure: Figure) -> bool:
    benchmark, metric = figure
    return metric in block.statistics.get(benchmark, {})


def _too_few(
    device: str, blocks: Sequence[Block], usable: Sequence[Block], figures: Sequence[Figure]
) -> str:
    text = (
        f"{len(usable)} of {len(blocks)} A/A blocks of {device} with these versions hold every "
        f"figure, and a certificate needs {LEAST_BLOCKS} or more: record more"
    )
    lacking = {figure: sum(not _holds(block, figure) for block in blocks) for figure in figures}
    benchmark, metric = figure = max(figures, key=lambda name: lacking[name])
    return f"{text}; {metric} of {benchmark} is missing from {lacking[figure]}" if blocks else text


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
    return [*GRID, rule.tolerance]


def _detection(figure: Figure, judged: Judged, shares: Floats) -> Detection:
    _, rule, history = judged
    share = dict(zip(_slowdowns(rule), map(float, shares), strict=True))
    smallest = next((slowdown for slowdown in GRID if share[slowdown] >= ENOUGH), None)
    return Detection(*figure, rule.tolerance, history.deviation, share[rule.tolerance], smallest)
