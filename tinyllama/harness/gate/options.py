"""What a gate is asked for, by ``tinyllama gate`` or by ``pytest --against``, and what is refused
before anything is started. It reads files and git alone, and imports no torch.
"""

import argparse
import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_apart, check_writable, real

LONGEST = 1_000_000  # seconds of a time limit


@dataclass(frozen=True)
class Options:
    """What a gate is asked for.

    tree: a folder of the checkout that is judged; None: the current one, which a harness of the
    base judges. against: revisions. against_env: interpreters of the base. ops: files of ops or
    patterns. op: names of the only ops that are compared. all: time also what no change reaches.
    all_verdicts: decide every benchmark, also after one is SLOWER. time_limit: seconds.
    """

    tree: str | None = None
    against: tuple[str, ...] = ()
    against_env: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    op: tuple[str, ...] = ()
    device: str | None = None
    results_dir: str | None = None
    gate_json: str | None = None
    summary_markdown: str | None = None
    time_limit: float | None = None
    all: bool = False
    all_verdicts: bool = False
    unwatched: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Options":
        """The options that `add` has added."""
        return msgspec.convert(vars(arguments), cls)

    @property
    def comparisons(self) -> Iterator[tuple[str | None, str]]:
        """Each revision (None: the tree itself), and the interpreter that runs the base."""
        for revision in self.against or (None,):
            for python in self.against_env or (sys.executable,):
                yield revision, python

    @property
    def reports(self) -> tuple[Path, ...]:
        """The files that a gate writes."""
        return tuple(Path(place) for place in (self.gate_json, self.summary_markdown) if place)

    def check(self, root: Path) -> None:
        """Refuse what cannot be used. root: of the checkout. Raises UsageError."""
        if not (self.against or self.against_env):
            raise UsageError("name a base: --against REV, or --against-env PYTHON")
        if self.results_dir is not None and not Path(self.results_dir).is_dir():
            raise UsageError(
                f"--results-dir {self.results_dir}: no such folder; name one with A/A blocks, "
                "which certify records, or leave it out"
            )
        for python in self.against_env:
            if not os.access(python, os.X_OK) or Path(python).is_dir():
                raise UsageError(f"--against-env {python}: no interpreter is there; name another")
            if Path(python).absolute() == Path(sys.executable) and not self.against:
                raise UsageError(f"--against-env {python}: it runs the gate itself; name another")
        self._check_places()
        for pattern in self.ops:
            _check_files(pattern, root)

    def _check_places(self) -> None:
        options = ("gate_json", "summary_markdown")
        places = {f"--{name.replace('_', '-')}": getattr(self, name) for name in options}
        named = {option: Path(place) for option, place in places.items() if place}
        for option, place in named.items():
            check_writable(place, option)
        check_apart(*named.items())


def add(option: Callable[..., Any]) -> None:
    """Add the gate's own options. option: `argparse.ArgumentParser.add_argument`, or pytest's."""
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    option("--against", metavar="REV", help="a branch, tag or commit (repeatable)", **repeatable)
    option(
        "--against-env",
        metavar="PYTHON",
        help="the interpreter of the base, with its torch and triton (repeatable)",
        **repeatable,
    )
    option("--tree", metavar="DIR", help="judge that checkout, with the harness that runs here")
    option("--gate-json", metavar="FILE", help="write the report: all that was measured")
    option("--summary-markdown", metavar="FILE", help="write the summary, for a comment")
    option("--all", action="store_true", help="time also what no change reaches")
    option(
        "--all-verdicts", action="store_true", help="decide each benchmark, also after a SLOWER one"
    )
    option(
        "--time-limit",
        type=time_limit,
        metavar="SECONDS",
        help="end after this time; the report has what was decided, and is not green",
    )
    option("--unwatched", action="store_true", help="gate on a GPU whose load cannot be read")


def add_shared(option: Callable[..., Any]) -> None:
    """Add the options that a pytest session has for its tests, too."""
    option("--ops", nargs="+", action="extend", default=[], metavar="FILE", help="files of ops")
    option("--op", action="append", default=[], metavar="NAME", help="this op only (repeatable)")
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    option("--results-dir", metavar="DIR", help="folder of A/A blocks (default results)")


def of_pytest(arguments: Sequence[str]) -> Options:
    """What a command line of pytest asks of the gate.

    Raises UsageError for any other option: it would leave something out, or measure something else.
    """
    parser = argparse.ArgumentParser(prog="pytest", add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[assignment,method-assign]
    add(parser.add_argument)
    add_shared(parser.add_argument)
    for ignored in ("-q", "-v", "-s", "-x", "-vv", "--benchmark-compare"):
        parser.add_argument(ignored, action="store_true", dest="ignored")
    for ignored in ("-p", "--tb", "--color", "--rootdir"):
        parser.add_argument(ignored, action="append", dest="ignored_values")
    parser.add_argument("paths", nargs="*")
    parsed, unknown = parser.parse_known_args(list(arguments))
    for path in (path for path in parsed.paths if not Path(path).exists()):
        raise UsageError(f"{path}: no such folder of timings; tests cannot be named one by one")
    if unknown:
        raise UsageError(f"{unknown[0]}: the gate times every benchmark; remove it")
    return Options.of(parsed)


def time_limit(text: str) -> float:
    """An argparse type: seconds after which a gate is ended, from 1 to `LONGEST`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= LONGEST:
        message = f"{text!r:.80} is no time limit: use seconds from 1 to {LONGEST}"
        raise argparse.ArgumentTypeError(message)
    return seconds


def _refuse(message: str) -> None:
    raise UsageError(message)


def _check_files(pattern: str, root: Path) -> None:
    files = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    if not files:
        raise UsageError(f"--ops {pattern}: no such file; name a Python file of ops")
    for file in files:
        if not (os.path.isfile(file) and file.endswith(".py")):
            raise UsageError(f"--ops {pattern}: {file} is no Python file: name files of ops")
        if not real(Path(file)).is_relative_to(real(root)):
            raise UsageError(f"--ops {file}: the gate compares files of {root}: name one")
