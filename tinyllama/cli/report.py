"""``python -m tinyllama report``: what was recorded, as tables and as one page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import file_path
from tinyllama.cli.records import stored
from tinyllama.model.config import ConfigError

if TYPE_CHECKING:
    from tinyllama.harness.records.results import Record
    from tinyllama.harness.records.targets import OpTarget, Target

PAGE = "report.html"


def add(commands: Any) -> None:
    """Add the command to an argparse group of subcommands."""
    parser = commands.add_parser("report", help="show the records: tables, and an HTML page")
    parser.description = (
        "Print the newest record of each group, and write one self-contained HTML page of all."
    )
    parser.add_argument("--results-dir", type=file_path, default=Path("results"), metavar="DIR")
    parser.add_argument("--device", help="only records of this device")
    parser.add_argument("--html", type=file_path, default=Path(PAGE), metavar="PATH")
    parser.add_argument(
        "--markdown",
        type=file_path,
        metavar="PATH",
        help="write Markdown as well; - prints it instead of the tables (for a step summary)",
    )
    parser.set_defaults(run=report)


def report(args: argparse.Namespace) -> int:
    """Print and write; 0. Raises ConfigError for a folder without records."""
    from tinyllama.harness.gate.calibrate import certificates
    from tinyllama.harness.machine.files import check_apart, check_writable, replace_text
    from tinyllama.harness.page import check_needs, render
    from tinyllama.harness.records.report import latest, markdown, terminal

    printed = args.markdown == Path("-")
    aside = None if printed else args.markdown
    check_apart(("--html", args.html), ("--markdown", aside))
    every = [record for _, record in stored(args.results_dir)]
    records = _of_device(every, args.results_dir, args.device)
    targets = _targets(every)
    try:
        check_needs()  # before the tables, beneath which nobody would look for it
        certified = certificates(args.results_dir, args.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error}: repair or remove that file") from error
    check_writable(args.html, "--html")
    if aside:
        check_writable(aside, "--markdown")
    shown = latest(records)
    claims = _claims(targets, records)
    text = "\n\n".join([markdown(shown), *claims]) + "\n"
    if printed:
        sys.stdout.write(text)
    else:
        sys.stdout.write("\n".join([*terminal(shown), "", *claims, ""]))
    if aside:
        replace_text(aside, text)
    try:
        page = render(records, targets, certificates=certified)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    replace_text(args.html, page)
    print(f"page: {args.html.resolve()}", file=sys.stderr)
    return 0


def _of_device(every: "Sequence[Record]", root: Path, device: str | None) -> "list[Record]":
    from tinyllama.harness.machine.device import slug
    from tinyllama.harness.machine.distribution import recording

    found = [r for r in every if device is None or slug(device) == slug(r.device)]
    if not found:
        of = f" of {device!r}" if device else ""
        raise ConfigError(
            f"--results-dir {str(root)!r} has no records{of}: make some with {recording()}"
        )
    return found


def _targets(records: "Sequence[Record]") -> "list[Target | OpTarget]":
    """The targets of this project, where some record has a step of one of its tiers. The ops of
    another repository may have the names of ours, and its records are not about these bars."""
    from tinyllama.bench.targets import OF_OPS, OF_STEPS
    from tinyllama.harness.records.entries import StepEntry
    from tinyllama.model.tiers import TIERS

    ours = any(step.contender in TIERS for record in records for step in record.of(StepEntry))
    return [*OF_STEPS, *OF_OPS] if ours else []


def _claims(targets: "Sequence[Target | OpTarget]", records: "Sequence[Record]") -> list[str]:
    """The documented figures as text, each with its caveat; empty if there are none."""
    from tinyllama.harness.records.targets import Target

    devices = [record.device for record in records]
    lines = []
    for target in targets:
        if not (isinstance(target, Target) and target.documented):
            continue
        never = target.never_run(devices)
        device = f"{target.where} ({never})" if never else target.where
        where = " and ".join((*target.workload, *target.precision))
        lines.append(f"- {target}, {where}: {device}; {target.caveat}")
    return ["\n".join(["Documented, not measured here:", "", *lines])] if lines else []
