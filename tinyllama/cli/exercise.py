"""``tinyllama exercise NAME``: the table of an exercise of the workshop."""

import argparse
from typing import Any

from tinyllama.cli.argument_types import file_path

NAMES = (
    "block-sizes",
    "memory-pattern",
    "attention-memory",
    "attention-blocks",
    "swiglu",
    "fusion-gains",
)


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("exercise", help="the table of an exercise of the workshop")
    parser.description = "Print a table that an exercise of docs/workshop asks for."
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    parser.add_argument(
        "--picture", type=file_path, metavar="FILE", help="of attention-memory: draw it (SVG)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0."""
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.report.tables import aligned
    from tinyllama.workshop.exercises import EXERCISES, check_picture, picture

    if args.picture:
        check_picture(args.name, args.picture)
    rows = EXERCISES[args.name](usable_device(args.device))
    print("\n".join(aligned(rows)))
    if args.picture:
        picture(rows, args.picture)
        print(f"wrote {args.picture}")
    return 0
