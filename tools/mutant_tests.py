"""Which tests a change of a module is tried with: those that execute its lines, of files near it.

Each test file runs once unchanged under `coverage`, which keeps the lines of every test, and of the
processes that it starts. The answer is kept in ``build/mutants`` until the test file changes.
"""

import ast
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tinyllama.harness.machine.files import replace_text
from tools.copies import copied
from tools.mutant_record import ROOT, relative
from tools.once import TEST
from tools.tested import SURVIVED

FOLDERS = ("tinyllama/harness", "tinyllama/model", "tinyllama/training")
KEPT = ROOT / "build/mutants"
MOST = 60.0  # seconds of a processor, after which no other test of a file is traced
SECONDS = 600.0  # that tracing a file may take
TIMES = 5.0  # as long as the unchanged test a test may take, beside `LEAST`
LEAST = 60.0  # seconds; processors may be busy
ENDING = 20.0  # seconds that a process may take to end those that it started
ENOUGH = 20  # test files: a module may be imported by few, and be executed by others
BUDGET = 45.0  # seconds that the tests chosen from some files may take unchanged
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

THESE = {"tools.module_mutants", "tools.mutant_tests"}  # whose tests read what a module says

Tests = dict[str, float]  # by name, the seconds that each takes unchanged


# -- which tests import a module ------------------------------------------------------------------


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """The modules that a file imports, and the names that it takes from them, as dotted names; and
    modules of the tree that it names in a text, as one does that has pytest load plugins."""
    text = file.read_text(encoding="utf-8")
    found: set[str] = set(
        re.findall(r"[\"']((?:tinyllama|correctness_tests)(?:\.\w+)+)[\"']", text)
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return frozenset(found)


def module_of(file: Path) -> str:
    """The dotted name of a file of the tree."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _importers(module: str) -> tuple[Path, ...]:
    every = (
        path for top in ("tinyllama", "correctness_tests") for path in (ROOT / top).rglob("*.py")
    )
    return tuple(sorted(path for path in every if module in imports(path)))


def tests_of(module: str) -> dict[str, int]:
    """The test files that import a module, by themselves or through a module of
    `correctness_tests.support`; while they are fewer than `ENOUGH`, those of the modules that
    import it too, and so on. The number: of the modules between."""
    tests: dict[str, int] = {}
    seen, now, between = {module}, [module], 0
    while now and len(tests) < ENOUGH:
        importers = [path for one in now for path in _importers(one)]
        helpers = [path for path in importers if "support" in path.parts]
        users = [*importers, *(user for path in helpers for user in _importers(module_of(path)))]
        found = {
            str(path.relative_to(ROOT))
            for path in users
            if path.name.startswith("test_") and not THESE & imports(path)
        }
        tests = dict.fromkeys(found, between) | tests
        now = [name for path in importers if (name := module_of(path)) not in seen]
        seen.update(now)
        between += 1
    return tests


# -- a copy of the tree, and tests in it ----------------------------------------------------------


class TimeOverError(Exception):
    """The time of the whole run was over before a request ended."""


@contextlib.contextmanager
def servers(
    number: int, end: float = float("inf"), files: Sequence[str] = ()
) -> "Iterator[list[Server]]":
    """Servers in copies of the tree's files, in which mutants are planted. Each copy has a change
    that is not committed, so that no mutant is killed by a test that asks whether there is one.

    files: of tests, for changes that are swapped in. end: of `time.monotonic`; a request that has
    not ended by then raises TimeOverError.
    """

    def started(tree: Path) -> Server:
        copied(ROOT, tree)
        with (tree / "tinyllama/__init__.py").open("a") as changed:
            changed.write("# changed\n")
        return Server(tree, end, files)

    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(number) as pool:
            trees = [Path(folder) / str(copy) for copy in range(number)]
            running = list(pool.map(started, trees))
        try:
            yield running
        finally:
            for one in running:
                one.close()


class Server:
    """A process that runs tests in a tree, and one that has collected those of some files, each
    started when it is first asked; see `tools.tested`."""

    def __init__(self, tree: Path, end: float = float("inf"), files: Sequence[str] = ()) -> None:
        self.tree, self._end, self._files, self._planted = tree, end, files, 0
        self._paths = [str(tree), *(path for path in _paths() if Path(path) != ROOT)]
        self._running: dict[bool, subprocess.Popen[str]] = {}
        self._changing, self._closed = threading.Lock(), False

    def process(self, collected: bool = False) -> "subprocess.Popen[str]":
        with self._changing:
            if collected not in self._running:
                if self._closed:
                    raise RuntimeError("the run was stopped")
                self._running[collected] = self._started(collected)
            return self._running[collected]

    def _started(self, collected: bool) -> "subprocess.Popen[str]":
        # Else each request would compile the tree once more.
        given = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        folder = str(self.tree.parent)  # what a process that is killed leaves goes with the tree
        paths = {"PYTHONPATH": os.pathsep.join(self._paths), "TMPDIR": folder}
        return subprocess.Popen(
            [sys.executable, "-m", "tools.tested", *(self._files if collected else ())],
            cwd=self.tree,
            env={**given, **WITHOUT_GPU, **paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(
        self,
        seconds: float,
        request: dict[str, Any],
        path: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        *,
        collected: bool = False,
    ) -> Any:
        """The answer to a request, which may take so many seconds. path: a folder of modules for
        the processes that tests start.

        Raises TimeOverError if the run's time is over first.
        """
        process = self.process(collected)
        seconds = max(0.0, min(seconds, self._end - time.monotonic()))
        paths = os.pathsep.join([path, *self._paths] if path else self._paths)
        asked = {**request, "limit": seconds, "environment": {**env, "PYTHONPATH": paths}}
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        if not (said := process.stdout.readline()):
            raise RuntimeError(f"the process of the tests ended with status {process.wait()}")
        if time.monotonic() >= self._end:
            raise TimeOverError
        return json.loads(said)

    @contextlib.contextmanager
    def planted(self, file: str, text: str) -> Iterator[None]:
        """A file of the tree holds this text. Its time is one of its own: Python takes a compiled
        file for that of a source with the same size and the same second."""
        path = self.tree / file
        original, before = path.read_bytes(), path.stat()
        self._planted += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (before.st_atime, before.st_mtime + self._planted))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def failing(self, file: str, tests: Sequence[str]) -> set[str]:
        """Those of the tests of a file that fail."""
        limits = dict.fromkeys(tests, LEAST)
        found = self.ask(LEAST * (1 + len(tests)), {"file": file, "seconds": limits})
        return set(found["failed"]) if isinstance(found, dict) else set(tests)

    def run(self, tests: Tests) -> tuple[str, str]:
        """The outcome of these tests, and the first that fails or the first error."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return self._outcome(tests, files=files)[:2]

    def swapped(self, source: str, text: str, tests: Tests) -> tuple[str, str]:
        """The same in a fork of a process that has imported a source file, some functions of which
        run as in a changed text of it. What fails unchanged in such a fork counts as survived."""
        outcome, check, test = self._outcome(tests, source=source, text=text)
        if outcome != SURVIVED:
            last = list(tests).index(test) + 1 if test else len(tests)
            before = dict(itertools.islice(tests.items(), last))
            if self._outcome(before, source=source, text=None)[0] != SURVIVED:
                return SURVIVED, f"unchanged, too: {check}"
        return outcome, check

    def _outcome(self, tests: Tests, **request: Any) -> tuple[str, str, str]:
        limits = {test: LEAST + TIMES * seconds for test, seconds in tests.items()}
        limit = 3 * LEAST + TIMES * sum(tests.values())
        asked = {**request, "seconds": limits}
        outcome, check, *test = self.ask(limit, asked, collected="source" in request)
        return outcome, relative(check, self.tree), "".join(test)

    @property
    def pid(self) -> int:
        return self.process().pid

    def close(self) -> None:
        """End its processes, and what these have started, also while another thread asks them."""
        with self._changing:
            self._closed = True
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what it did not read
                    assert pipe
                    pipe.close()


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


# -- which tests execute a line -------------------------------------------------------------------

_MAKING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by test file
COVERAGERC = """[run]
core = ctrace
data_file = {folder}/data
parallel = true
source = {source}
context = ${{{TEST}-}}
disable_warnings = {warnings}
"""
WARNINGS = "no-data-collected,module-not-imported,module-not-measured,previously-imported"


@dataclass(frozen=True)
class Trace:
    """The tests of a file as they ran unchanged, by their names.

    digest: of the file. seconds: that each took; failed: those that failed. lines: by source file
    and line, the tests that execute it. hidden: the tests that fail only while their lines are
    noted, as some of what is tested is off then; for them any line of a file is every line of it.
    digests: of the source files.
    """

    digest: str
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def tests(self, source: str, lines: range | None, tree: Path) -> set[str]:
        """The tests that execute one of the lines of a source file, or any line if it is another
        one in this tree. lines: None for what runs at import: every test, since a test that reads
        a constant executes no line of the source."""
        every = own = self.lines.get(source, {})
        if lines is None:
            return set(self.seconds) - set(self.failed)
        if self.digests.get(source) == digest(tree / source):
            own = {line: own[line] for line in map(str, lines) if line in own}
        hidden = {test for tests in every.values() for test in tests} & set(self.hidden)
        return {test for tests in own.values() for test in tests} - set(self.failed) | hidden


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def trace(file: str, server: Server) -> Trace:
    """The trace of a test file, made by a server unless it is kept."""
    with _MAKING[file]:
        kept = KEPT / f"{file.replace('/', '.')}.json"
        if kept.exists():
            found = _read(kept, kept.stat().st_mtime_ns)
            if found.digest == digest(server.tree / file):
                return found
        made = _made(file, server)
        replace_text(kept, json.dumps(vars(made)))
    print(f"{file}: {len(made.seconds)} tests, {sum(made.seconds.values()):.0f} s", flush=True)
    for test in made.failed:
        print(f"left out, since it fails unchanged: {test}", flush=True)
    return made


@functools.lru_cache(maxsize=64)
def _read(kept: Path, written: int) -> Trace:
    return Trace(**json.loads(kept.read_text(encoding="utf-8")))


def _made(file: str, server: Server) -> Trace:
    tree = server.tree
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        source = ",".join(str(tree / one) for one in FOLDERS)
        text = COVERAGERC.format(folder=folder, source=source, TEST=TEST, warnings=WARNINGS)
        (folder / "coveragerc").write_text(text)
        start = {"COVERAGE_PROCESS_START": f"{folder}/coveragerc"}
        request = {"file": file, "folder": name, "most": MOST}
        answer = server.ask(SECONDS, request, name, start)
        if not isinstance(answer, dict):
            print(f"left out, since it cannot be traced: {file}: {answer}", flush=True)
            return Trace(digest(tree / file))
        lines = _lines(folder, tree, answer.pop("users"), set(answer["seconds"]))
    if traced := answer["failed"]:
        answer["failed"] = sorted(server.failing(file, traced))
        answer["hidden"] = sorted(set(traced) - set(answer["failed"]))
    digests = {source: digest(tree / source) for source in lines}
    return Trace(digest(tree / file), **answer, lines=lines, digests=digests)


def _lines(
    folder: Path, tree: Path, users: Mapping[str, Sequence[str]], tests: set[str]
) -> dict[str, dict[str, list[str]]]:
    """By source file and line, those of the tests that execute it, or use something that it was
    executed for."""
    from coverage import CoverageData

    found: dict[str, dict[str, list[str]]] = {}
    for path in folder.glob("data*"):
        data = CoverageData(basename=str(path))
        with contextlib.suppress(Exception):  # of a process that was killed as it wrote
            data.read()
        for file in data.measured_files():
            own = found.setdefault(str(Path(file).relative_to(tree)), {})
            for line, contexts in data.contexts_by_lineno(file).items():
                either = {user for one in contexts for user in (one, *users.get(one, ()))}
                if mine := either & tests | set(own.get(str(line), [])):
                    own[str(line)] = sorted(mine)
    return found


def nearest(module: str, name: str = "") -> list[str]:
    """The test files of a module, first those with its name, then those that contain ``name``, or
    a text that begins with its words, as a check's name does; then those with the fewest modules
    between, and of these those that import the fewest modules of the tree."""
    tests, words = tests_of(module), '"' + name.replace("_", " ")

    def distance(file: str) -> tuple[bool, bool, int, int, str]:
        named = module.rpartition(".")[2].rstrip("s") in Path(file).stem
        text = (ROOT / file).read_text(encoding="utf-8")
        contains = name in text or words in text
        many = sum(one.startswith("tinyllama") for one in imports(ROOT / file))
        return not named, not contains, tests[file], many, file

    return sorted(tests, key=distance)


def chosen(
    files: Sequence[str],
    source: str,
    lines: range | None,
    around: range | None,
    server: Server,
    budget: float = BUDGET,
) -> Tests:
    """Of test files, the tests for a change of these lines of a source file, in their order.
    lines: None for those that run at import. around: the lines of their function. budget: the
    seconds that the tests take unchanged.

    If no test is seen to execute the lines, as in a process that is killed, they are chosen like
    those for lines that run at import. Else those that execute other lines of the function come
    last: what it keeps for another call may have been made in an earlier test. The first of each
    test function come before its others.
    """
    traces = [trace(file, server) for file in files]
    seconds = {test: time for one in traces for test, time in one.seconds.items()}

    def executing(where: range | None) -> set[str]:
        return {test for one in traces for test in one.tests(source, where, server.tree)}

    found = executing(lines)
    every = found | executing(around) if found else executing(None)
    ranks: Counter[str] = Counter()
    ranked = []
    for test in sorted(every, key=lambda test: seconds.get(test, 0)):
        function = test.partition("[")[0]
        ranked.append((test not in found, ranks[function], seconds.get(test, 0), test))
        ranks[function] += 1
    order: Tests = {}
    for *_, took, test in sorted(ranked):
        if not order or sum(order.values()) + took <= budget:
            order[test] = took
    return order
