"""``tinyllama certify``: A/A blocks of this device, and the error rates of the gate on it.

torch is imported by the command, not here, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinyllama
from tinyllama.config import ConfigError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from tinyllama.harness.gate.certify import Certificate
    from tinyllama.harness.gate.noise import Noise
    from tinyllama.harness.gate.session import Session

SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10)  # by turns over the benchmarks that are slowed
SHORTEST = 2e-4  # seconds of a benchmark of which 1% is real work that can be asked for


def add_certify(subparsers: Any) -> None:
    """Add the command; it sets ``run``, a function of the arguments that returns the status."""
    parser = subparsers.add_parser("certify", help="measure the gate's error rates on this device")
    parser.description = (
        "Run this tree against itself in blocks, as the gate does, and add them to the device's "
        "(resumable: blocks add up from run to run). With 20 or more, say how often a merge would "
        "be stopped for nothing, and which slowdowns would be found."
    )
    add = parser.add_argument
    add("--blocks", type=int, default=20, help="blocks to add (default %(default)s; 0: none)")
    add("--seconds", type=float, help="end before the block that would take longer than this")
    add("--provider", action="append", metavar="NAME", help="only these providers; repeatable")
    add("--merges", type=int, default=100_000, help="simulated merges (default %(default)s)")
    add("--results-dir", type=Path, default=Path("results"), metavar="DIR")
    add("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    add(
        "--validate",
        action="store_true",
        help="gate this tree against itself with real work added to some benchmarks instead",
    )
    parser.set_defaults(run=_certify)


def _certify(args: argparse.Namespace) -> int:
    import torch

    from tinyllama.harness.device import default_device, device_name
    from tinyllama.harness.gate.noise import Noise
    from tinyllama.harness.gate.pair import launcher
    from tinyllama.harness.gate.watch import BusyError, Watch, device_lock

    if args.blocks < 0 or args.merges < 1000:
        raise ConfigError("use --blocks of 0 or more, and --merges of 1000 or more")
    try:
        device = torch.device(args.device) if args.device else default_device()
        name = device_name(device)
        noise = Noise.load(args.results_dir, name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if args.validate or args.blocks:
        try:
            with (
                device_lock(device, 60.0),
                tempfile.TemporaryDirectory() as folder,
                launcher() as pairs,
            ):
                watch = Watch(device)
                if disturbed := watch.before():
                    raise BusyError(disturbed)
                if args.validate:
                    return _validate(args, device, noise, watch, Path(folder), pairs)
                _record(args, device, noise, watch, Path(folder), pairs)
        except BusyError as error:
            print(f"tinyllama: {error}", file=sys.stderr)
            return 14
    return _show(args, device, noise)


def _session(
    args: argparse.Namespace,
    device: torch.device,
    noise: Noise,
    watch: Any,
    folder: Path,
    pairs: Any,
    slowed: Mapping[str, float] | None = None,
) -> Session:
    """This tree against itself."""
    from tinyllama.harness.gate.accepted import Accepted
    from tinyllama.harness.gate.comparison import PACKAGE, sources
    from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
    from tinyllama.harness.gate.session import Session
    from tinyllama.harness.gate.setting import Setting
    from tinyllama.harness.gate.side import declared

    root = Path(tinyllama.__file__).resolve().parent.parent
    chosen = [
        one.name
        for one in declared(device, PACKAGE)
        if not args.provider or one.timed.provider in args.provider
    ]
    if not chosen:
        raise ConfigError(f"--provider {', '.join(args.provider)}: it has no benchmark here")
    return Session(
        Setting(
            base=Tree(BASE, root, sys.executable, "itself", folder / BASE),
            candidate=Tree(
                CANDIDATE, root, sys.executable, "itself", folder / CANDIDATE, slowed or {}
            ),
            device=device,
            package=PACKAGE,
            noise=noise,
            accepted=Accepted(root),
            watch=watch,
            sources=sources,
            measure_all=True,
            only=chosen,
            pairs=pairs,
            say=lambda line: print(time.strftime("%H:%M:%S"), line, flush=True),
        )
    )


def _record(
    args: argparse.Namespace,
    device: torch.device,
    noise: Noise,
    watch: Any,
    folder: Path,
    pairs: Any,
) -> None:
    """Add blocks one by one, each saved when it is there."""
    from tinyllama.harness.gate.noise import Block
    from tinyllama.harness.gate.session import Stopped
    from tinyllama.harness.results import current_commit

    session = _session(args, device, noise, watch, folder, pairs)
    began, longest = time.monotonic(), 0.0
    before = began
    try:
        for number, statistics in enumerate(session.blocks(), 1):
            now = time.monotonic()
            noise.add(
                Block(
                    datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                    current_commit(),
                    session.versions,
                    session.effort.pairs,
                    statistics,
                )
            )
            noise.save(args.results_dir)
            took = now - before
            print(f"block {number} of {args.blocks}: {took:.1f} s", flush=True)
            longest = max(longest, took if number > 1 else 0.0)
            before = now
            late = args.seconds is not None and now - began + longest > args.seconds
            if number == args.blocks or late:
                break
    except Stopped as stop:
        raise ConfigError(str(stop)) from stop
    for one in session.found.values():
        if one.verdict is not None:
            print(f"not certified: {one.verdict}")


def _validate(
    args: argparse.Namespace,
    device: torch.device,
    noise: Noise,
    watch: Any,
    folder: Path,
    pairs: Any,
) -> int:
    """The gate on benchmarks that are really slower, and on some that are not."""
    from tinyllama.harness.gate.comparison import PACKAGE
    from tinyllama.harness.gate.side import declared

    names = [
        one.name
        for one in declared(device, PACKAGE)
        if not args.provider or one.timed.provider in args.provider
    ]
    slowed = {name: SLOWDOWNS[i % len(SLOWDOWNS)] for i, name in enumerate(names)}
    session = _session(
        args,
        device,
        noise,
        watch,
        folder,
        pairs,
        {name: share for name, share in slowed.items() if share},
    )
    for verdict in session.run():
        share = slowed.get(verdict.name)
        print(f"{'' if share is None else f'{share:+.0%} '}{verdict}", flush=True)
    report = {"slowed": slowed, **session.report()}
    path = noise_folder(args.results_dir, noise.device) / "validation.json"
    from tinyllama.harness.files import replace_text

    replace_text(path, json.dumps(report, indent=1) + "\n")
    return 0


def noise_folder(results: Path, device: str) -> Path:
    from tinyllama.harness.gate.noise import noise_path

    return noise_path(results, device).parent


def _show(args: argparse.Namespace, device: torch.device, noise: Noise) -> int:
    """The error rates, and whether they hold the bars; 1 where they do not."""
    from tinyllama.harness.files import replace_text
    from tinyllama.harness.gate.certify import bars, certify
    from tinyllama.harness.gate.comparison import PACKAGE
    from tinyllama.harness.gate.setting import margin_of
    from tinyllama.harness.gate.side import declared
    from tinyllama.harness.results import versions
    from tinyllama.summary import console

    chosen = {
        one.name: one.slowdowns
        for one in declared(device, PACKAGE)
        if not args.provider or one.timed.provider in args.provider
    }
    usual = next(iter(chosen.values()))
    rules = {metric: (margin_of(metric, device), usual[metric]) for metric in usual}
    try:
        found = certify(noise, versions(), rules, chosen, chosen, args.merges)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    out = console(sys.stdout)
    out.print(_table(found))
    judged = bars(found)
    for bar in judged:
        print(f"{'holds ' if bar.held else 'MISSED'} {bar.text}: {bar.measured}")
    path = noise_folder(args.results_dir, noise.device) / "certificate.json"
    blocks = noise.of(versions())
    content = {
        "date": max(block.date for block in blocks),
        "commits": sorted({block.commit for block in blocks}),
        **found.as_dict(),
    }
    content["bars"] = [bar._asdict() for bar in judged]
    replace_text(path, json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0 if all(bar.held for bar in judged) else 1


def _table(found: Certificate) -> Table:
    from rich.table import Table

    table = Table(title=f"{found.device}: {found.blocks} A/A blocks, {found.merges:,} merges")
    names = ("benchmark", "metric", "spread", *(f"{s:.0%}" for s in (0.01, 0.02, 0.05, 0.1)))
    for name in (*names, "finds"):
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for one in found.found:
        shares = [f"{share:.1%}" for share in one.detected.values()]
        smallest = "none" if one.smallest is None else f"{one.smallest:.1%}"
        table.add_row(one.benchmark, one.metric, f"{one.spread:.2%}", *shares, smallest)
    return table
