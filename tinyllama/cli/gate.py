"""``tinyllama gate``: compare this tree with a revision, and say which ops are slower."""

import argparse
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path
from tinyllama.harness.gate import options
from tinyllama.harness.gate.options import Options
from tinyllama.harness.machine.errors import UsageError

_OF_A_COMPARISON = (
    *("gate_json", "summary_markdown", "results_dir", "time_limit"),
    *("unwatched", "all", "all_verdicts"),
)


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    gate = subparsers.add_parser("gate", help="compare this tree with a revision: is it slower?")
    gate.description = (
        "Time the ops of this tree and of a base alternately, and say which are slower. The ops "
        "are those of [tool.tinyllama] in pyproject.toml, or those of --ops; --op chooses among "
        "them. Exit status: 0 green, 10 SLOWER, 11 INCONCLUSIVE, 12 NO BASELINE, 13 OTHER DEVICE "
        "OR VERSION, 14 BUSY, 15 MISSING, 16 WRONG RESULT, 17 NOT JUDGED."
    )
    options.add(gate.add_argument)
    options.add_shared(gate.add_argument)
    gate.add_argument(
        "--verify",
        type=file_path,
        metavar="FILE",
        help="compare nothing; say whether this report is green, of this tree, and of --against",
    )
    gate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 only with a report that is green."""
    from tinyllama.harness.gate import command

    asked = Options.of(args)
    if args.verify is None:
        return command.run(asked)
    for name in _OF_A_COMPARISON:
        if getattr(asked, name):
            raise UsageError(f"--{name.replace('_', '-')}: --verify compares nothing; remove it")
    print(f"{args.verify}: {command.verified(asked, Path(args.verify))}")
    return 0
