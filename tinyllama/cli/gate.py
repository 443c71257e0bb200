"""``tinyllama gate``: this tree against a revision, by the command line of pytest's plugin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tinyllama.cli.options import file_path
from tinyllama.harness.machine.errors import UsageError


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    gate = subparsers.add_parser("gate", help="compare this tree with a revision: is it slower?")
    gate.description = (
        "Time the ops of this tree and of a base alternately, and say which are slower "
        "(docs/GATE.md). In a repository of your own the ops are those of --ops, of --op, or of "
        "[tool.tinyllama] ops in pyproject.toml. In a repository whose conftest registers "
        "benchmarks, name the folder of that conftest. Exit status: docs/CI.md."
    )
    option = gate.add_argument
    option("paths", nargs="*", metavar="FOLDER", help="of a conftest that registers benchmarks")
    option("--against", action="append", default=[], metavar="REV", help="a branch, tag or commit")
    option(
        "--against-env", action="append", default=[], metavar="PYTHON", help="another interpreter"
    )
    option("--ops", nargs="+", action="extend", default=[], metavar="FILE", help="files of ops")
    option("--op", action="append", default=[], metavar="NAME", help="this op only (repeatable)")
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    option("--results-dir", type=file_path, metavar="DIR", help="of A/A blocks (default results)")
    option("--gate-json", type=file_path, metavar="FILE", help="write all that was measured")
    option("--junit", type=file_path, metavar="FILE", help="write the verdicts as JUnit XML")
    option("--unwatched", action="store_true", help="on a GPU whose load cannot be read")
    gate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit status of pytest, which runs no test."""
    if not (args.against or args.against_env):
        raise UsageError("name a base: --against REV, or --against-env PYTHON")
    try:
        import pytest
    except ImportError:
        from tinyllama.harness.machine.distribution import install

        raise UsageError(f"the gate is a plugin of pytest: {install('test')}") from None
    return int(pytest.main(command_line(args)))


def command_line(args: argparse.Namespace) -> list[str]:
    """Of pytest. The plugin is named, so that a checkout that is not installed has it too."""
    given = ["-p", "tinyllama.suites.entry", "-p", "no:cacheprovider", *args.paths]
    for name in ("against", "against_env", "op"):
        given += [f"--{name.replace('_', '-')}={value}" for value in getattr(args, name)]
    for name, option in (
        ("device", "--device"),
        ("results_dir", "--results-dir"),
        ("gate_json", "--gate-json"),
        ("junit", "--junitxml"),
    ):
        value: str | Path | None = getattr(args, name)
        given += [] if value is None else [f"{option}={value}"]
    given += ["--unwatched"] * args.unwatched
    return [*given, *(["--ops", *args.ops] if args.ops else [])]
