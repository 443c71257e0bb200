"""This tree gated against itself: A/A blocks of a device, and error rates from them."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from rich.table import Table

import tinyllama
from tinyllama.harness.gate import config
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Benchmark, Registered, Stopped
from tinyllama.harness.gate.calibrate import METRICS, Block, Certificate, Noise, certify, noise_path
from tinyllama.harness.gate.device_guard import BusyError, DeviceGuard, device_lock
from tinyllama.harness.gate.metric import ALL_WORK, margin_of
from tinyllama.harness.gate.pair import Tree
from tinyllama.harness.gate.schedule import launcher, pairs_at_once, timing_processor
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Setting
from tinyllama.harness.gate.waivers import Waivers
from tinyllama.harness.gate.workspace import benchmarks_of, registered_by
from tinyllama.harness.machine.device import device_name, usable_device
from tinyllama.harness.machine.files import check_results_dir, replace_text
from tinyllama.harness.machine.progress import of_stream
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.harness.records.verdict import Outcome, Verdict, worst
from tinyllama.harness.report.terminal import console
from tinyllama.model.config import ConfigError

ROOT = Path(tinyllama.__file__).resolve().parent.parent
SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10)  # in turn, over the benchmarks
WAIT = 180.0  # seconds for the device to become idle


def run(args: argparse.Namespace) -> int:
    """The command; its exit status. Raises ConfigError."""
    device = usable_device(args.device)
    try:
        check_results_dir(args.results_dir)
        noise = Noise.load(args.results_dir, device_name(device))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error}: repair or remove that file") from error
    certifying = Certifying(args.results_dir, args.only, device, noise)
    try:
        if args.validate:
            return certifying.validate()
        if args.blocks and not certifying.record(args.blocks, args.seconds):
            return 1
    except (BusyError, Stopped) as stop:
        if isinstance(stop, Stopped) and stop.verdict.outcome is not Outcome.BUSY:
            raise ConfigError(str(stop)) from stop
        print(f"tinyllama: {stop}", file=sys.stderr)
        return Outcome.BUSY.status
    return certifying.show(args.merges)


@dataclass
class Certifying:
    """This tree against itself on a device. only: a pattern of benchmarks' names."""

    results: Path
    only: str
    device: torch.device
    noise: Noise

    def record(self, blocks: int, seconds: float | None) -> bool:
        """Add blocks one by one and save each. Returns whether no benchmark failed: one that fails
        now is not certified by its earlier blocks."""
        began, longest = time.monotonic(), 0.0
        before = began
        with self._session({}) as session:
            for number, (wave, statistics) in enumerate(session.blocks(blocks), 1):
                try:
                    self.noise.record(self.results, _block(session, wave, statistics))
                except ValueError as error:  # another process has written there
                    raise ConfigError(str(error)) from error
                ended = time.monotonic()
                print(f"block {number} of {blocks}: {ended - before:.1f} s", flush=True)
                longest = max(longest, ended - before if number > 1 else 0.0)
                before = ended
                late = seconds is not None and ended - began + longest > seconds
                if late:
                    break
            wrong = [
                state.verdict for state in session.compared.values() if state.verdict is not None
            ]
            for verdict in wrong:
                print(f"not certified: {verdict}")
            return not wrong

    def validate(self) -> int:
        """Gate benchmarks of which most have work added, and check the verdicts."""
        slowed = _shares(self._chosen())
        with self._session({name: share for name, share in slowed.items() if share}) as session:
            wrong = []
            for verdict in session.run():
                share = slowed.get(verdict.name)
                print(f"{'' if share is None else f'{share:+.0%} '}{verdict}", flush=True)
                if not _as_expected(verdict, share, session):
                    wrong.append(verdict.name)
            content = {
                "device": self.noise.device,
                "date": now(),
                "commit": current_commit(),
                "slowed": slowed,
                "wrong": wrong,
                **session.report(),
            }
        path = self._folder / "validation.json"
        replace_text(path, json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}; {len(wrong)} of {len(slowed)} verdicts are not as expected")
        return 1 if wrong else 0

    def show(self, merges: int) -> int:
        """Print and write the error rates; 1 where a bar is missed."""
        chosen = {benchmark.name: benchmark.slowdowns for benchmark in self._chosen()}
        slowdown_of = {
            metric: stated for slowdowns in chosen.values() for metric, stated in slowdowns.items()
        }
        rules = {
            metric: (margin_of(metric, self.device), slowdown_of[metric]) for metric in slowdown_of
        }
        try:
            certificate = certify(self.noise, versions(), rules, chosen, chosen, merges)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        console().print(_table(certificate))
        for bar in certificate.bars:
            print(f"{'holds ' if bar.held else 'MISSED'} {bar.text}: {bar.measured}")
        if self.only == "*":
            path = self._folder / "certificate.json"
            certificate.save(path)
            print(f"wrote {path}")
        else:
            print("not written: a certificate covers every benchmark")
        return 0 if all(bar.held for bar in certificate.bars) else 1

    @property
    def _folder(self) -> Path:
        return noise_path(self.results, self.noise.device).parent

    def _chosen(self) -> list[Benchmark]:
        """The benchmarks of this tree whose names match. Further cases have no A/A blocks."""
        benchmarks = [
            benchmark
            for benchmark in benchmarks_of(ROOT, self.device, _registered())
            if not benchmark.further
        ]
        chosen = [benchmark for benchmark in benchmarks if fnmatchcase(benchmark.name, self.only)]
        if not chosen:
            raise ConfigError(
                f"--only {self.only!r}: no benchmark of {self.device} has such a name"
            )
        return chosen

    @contextmanager
    def _session(self, slowed: Mapping[str, float]) -> Iterator[Session]:
        """A session of this tree against itself. Raises BusyError for a disturbed device."""

        def tree(name: str, slowed: Mapping[str, float]) -> Tree:
            slowdowns = config.load(ROOT).slowdowns
            caches = Path(folder) / name
            return Tree(name, ROOT, sys.executable, "itself", caches, slowed, slowdowns)

        def wait(reason: str) -> None:
            progress(f"waiting up to {WAIT:.0f} s: {reason}")

        processor = timing_processor(self.device)
        with (
            of_stream(sys.stdout) as progress,
            device_lock(self.device, WAIT, wait),
            tempfile.TemporaryDirectory() as folder,
            launcher(processor) as pairs,
        ):
            watch = DeviceGuard(self.device)
            if disturbed := watch.wait_until_idle(WAIT, wait):
                raise BusyError(disturbed)
            yield Session(
                Setting(
                    base=tree(BASE, {}),
                    candidate=tree(CANDIDATE, slowed),
                    device=self.device,
                    registered=_registered(),
                    noise=self.noise,
                    accepted=Waivers(ROOT),
                    watch=watch,
                    affected=lambda benchmarks: {},
                    measure_all=True,
                    all_verdicts=True,
                    only=lambda name: fnmatchcase(name, self.only),
                    pairs=pairs,
                    processor=processor,
                    at_once=pairs_at_once(self.device),
                    say=progress.line,
                    doing=progress,
                )
            )


def _slowed_metric(benchmark: Benchmark) -> str:
    """The metric that the added work slows down: device time, if both times are measured."""
    return next(metric for metric in METRICS if metric in benchmark.slowdowns)


def _shares(benchmarks: Iterable[Benchmark]) -> dict[str, float]:
    """The share of work added to each benchmark: each metric cycles through the slowdowns."""
    shares: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for benchmark in benchmarks:
        metric = _slowed_metric(benchmark)
        shares[benchmark.name] = SLOWDOWNS[counts[metric] % len(SLOWDOWNS)]
        counts[metric] += 1
    return shares


def _as_expected(verdict: Verdict, share: float | None, session: Session) -> bool:
    """Whether a verdict fits the added work.

    Without added work, the benchmark must be SAME. With at least the tolerance, its time must be
    SLOWER. With less, no figure may be FASTER. A higher kernel count does not replace a slowdown
    in time that was not found.
    """
    if share is None or verdict.name not in session.compared:
        return False
    benchmark = session.compared[verdict.name].benchmark
    metric = _slowed_metric(benchmark)
    readings = {metric, ALL_WORK + metric}
    timed = worst([f.outcome for f in verdict.figures if f.metric in readings])
    if not any(figure.metric == metric for figure in verdict.figures):
        return False
    if any(f.metric in readings and f.outcome is Outcome.SLOWER for f in verdict.figures):
        timed = Outcome.SLOWER
    if not share:
        return verdict.outcome is Outcome.SAME
    if any(figure.outcome is Outcome.FASTER for figure in verdict.figures):
        return False
    if share >= benchmark.slowdowns[metric]:
        return timed is Outcome.SLOWER
    return timed in (Outcome.SAME, Outcome.SLOWER, Outcome.INCONCLUSIVE)


def _block(session: Session, wave: str, statistics: dict[str, dict[str, float]]) -> Block:
    return Block(
        date=now(),
        commit=current_commit(),
        versions=session.versions,
        pairs=session.effort.pairs,
        statistics=statistics,
        wave=wave,
    )


def _table(certificate: Certificate) -> Table:
    blocks = f"{certificate.blocks} A/A blocks, {certificate.merges:,} merges"
    table = Table(title=f"{certificate.device}: {blocks}")
    names = (
        "benchmark",
        "metric",
        "spread",
        *(f"{float(s):.0%}" for s in certificate.found[0].detected),
    )
    for name in (*names, "finds"):
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for detection in certificate.found:
        shares = [f"{share:.1%}" for share in detection.detected.values()]
        smallest = "none" if detection.smallest is None else f"{detection.smallest:.1%}"
        table.add_row(
            detection.benchmark, detection.metric, f"{detection.spread:.2%}", *shares, smallest
        )
    return table


def _registered() -> Registered:
    """What is gated here."""
    return registered_by(config.load(ROOT))
