"""``python -m tinyllama report``: what was recorded, as tables and as one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllama.cli.options import file_path
from tinyllama.cli.records import stored
from tinyllama.model.config import ConfigError

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
    from tinyllama.bench.targets import OF_STEPS
    from tinyllama.harness.gate.certificates import certificates
    from tinyllama.harness.machine.files import check_apart, check_writable, replace_text
    from tinyllama.harness.page import render
    from tinyllama.harness.records import history
    from tinyllama.harness.records.report import latest, markdown, terminal

    printed = args.markdown == Path("-")
    aside = None if printed else args.markdown
    check_apart(("--html", args.html), ("--markdown", aside))
    records = _records(args.results_dir, args.device)
    try:
        certified = certificates(args.results_dir, args.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error}: repair or remove that file") from error
    check_writable(args.html, "--html")
    if aside:
        check_writable(aside, "--markdown")
    shown = latest(records)
    text = f"{markdown(shown)}\n\n{history.markdown(records)}\n\n{_claims(records)}\n"
    if printed:
        sys.stdout.write(text)
    else:
        sys.stdout.write("\n".join([*terminal(shown), "", _claims(records), ""]))
    if aside:
        replace_text(aside, text)
    try:
        page = render(records, OF_STEPS, certificates=certified)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    replace_text(args.html, page)
    print(f"page: {args.html.resolve()}", file=sys.stderr)
    return 0


def _records(root: Path, device: str | None) -> list[Any]:
    found = [record for _, record in stored(root, device)]
    if not found:
        of = f" of {device!r}" if device else ""
        raise ConfigError(
            f"--results-dir {str(root)!r} has no records{of}: make some with "
            "pytest perf_tests --record"
        )
    return found


def _claims(records: Sequence[Any]) -> str:
    """The documented figures, each with what must be known of it."""
    from tinyllama.bench.targets import OF_STEPS

    devices = [record.device for record in records]
    lines = []
    for target in (target for target in OF_STEPS if target.documented):
        never = target.never_run(devices)
        device = f"{target.device} ({never})" if never else target.device
        where = " and ".join((*target.workload, *target.precision))
        lines.append(f"- {target}, {where}: {device}; {target.caveat}")
    return "\n".join(["Documented, not measured here:", "", *lines])
