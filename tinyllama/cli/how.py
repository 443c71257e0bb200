"""``tinyllama how NAME``: the command that replaces a script of the published course."""

import argparse
from typing import Any

from tinyllama.harness.machine.errors import UsageError


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    how = subparsers.add_parser("how", help="the command that replaces a script of the course")
    how.description = (
        "Print the command that replaces a script or a command of the published course."
    )
    how.add_argument("name", help="such as get_trace.sh, or rocprofv2")
    how.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the rows of a name; 0. Raises UsageError for a name that is not there."""
    from tinyllama.profiling.course import ROWS, find

    rows = find(args.name)
    if not rows:
        names = ", ".join(row.theirs for row in ROWS)
        raise UsageError(f"{args.name!r} is not in the published course: use one of {names}")
    for row in rows:
        print(f"{row.theirs}: {row.ours}")
        print(f"    {row.leaves}")
        if row.note:
            print(f"    {row.note}")
    return 0
