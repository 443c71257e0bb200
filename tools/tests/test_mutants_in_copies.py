"""Mutants of modules in a copy of a tree: the tests that are chosen for a line, and their end."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools import mutant_record, mutant_tests
from tools.mutant_tests import Server
from tools.tested import ENDED, KILLED, RAISED, SURVIVED

CODE = """KEPT = 3


def twice(x):
    assert x < 100
    return 2 * x


def never(x):
    return x
"""
TESTS = """import sys
import time

import here
import pytest


@pytest.mark.parametrize("x", [3, 4])
def test_twice(x): assert here.twice(x) == 2 * x


def test_kept(): assert here.KEPT == 3


def test_wrong(): assert here.twice(1) == 3


@pytest.fixture(scope="module")
def slow():
    time.sleep(1)


@pytest.mark.parametrize("x", [0, 1])
def test_slow(x, slow): assert x < 2


def test_untraced(): assert here.twice(0) == 0 and sys.gettrace() is None
"""
FILE, MODULE = "tests/test_here.py", "tinyllama/model/here.py"
TOOLS = ("tools/tested.py", "tools/once.py", "tools/swapping.py")
ONCE, ONCE_TESTS = "tinyllama/model/once.py", "tests/test_once.py"
OF_ONCE = """import functools


@functools.cache
def doubled(x):
    return helped(x)


def helped(x):
    return 2 * x


class Kept:
    @functools.cached_property
    def tripled(self):
        return 3


KEPT = Kept()


def shared():
    return 5


@functools.lru_cache(maxsize=2)
class Made:
    def __init__(self):
        self.six = 6
"""
USE_ONCE = """import once
import pytest


@pytest.fixture(scope="module")
def given(): return once.shared(), once.doubled(1)


def test_first(given): assert once.doubled(3) + once.KEPT.tripled + once.Made().six == 15


def test_second(): assert once.doubled(3) == 6


def test_third(): assert once.KEPT.tripled == 3


def test_fourth(given): assert given == (5, 2)


def test_fifth(): assert once.doubled(1) == 2


def test_last(): assert once.Made().six == 6
"""
UNTRACED = f"{FILE}::test_untraced"
TWICE = dict.fromkeys((f"{FILE}::test_twice[3]", f"{FILE}::test_twice[4]"), 0.1)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """In a tree that has no more than the tools need."""
    root, tree = tmp_path / "root", tmp_path / "copy"
    texts = {
        "pytest.ini": "[pytest]\npythonpath = tinyllama/model\n",
        **{name: (mutant_record.ROOT / name).read_text() for name in TOOLS},
        "tinyllama/harness/plugins/suite.py": (
            "def pytest_addoption(parser): parser.addoption('--device')\n"
        ),
        # As an entry point has pytest do with the modules of a package.
        "tests/conftest.py": "import pytest\npytest.register_assert_rewrite('here')\n",
        MODULE: CODE,
        FILE: TESTS,
        ONCE: OF_ONCE,
        ONCE_TESTS: USE_ONCE,
    }
    for folder, name in itertools.product((root, tree), texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(texts[name])
    monkeypatch.setattr(mutant_tests, "ROOT", root)
    monkeypatch.setattr(mutant_tests, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(mutant_tests, "LEAST", 3.0)
    one = Server(tree, files=[FILE])
    yield one
    one.close()


SERVED = pytest.mark.slow("a process that imports torch, and forks that run pytest")


@SERVED
def test_what_fails_raises_and_does_not_end_is_told_apart(server: Server) -> None:
    def ended(source: str) -> tuple[str, str]:
        (server.tree / MODULE).write_text(source)
        return server.run(TWICE)

    assert ended(CODE) == (SURVIVED, "")
    assert ended(CODE.replace("2 * x", "2 + x")) == (KILLED, f"{FILE}::test_twice")
    raised = (RAISED, "AttributeError: 'int' object has no attribute 'y'")
    assert ended(CODE.replace("2 * x", "x.y")) == raised
    assert ended("import nothing_of_this_name")[0] == RAISED
    assert ended("import os\n" + CODE.replace("2 * x", "os._exit(0)"))[0] == RAISED
    assert ended("import time\n" + CODE.replace("2 * x", "time.sleep(600)")) == (ENDED, "")
    # A process that a test leaves behind ends with it.
    left = "import subprocess\n" + CODE.replace(
        "2 * x", "2 * x, subprocess.Popen(['sleep', '600'], start_new_session=True)"
    )
    assert ended(left)[0] == KILLED
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    assert children.read_text() == ""


@SERVED
def test_a_change_is_swapped_in_where_its_module_is_imported(server: Server) -> None:
    def ended(text: str, tests: dict[str, float] = TWICE) -> tuple[str, str]:
        return server.swapped(MODULE, text, tests)

    def changed(new: str) -> str:
        return CODE.replace("2 * x", new)

    assert ended(changed("2 + x")) == (KILLED, f"{FILE}::test_twice")
    assert ended(changed("x + x")) == (SURVIVED, ""), "no other mutant is left"
    assert ended(CODE.replace("3", "4"))[0] == SURVIVED
    assert ended(changed("x.y")) == (RAISED, "AttributeError: 'int' object has no attribute 'y'")
    assert ended(changed("__import__('os').abort()")) == (RAISED, "ended by SIGABRT")
    assert ended(changed("__import__('time').sleep(600)")) == (ENDED, "")
    # What fails unchanged is no kill, though it would be one with this change.
    wrong = {f"{FILE}::test_wrong": 0.1}
    unchanged = (SURVIVED, f"unchanged, too: {FILE}::test_wrong")
    assert ended(changed("2 + 2 * x"), {**wrong, **TWICE}) == unchanged
    assert ended(changed("2 + x"), {**TWICE, **wrong}) == (KILLED, f"{FILE}::test_twice")


def test_each_planted_text_has_a_second_of_its_own(tmp_path: Path) -> None:
    """Python takes a compiled file for that of another text of the same size and second."""
    server, path = Server.__new__(Server), tmp_path / "here.py"
    server.tree, server._planted = tmp_path, 0
    path.write_text("KEPT = 3\n")
    before, seconds = path.stat().st_mtime_ns, set()
    for number in "45":
        with server.planted("here.py", f"KEPT = {number}\n"):
            assert path.read_text() == f"KEPT = {number}\n"
            seconds.add(int(path.stat().st_mtime))
        assert path.read_text() == "KEPT = 3\n"
        assert path.stat().st_mtime_ns == before
    assert len(seconds | {before // 10**9}) == 3


@SERVED
def test_the_tests_of_a_line_are_those_that_execute_it(server: Server) -> None:
    pytest.importorskip("coverage", reason="it tells which lines a test executes")
    traced = mutant_tests.trace(FILE, server)
    assert traced.failed == [f"{FILE}::test_wrong"]
    assert traced.hidden == [UNTRACED]
    slow = {f"{FILE}::test_slow[{x}]" for x in range(2)}
    assert all(1 < traced.seconds[test] < 30 for test in slow), "a fork would run one of them"
    assert all(traced.seconds[test] < 1 for test in TWICE)
    every = {*TWICE, UNTRACED}
    assert traced.tests(MODULE, range(4, 7), server.tree) == every
    assert traced.tests(MODULE, range(9, 11), server.tree) == {UNTRACED}, "it is not known"
    # What runs at import is of no test, and any may read it.
    assert traced.tests(MODULE, None, server.tree) == {*every, *slow, f"{FILE}::test_kept"}
    other = traced.tests("tinyllama/model/other.py", None, server.tree)
    assert other == traced.tests(MODULE, None, server.tree)
    assert mutant_tests.trace(FILE, server) == traced, "kept"
    # Lines of a file that has changed since are not those that were traced.
    (server.tree / MODULE).write_text("\n\n" + CODE)
    assert traced.tests(MODULE, range(9, 11), server.tree) == every


@SERVED
def test_what_a_process_runs_once_is_of_each_test_that_uses_it(server: Server) -> None:
    """Caches and shared fixtures, and what they call: not of the first test alone."""
    pytest.importorskip("coverage", reason="it tells which lines a test executes")
    traced = mutant_tests.trace(ONCE_TESTS, server)
    assert not traced.failed + traced.hidden

    def of(text: str) -> set[str]:
        line = OF_ONCE[: OF_ONCE.index(text)].count("\n") + 1
        found = traced.tests(ONCE, range(line, line + 1), server.tree)
        return {test.rpartition("_")[2] for test in found}

    assert of("return 2 * x") == of("return helped(x)") == {"first", "second", "fourth", "fifth"}
    assert of("return 3") == {"first", "third"}
    assert of("return 5") == {"first", "fourth"}
    assert of("self.six = 6") == {"first", "last"}
