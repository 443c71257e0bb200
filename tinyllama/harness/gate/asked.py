"""What a gate is asked for is refused here where it cannot be used: before a judge is started or
unpacked, and before anything waits for the device. Only files and git are read.
"""

import ast
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.gate.judge import HARNESS, is_own
from tinyllama.harness.gate.proof import check_report
from tinyllama.harness.gate.revision import (
    RevisionError,
    resolve,
    same_tree,
    texts,
    tracked_files,
    untracked_code,
)
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_apart, check_writable, real

DEVICE = re.compile(r"cpu(:0)?|cuda(:\d+)?")
_PYPROJECT = "pyproject.toml"
_DECLARES = "Op("
_NO_BENCHMARKS = ("correctness_tests", "docs", "field", "tools")  # declare ops too


@dataclass(frozen=True)
class Asked:
    """The options of a gate of the tree ``root``. here: the folder to which ``paths`` are relative;
    ``files`` are to the current one. ops: the only ones that are compared."""

    root: Path
    here: Path
    against: Sequence[str] = ()
    interpreters: Sequence[str] = ()
    paths: Sequence[str] = ()
    files: Sequence[str] = ()
    ops: Sequence[str] = ()
    device: str | None = None
    results: Path | None = None
    report: Path | None = None
    junit: Path | None = None

    def check_all(self) -> None:
        """All that is known before a judge is. Raises UsageError, and RevisionError."""
        commits = self.check()
        own = is_own(self.root, self.against)
        if own:
            self.check_files(commits.values())
        elif self.files:
            raise UsageError(
                "--ops: the gate times the benchmarks of this repository's conftest; remove it"
            )
        self.check_ops(commits.values(), own)

    def check(self) -> dict[str, str]:
        """The commit of each revision; an earlier report is removed.

        Raises UsageError, and RevisionError for a revision.
        """
        self._check_places()
        if self.report:
            self.report.unlink(missing_ok=True)  # else it could be taken for this run's
        if self.results is not None and not self.results.is_dir():
            raise UsageError(
                f"--results-dir {self.results}: no such folder; name one with A/A blocks, which "
                "certify records, or leave it out"
            )
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise UsageError(
                f"--device {self.device}: device {self.device!r} is unknown: use cpu, cuda or "
                "cuda:N"
            )
        for name in self.interpreters:
            _check_interpreter(Path(name))
        for path in self.paths:
            _check_path(path, self.here, self.root)
        commits = {rev: resolve(rev, self.root) for rev in self.against}
        for rev, commit in commits.items():
            if same_tree(commit, self.root):
                raise RevisionError(
                    f"--against {rev!r}: this tree is that revision, byte for byte: check out "
                    "the candidate"
                )
        return commits

    def check_ops(self, commits: Iterable[str], own: bool) -> None:
        """Refuse an op that no file of a side can declare. Raises UsageError.

        own: the sides have no harness, but ops alone. Where a name is computed, the sides
        themselves say which ops they have, after the wait for the device.
        """
        if not self.ops:
            return
        files = (*tracked_files(self.root), *untracked_code(self.root))
        found = [*_here(path for path in files if _counts(path.relative_to(self.root), own))]
        for commit in commits:
            each = texts(commit, _DECLARES, "*.py", self.root)
            found += [text for name, text in each.items() if _counts(Path(name), own)]
        if own:  # a file may register providers on these
            found += _here((HARNESS / "tinyllama/ops").rglob("*.py"))
        declared, strings = set[str](), set[str]()
        for text in found:
            names, every = _strings(text)
            if names is None:
                return
            declared |= names
            strings |= every
        for op in self.ops:
            if declared and op not in strings:
                raise UsageError(
                    f"--op {op!r:.80} is no op of either side: use one of "
                    f"{', '.join(sorted(declared))}"
                )

    def check_files(self, commits: Iterable[str]) -> None:
        """Of a repository without a harness: which files of ops are named. Raises UsageError."""
        for pattern in self.files:
            found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
            if not found:
                raise UsageError(f"--ops {pattern}: no such file; name a Python file of ops")
            for file in found:
                if not os.path.isfile(file) or not file.endswith(".py"):
                    raise UsageError(
                        f"--ops {pattern}: {file} is no Python file: name files of ops, and "
                        "folders of tests before --ops"
                    )
                if not real(Path(file)).is_relative_to(real(self.root)):
                    raise UsageError(
                        f"--ops {file}: the gate compares files of {self.root}: name one"
                    )
        settings = [*_here([self.root / _PYPROJECT])]
        for commit in commits:
            settings += texts(commit, "tinyllama", _PYPROJECT, self.root).values()
        if not self.files and not any("tinyllama" in text for text in settings):
            raise UsageError(
                "no ops are named: add --ops FILE, or [tool.tinyllama] ops to pyproject.toml"
            )

    def _check_places(self) -> None:
        check_writable(self.report, "--gate-json")
        if self.junit is not None:  # pytest makes its folder
            there = next(path for path in self.junit.absolute().parents if path.exists())
            made = there if there != self.junit.absolute().parent else self.junit.parent
            check_writable(made / self.junit.name, "--junit")
        for place, option in ((self.report, "--gate-json"), (self.junit, "--junit")):
            check_report(place, self.root, option)
        check_apart(("--gate-json", self.report), ("--junit", self.junit))


def _check_interpreter(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"--against-env {path}: no such file; name an interpreter")
    if not os.access(path, os.X_OK):
        raise UsageError(f"--against-env {path}: it cannot be executed; name an interpreter")
    if path.absolute() == Path(sys.executable):
        raise UsageError(f"--against-env {path}: this interpreter runs the gate; name another one")


def _check_path(path: str, here: Path, root: Path) -> None:
    if not real(here / path).is_relative_to(real(root)):
        raise UsageError(f"{path} is outside {root}: name a folder of timings in it")
    if not (here / path).exists():
        raise UsageError(f"{path}: no such folder; name that of a conftest of timings")


def _counts(path: Path, own: bool) -> bool:
    """Whether a file, relative to the root, may declare an op that has benchmarks."""
    return path.suffix == ".py" and (own or path.parts[0] not in _NO_BENCHMARKS)


def _here(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue  # the side that imports it says so


def _strings(text: str) -> tuple[set[str] | None, set[str]]:
    """The names of the ops that a file declares, None where one is computed; and its strings, of
    which any may be the name of an op."""
    if _DECLARES not in text:
        return set(), set()
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError):
        return None, set()
    strings = {one for one in map(_text, nodes) if one is not None}
    names = [_text(_named(node)) for node in nodes if isinstance(node, ast.Call) and _is_op(node)]
    literal = {name for name in names if name is not None}
    return (literal if len(literal) == len({*names}) else None), strings


def _is_op(call: ast.Call) -> bool:
    return getattr(call.func, "id", getattr(call.func, "attr", "")) == "Op"


def _named(call: ast.Call) -> ast.AST | None:
    """What a call gives as a name."""
    words = [word.value for word in call.keywords if word.arg == "name"]
    return next(iter([*call.args, *words]), None)


def _text(node: ast.AST | None) -> str | None:
    """The text of a literal; None of anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
