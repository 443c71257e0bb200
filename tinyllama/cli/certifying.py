"""The current folder gated against itself: A/A blocks of a device, and error rates from them."""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.table import Table

from tinyllama.harness.gate import calibrate, config
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Stopped
from tinyllama.harness.gate.calibrate import Block, Certificate, Noise
from tinyllama.harness.gate.device_guard import BusyError, DeviceGuard
from tinyllama.harness.gate.metric import margin_of
from tinyllama.harness.gate.pair import SideError, Tree
from tinyllama.harness.gate.schedule import PairPool, pairs_at_once, timing_processor
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Setting
from tinyllama.harness.gate.waivers import Waivers
from tinyllama.harness.gate.workspace import benchmarks_of, registered_in
from tinyllama.harness.machine.device import device_name, usable_device
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_results_dir
from tinyllama.harness.machine.progress import of_stream
from tinyllama.harness.records.results import current_commit, now, versions
from tinyllama.harness.records.verdict import Outcome
from tinyllama.harness.report.terminal import console


def run(results: Path, blocks: int, device_option: str | None) -> int:
    """Record so many blocks of the current folder's ops, and show the error rates; the exit status.
    Raises UsageError."""
    device = usable_device(device_option)
    try:
        check_results_dir(results)
        with tempfile.TemporaryDirectory() as folder:
            sides = _itself(Path(folder))
            noise = Noise.load(results, device_name(device))
            if blocks and not record(sides, noise, results, device, blocks):
                return 1
            return show(sides[0], noise, results, device)
    except (BusyError, Stopped) as stop:
        if isinstance(stop, Stopped) and stop.verdict.outcome is not Outcome.BUSY:
            raise UsageError(str(stop)) from stop
        print(f"tinyllama: {stop}", file=sys.stderr)
        return Outcome.BUSY.status
    except (ValueError, SideError) as error:
        raise UsageError(str(error)) from error


def _itself(folder: Path) -> list[Tree]:
    """The tree in the current folder, as both sides. folder: of what they compile. Raises
    ValueError where no ops are named."""
    root = Path.cwd()
    rules = config.load(root)
    registered = registered_in(root, rules)
    if registered.own and not registered.files:
        raise ValueError(f"no ops are named: add {config.TABLE} ops to the {config.FILE} here")
    return [
        Tree(side, root, sys.executable, "itself", folder / side, registered, rules.slowdowns)
        for side in (BASE, CANDIDATE)
    ]


def record(
    sides: Sequence[Tree], noise: Noise, results: Path, device: torch.device, blocks: int
) -> bool:
    """Add blocks one by one and save each. Returns whether no benchmark failed: one that fails now
    is not certified by its earlier blocks."""
    before = time.monotonic()
    with _session(sides, noise, device) as session:
        for number, statistics in enumerate(session.blocks(blocks), 1):
            pairs = session.effort.pairs
            block = Block(now(), current_commit(sides[0].root), session.versions, pairs, statistics)
            noise.record(results, block)
            ended = time.monotonic()
            print(f"block {number} of {blocks}: {ended - before:.1f} s", flush=True)
            before = ended
        verdicts = [state.verdict for state in session.compared.values() if state.verdict]
    failed = [verdict for verdict in verdicts if not verdict.outcome.green]  # else it is untimed
    for verdict in failed:
        print(f"not certified: {verdict}")
    return not failed


def show(tree: Tree, noise: Noise, results: Path, device: torch.device) -> int:
    """Print and write the error rates; 1 where a bar is missed. Raises ValueError for too few
    blocks."""
    rules = {
        (benchmark.name, metric): (margin_of(metric, device), tolerance)
        for benchmark in benchmarks_of(tree, device)
        if not benchmark.further  # these have no A/A blocks
        for metric, tolerance in benchmark.slowdowns.items()
    }
    certificate = calibrate.certify(noise, versions(), rules)
    console().print(_table(certificate))
    bars = certificate.bars()
    for text, holds in bars.items():
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    print(f"wrote {certificate.save(results)}")
    return 0 if all(bars.values()) else 1


@contextmanager
def _session(sides: Sequence[Tree], noise: Noise, device: torch.device) -> Iterator[Session]:
    """A session of this tree against itself. Raises BusyError for a disturbed device."""
    processor = timing_processor(device)
    with (
        of_stream(sys.stdout) as progress,
        DeviceGuard(device, waiting=lambda why: progress(f"waiting: {why}")) as guard,
        PairPool(processor) as pool,
    ):
        guard.wait_until_idle()
        yield Session(
            Setting(
                base=sides[0],
                candidate=sides[1],
                device=device,
                noise=noise,
                accepted=Waivers(sides[0].root),
                guard=guard,
                affected=lambda benchmarks: {},
                measure_all=True,
                all_verdicts=True,
                pairs=pool.pairs,
                processor=processor,
                at_once=pairs_at_once(device),
                say=progress.line,
                doing=progress,
            )
        )


def _table(certificate: Certificate) -> Table:
    blocks = f"{certificate.blocks} A/A blocks, {certificate.merges:,} merges"
    table = Table(title=f"{certificate.device}: {blocks}")
    for name in ("benchmark", "metric", "spread", "tolerance", "found of it", "finds"):
        table.add_column(name, justify="left" if name in ("benchmark", "metric") else "right")
    for detection in certificate.found:
        spread, tolerance = f"{detection.spread:.2%}", f"{detection.tolerance:.1%}"
        smallest = "none" if detection.smallest is None else f"{detection.smallest:.1%}"
        shares = (spread, tolerance, f"{detection.at_tolerance:.1%}", smallest)
        table.add_row(detection.benchmark, detection.metric, *shares)
    return table
