"""``tinyllama gate``: compare this tree with a revision; runs pytest with the gate's plugin.

The harness that judges is not the candidate's (`tinyllama.harness.gate.judge`), and runs in a
process of its own. That process may end with any status at any time, so a green status counts only
with the report that the gate writes last.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path
from tinyllama.harness.gate.interrupted import time_limit
from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import real

UNPROVEN = 15  # as MISSING


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    gate = subparsers.add_parser("gate", help="compare this tree with a revision: is it slower?")
    gate.description = (
        "Time the ops of this tree and of a base alternately, and say which are slower "
        "(docs/GATE.md). In a repository of your own the ops are those of [tool.tinyllama] ops in "
        "pyproject.toml and those of --ops; --op chooses among them. In a repository whose "
        "conftest registers benchmarks, name the folder of that conftest. Exit status: docs/CI.md."
    )
    option = gate.add_argument
    option("paths", nargs="*", metavar="FOLDER", help="of a conftest that registers benchmarks")
    option("--against", action="append", default=[], metavar="REV", help="a branch, tag or commit")
    option(
        "--against-env", action="append", default=[], metavar="PYTHON", help="another interpreter"
    )
    option("--judge", metavar="REV", help="whose harness judges: a revision or a folder")
    option("--tree", metavar="DIR", help="judge that checkout, with the harness that runs here")
    option("--ops", nargs="+", action="extend", default=[], metavar="FILE", help="files of ops")
    option("--op", action="append", default=[], metavar="NAME", help="this op only (repeatable)")
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    option("--results-dir", type=file_path, metavar="DIR", help="of A/A blocks (default results)")
    option("--gate-json", type=file_path, metavar="FILE", help="write all that was measured")
    option("--junit", type=file_path, metavar="FILE", help="write the verdicts as JUnit XML")
    option(
        "--time-limit",
        type=time_limit,
        metavar="SECONDS",
        help="end after this time; the report has what was decided, and is not green",
    )
    option("--unwatched", action="store_true", help="on a GPU whose load cannot be read")
    option(
        "--all-verdicts", action="store_true", help="decide each benchmark, also after a SLOWER one"
    )
    option(
        "--verify",
        type=file_path,
        metavar="FILE",
        help="compare nothing; say whether this report is green, of this tree, and of --against",
    )
    gate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit status of pytest, which runs no test; 0 only with a report that is green."""
    if args.verify is not None:
        _check_alone(args)
        print(f"{args.verify}: {verified(args.verify, args)}")
        return 0
    if not (args.against or args.against_env):
        raise UsageError("name a base: --against REV, or --against-env PYTHON")
    if importlib.util.find_spec("pytest") is None:
        raise UsageError(f"the gate is a plugin of pytest: {install('test')}")
    with tempfile.TemporaryDirectory() as folder:
        report = args.gate_json or Path(folder) / "gate.json"
        check_asked(args, report)
        status = judged(args, report)
        if status == 0:
            try:
                print(f"verified: {verified(report, args)}")
            except UsageError as error:
                print(f"tinyllama: MISSING: pytest ended with 0, but {error}", file=sys.stderr)
                return UNPROVEN
        return status


def check_asked(args: argparse.Namespace, report: Path) -> None:
    """Refuse what cannot be used. Raises UsageError."""
    from tinyllama.harness.gate.asked import Asked
    from tinyllama.harness.gate.revision import RevisionError, tree_of

    here = Path(args.tree or ".")
    try:
        Asked(
            root=Path(tree_of(here)),
            here=here,
            against=args.against,
            interpreters=args.against_env,
            paths=args.paths,
            files=args.ops,
            ops=args.op,
            device=args.device,
            results=args.results_dir,
            report=report,
            junit=args.junit,
        ).check_all()
    except RevisionError as error:
        raise UsageError(str(error)) from error


def _check_alone(args: argparse.Namespace) -> None:
    """Refuse options of a comparison, which would have no effect."""
    for name in ("gate_json", "junit", "results_dir", "time_limit", "unwatched", "all_verdicts"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')}: --verify compares nothing; remove it")


def verified(report: Path, args: argparse.Namespace) -> str:
    """As `verify` says of the checkout of the current folder. Raises UsageError."""
    from tinyllama.harness.gate.judge import labels
    from tinyllama.harness.gate.proof import verify
    from tinyllama.harness.gate.revision import RevisionError, tree_of

    try:
        root = Path(tree_of(Path(args.tree or ".")))
        judges = [*filter(None, [args.judge]), *labels(root, bool(args.against_env))]
        return verify(report, root, args.against, args.op, args.device, judges)
    except RevisionError as error:
        raise UsageError(str(error)) from error


def judged(args: argparse.Namespace, report: Path) -> int:
    """The status of the judge. Raises UsageError."""
    from tinyllama.harness.gate import judge
    from tinyllama.harness.gate.revision import RevisionError, tree_of
    from tinyllama.suites import entry

    try:
        root = Path(tree_of(Path(args.tree or ".")))
        by = str(judge.HARNESS) if args.tree and args.judge is None else args.judge
        here = Path(args.tree or ".")
        paths = [os.path.relpath(real(here / path), real(root)) for path in args.paths]
        given = command_line(args, report.absolute())
        plugins = (entry.__name__, *entry.PLUGINS)
        return judge.run(root, given, paths, args.against, by, report.absolute(), plugins)
    except RevisionError as error:
        raise UsageError(str(error)) from error


def command_line(args: argparse.Namespace, report: Path) -> list[str]:
    """Of pytest, without the folders."""
    given = ["-p", "no:cacheprovider"]
    for name in ("against", "against_env", "op"):
        given += [f"--{name.replace('_', '-')}={value}" for value in getattr(args, name)]
    one = {"device": args.device, "results-dir": args.results_dir, "junitxml": args.junit}
    one["time-limit"] = args.time_limit
    given += [f"--{option}={value}" for option, value in one.items() if value is not None]
    given += [f"--gate-json={report}", *["--unwatched"] * args.unwatched]
    given += ["--all-verdicts"] * args.all_verdicts
    return [*given, *(["--ops", *args.ops] if args.ops else [])]
