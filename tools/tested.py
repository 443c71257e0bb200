"""A process that runs tests in forks of itself: one after another until one fails, or all of a
file with the lines that each executes.

    python -m tools.tested [FILE ...]    (asked by `tools.mutant_tests`, a line of JSON a request)

It has imported all that is not of the tree, which takes longer than most tests. Without files it
imports nothing of the tree: there a change may raise at import, and lines that run at import are
to be seen. With files it has collected their tests, and a function is swapped in the fork.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from tools.once import ROOT, Contexts
from tools.swapping import Functions, NotSwappedError

KILLED, SURVIVED, RAISED, ENDED = "killed", "survived", "raised", "did not end"
WORDS = (
    *("-c", str(ROOT / "pytest.ini"), "-p", "tinyllama.harness.plugins.suite"),
    *("--device", "cpu", "-W", "ignore"),
)
PROCESSES = 64  # that the tests of a request may run at a time
RESIDENT = 6 << 30  # bytes that these may hold together
IMPORTED = (
    *("torch._dynamo", "triton", "scipy.stats", "hypothesis.strategies", "safetensors.torch"),
    *("rich.console", "rich.table", "yaml", "jinja2", "filelock"),
    *("_pytest.pytester", "pytest_benchmark.plugin", "pytest_timeout", "xdist.plugin"),
)
COLLECTING = 600.0  # seconds that it may take
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PARENT = os.getppid()


# -- in the process of a request ------------------------------------------------------------------


class First:
    """Notes the first test that fails, or the first error of one; test: its name."""

    def __init__(self) -> None:
        self.ended: tuple[str, str] | None = None
        self.test = ""

    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            wrong = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
            test = item.nodeid.partition("[")[0]
            ended = (KILLED, test) if wrong else (RAISED, call.excinfo.exconly())
            self.ended, self.test = self.ended or ended, self.test or item.nodeid

    @pytest.hookimpl
    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self.ended = self.ended or (RAISED, last.removeprefix("E").strip())


class Only:
    """Runs these tests, in this order. seconds: that each may take, or the process is ended, which
    is told in a file (its descriptor)."""

    def __init__(self, seconds: Mapping[str, float], file: int) -> None:
        self.seconds, self.file = seconds, file
        self.order = {test: place for place, test in enumerate(seconds)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mine = (item for item in items if item.nodeid in self.order)
        items[:] = sorted(mine, key=lambda item: self.order[item.nodeid])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Also if the test is stuck in code that is not Python's.
        faulthandler.dump_traceback_later(self.seconds[item.nodeid], exit=True, file=self.file)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Failed:
    """Notes which tests fail."""

    def __init__(self) -> None:
        self.tests: set[str] = set()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests.add(report.nodeid)


class Traced:
    """Tells coverage, here and in processes that a test starts, which test it is, or which fixture
    that tests share; and notes what each test takes alone, in seconds: with these fixtures."""

    def __init__(self, contexts: Contexts, most: float) -> None:
        self.contexts, self.left = contexts, most
        self.seconds: dict[str, float] = {}
        self._shared: dict[str, float] = {}  # by fixture

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name, start = fixturedef.argname, time.monotonic()
        try:
            with self.contexts.within(f"fixture {name}"):
                return (yield)
        finally:
            self._shared[name] = max(time.monotonic() - start, self._shared.get(name, 0))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        names = getattr(item, "fixturenames", ())
        start, before = time.monotonic(), sum(self._shared.values())
        worked = sum(os.times()[:4])
        try:
            with self.contexts.within(item.nodeid):
                for name in names:
                    self.contexts.use(f"fixture {name}")
                return (yield)
        finally:
            own = time.monotonic() - start - (sum(self._shared.values()) - before)
            shared = sum(self._shared.get(name, 0) for name in names)
            self.seconds[item.nodeid] = max(0.0, own) + shared
            self.left -= sum(os.times()[:4]) - worked  # whatever else the machine does
            if self.left < 0:
                item.session.shouldstop = "enough"


def tested(names: Sequence[str], *plugins: Any) -> tuple[str, str]:
    """The name of the first of these tests that fails, or the first error of one."""
    first = First()
    words = [*WORDS, "--exitfirst", *(str(ROOT / name) for name in names)]
    status = pytest.main(words, plugins=[first, *plugins])
    if first.ended:
        return first.ended
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {status!r}: the tests {names} cannot be run")
    return SURVIVED, ""


def failing(file: str, *plugins: Any) -> list[str]:
    """The tests of a file that fail."""
    found = Failed()
    pytest.main([*WORDS, str(ROOT / file)], plugins=[found, *plugins])
    return sorted(found.tests)


def traced(file: str, folder: str, most: float) -> dict[str, Any]:
    """The tests of a file, under coverage, whose data stay in a folder. most: seconds of a
    processor, by tests and the processes that they waited for, after which no other is begun."""
    from coverage import Coverage

    coverage = Coverage(config_file=f"{folder}/coveragerc")
    coverage.start()
    contexts = Contexts(coverage)
    contexts.of_caches()
    plugin = Traced(contexts, most)
    failed = failing(file, plugin)
    coverage.stop()
    coverage.save()
    return {"seconds": plugin.seconds, "failed": failed, "users": contexts.users()}


class Collected:
    """Once the tests are collected, serves requests, each with a changed text of a file."""

    def __init__(self, asked: TextIO, told: TextIO) -> None:
        self.asked, self.told = asked, told

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        faulthandler.cancel_dump_traceback_later()
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        self.functions = Functions(ROOT / "tinyllama")
        serve(self.asked, self.told, self)
        return True

    def ended(self, request: dict[str, Any], output: int) -> tuple[str, str, str]:
        """The first test that fails, or the first error of one, and the test's whole name."""
        first, session = First(), self.session
        self.functions.empty_caches()
        if request["text"] is not None:
            try:
                self.functions.swap(ROOT / request["source"], request["text"])
            except NotSwappedError as error:
                return SURVIVED, str(error), ""
        session.items = [self.items[name] for name in request["seconds"] if name in self.items]
        session.config.option.maxfail, session.shouldfail = 1, False
        manager = session.config.pluginmanager
        manager.unregister(self)
        for plugin in (first, Only(request["seconds"], output)):
            manager.register(plugin)
        with contextlib.suppress(session.Failed):
            session.config.hook.pytest_runtestloop(session=session)
        return *(first.ended or (SURVIVED, "")), first.test


def _answer(request: dict[str, Any], folder: Path, collected: Collected | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(request["environment"], TMPDIR=str(folder))
    tempfile.tempdir = None
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    gc.unfreeze = lambda: None  # as a session does at its end: each collection would walk torch
    answer: Any
    if collected:
        answer = collected.ended(request, output)
    elif "folder" in request:
        answer = traced(request["file"], request["folder"], request["most"])
    elif "file" in request:
        answer = {"failed": failing(request["file"], Only(request["seconds"], output))}
    else:
        only = [Only(request["seconds"], output)] if request["seconds"] else []
        answer = tested(request["files"], *only)
    (folder / "answer").write_text(json.dumps(answer), encoding="utf-8")


# -- in the server --------------------------------------------------------------------------------


def _descendants() -> list[int]:
    """The processes that this one is a parent of, or of whose parents; orphans stay its own."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdigit():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(folder.name))
    found, now = [], [os.getpid()]
    while now:
        now = [child for one in now for child in parents.get(one, [])]
        found += now
    return found


def _resident(processes: Sequence[int]) -> int:
    """The bytes that processes hold in memory."""
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_all() -> None:
    while processes := _descendants():
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _stop(*_: object) -> None:
    """End, with all that the tests have started."""
    _end_all()
    os._exit(128 + signal.SIGTERM)


def answered(request: dict[str, Any], collected: Collected | None = None) -> Any:
    """What a request gives in a process of its own, or how that ended without an answer."""
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.monotonic() + request["limit"]
        if not (child := os.fork()):
            try:
                os.setsid()
                _answer(request, folder, collected)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if os.getppid() != PARENT:  # nobody waits for an answer
                    _stop()
                own = _descendants()
                if time.monotonic() > end or len(own) > PROCESSES or _resident(own) > RESIDENT:
                    return ENDED, ""
                time.sleep(0.05)
        finally:
            _end_all()
        if (folder / "answer").exists():
            return json.loads((folder / "answer").read_text(encoding="utf-8"))
        if os.WIFSIGNALED(ended[1]):
            return RAISED, f"ended by {signal.Signals(os.WTERMSIG(ended[1])).name}"
        output = folder / "output"
        said = output.read_text(errors="replace") if output.exists() else ""
        if "Timeout (" in said:  # faulthandler's
            return ENDED, ""
        return RAISED, said.strip().rpartition("\n")[2]


def serve(asked: TextIO, told: TextIO, collected: Collected | None = None) -> None:
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    for line in asked:
        print(json.dumps(answered(json.loads(line), collected)), file=told, flush=True)


def main(files: Sequence[str]) -> None:
    # pytest and what it imports may print; it must not be taken for an answer.
    asked, told = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if files:
        faulthandler.dump_traceback_later(COLLECTING, exit=True)
        # A function whose asserts are rewritten has other code than its text, and is not found.
        words = ["--assert=plain", "--continue-on-collection-errors", "-p", "no:faulthandler"]
        pytest.main([*WORDS, *words, *files], plugins=[Collected(asked, told)])
    else:
        serve(asked, told)


if __name__ == "__main__":
    main(sys.argv[1:])
