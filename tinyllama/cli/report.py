"""``tinyllama report``: what was recorded, in twenty lines, as tables, and as one page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import file_path
from tinyllama.harness.machine.files import check_writable, replace_text
from tinyllama.model.config import ConfigError

if TYPE_CHECKING:
    from tinyllama.harness.records.results import Record
    from tinyllama.harness.records.targets import Target

PAGE = "report.html"


def add(commands: Any) -> None:
    """Add the command to an argparse group of subcommands."""
    parser = commands.add_parser("report", help="what is fastest, missed and changed; a page")
    parser.description = (
        "Print what is fastest, what misses its bar and what has changed, of the newest records "
        "of each device, and write one self-contained HTML page."
    )
    parser.add_argument("--results-dir", type=file_path, default=Path("results"), metavar="DIR")
    parser.add_argument("--device", help="only records of this device")
    parser.add_argument("--all", action="store_true", help="the tables of every figure as well")
    parser.add_argument("--html", type=file_path, default=Path(PAGE), metavar="PATH")
    parser.set_defaults(run=report)


def report(args: argparse.Namespace) -> int:
    """Print and write; 0. Raises ConfigError for a folder without records."""
    if not args.results_dir.is_dir():
        folder = str(args.results_dir)
        raise ConfigError(f"--results-dir {folder!r} is no folder: name one with records")
    check_writable(args.html, "--html")
    from tinyllama.harness.machine.device import slug
    from tinyllama.harness.machine.distribution import recording
    from tinyllama.harness.records import results
    from tinyllama.harness.report.page import check_needs, render
    from tinyllama.harness.report.summary import summaries, terminal_lines
    from tinyllama.harness.report.tables import latest, terminal

    try:
        all_records = [record for _, record in results.records(args.results_dir)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}: repair or remove that file") from error
    device = args.device
    records = [r for r in all_records if device is None or slug(device) == slug(r.device)]
    if not records:
        of_device = f" of {device!r}" if device else ""
        text = f"--results-dir {str(args.results_dir)!r} has no records{of_device}"
        raise ConfigError(f"{text}: make some with {recording()}")
    try:
        check_needs()  # before the summary, beneath which nobody would look for it
    except ValueError as error:
        raise ConfigError(str(error)) from error
    targets = _targets(all_records)
    tables = ["", *terminal(latest(records))] if args.all else []
    print("\n".join([*terminal_lines(summaries(records, targets)), *tables]))
    replace_text(args.html, render(records, targets))
    print(f"page: {args.html.resolve()}", file=sys.stderr)
    return 0


def _targets(records: "Sequence[Record]") -> "list[Target]":
    """The targets of this project, where some record has a step of one of its tiers. The ops of
    another repository may have the names of ours, and its records are not about these bars."""
    from tinyllama.bench.targets import TARGETS
    from tinyllama.harness.records.entries import StepEntry
    from tinyllama.model.tiers import TIERS

    ours = any(step.contender in TIERS for record in records for step in record.of(StepEntry))
    return TARGETS if ours else []
