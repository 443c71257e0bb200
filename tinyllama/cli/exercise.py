"""``tinyllama exercise NAME``: the table of an exercise of the workshop, or the file to fill in."""

import argparse
from typing import Any

from tinyllama.cli.argument_types import file_path
from tinyllama.harness.machine.errors import UsageError
from tinyllama.workshop import blanks

# Each is a function of `tinyllama.workshop.exercises`, which imports torch.
NAMES = ("block-sizes", "attention-memory", "attention-blocks", "swiglu", "fusion-gains")


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("exercise", help="the table or the file of an exercise")
    parser.description = (
        "Print a table that an exercise of the workshop asks for, a file that a participant fills "
        "in (tinyllama exercise --starter rope > rope.py), or its solution."
    )
    one_of = parser.add_mutually_exclusive_group(required=True).add_argument
    one_of("name", nargs="?", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    one_of("--starter", choices=blanks.NAMES, metavar="FILE", help=", ".join(blanks.NAMES))
    one_of("--solution", choices=blanks.NAMES, metavar="FILE", help="the same file, filled in")
    option = parser.add_argument
    option("--file", type=file_path, metavar="PATH", help="for block-sizes: your rms_norm.py")
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table or the file; 0."""
    if args.starter:
        print(blanks.starter(args.starter), end="")
        return 0
    if args.solution:
        print(blanks.solution(args.solution), end="")
        return 0
    if args.file is not None and args.name != "block-sizes":
        raise UsageError(f"--file is for block-sizes, not {args.name}: remove it")
    if args.file is not None and not args.file.is_file():
        raise UsageError(f"--file {str(args.file)!r} is no file: name your rms_norm.py")
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.report.tables import aligned
    from tinyllama.workshop.exercises import NOTES, rows_of

    rows = rows_of(args.name, usable_device(args.device), args.file)
    print("\n".join(aligned(rows)))
    if args.name in NOTES:
        print(NOTES[args.name])
    return 0
