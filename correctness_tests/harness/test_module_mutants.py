"""The tool that mutates Python modules: what it changes, and what it tries a change with."""

import ast
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tools import module_mutants, mutant_record, mutant_tests
from tools.module_mutants import Mutant
from tools.mutant_record import KernelTrials, Trial, Tried
from tools.mutant_tests import Server
from tools.mutation import changes_of, defaults
from tools.swapping import Functions, NotSwappedError
from tools.tested import ENDED, KILLED, RAISED, SURVIVED

SOURCE = '''
"""A docstring - with a minus - stays."""
from math import pi

LIMIT: float = 2.0


class Config:
    eps: float = 1e-5


def first(config: Config, one: int, other: int) -> int:
    synchronize(one)
    if one < other and not config.eps:
        raise ValueError(f"{one + 1} - no message is changed")
    for item in [one, other]:
        one += item
    return config.eps * one
'''


def test_each_kind_of_change_is_made_in_its_place_alone() -> None:
    found = changes_of(SOURCE, defaults([SOURCE]))
    texts = {change.text for change in found}
    expected = {
        "2.0 -> 20.0",
        "1e-05 -> 0.0001",
        "synchronize(one) -> pass",
        "one -> other",
        "one < other -> one <= other",
        "one < other and (not config.eps) -> one < other or not config.eps",
        "one < other and (not config.eps) -> not (one < other and (not config.eps))",
        "[one, other] -> list([one, other])[:-1]",
        "one += item -> one -= item",
        "config.eps -> 1e-05",
        "config.eps * one -> config.eps + one",
    }
    assert expected - texts == set()
    assert not any("message" in text or "docstring" in text for text in texts)
    for change in found:
        compile(change.source, "mutant", "exec")
        same = [a == b for a, b in zip(SOURCE.split("\n"), change.source.split("\n"), strict=True)]
        assert same.count(False) == 1, change.text
        assert change.place in ("", "first")
    names = {(change.text, change.gives) for change in found}
    assert ("2.0 -> 20.0", "LIMIT: float = 20.0") in names


def test_a_change_has_the_same_name_in_each_version_of_python() -> None:
    """A formatted string is unparsed with other quotes in some."""
    source = """def f(x):\n    return x + 1, f"it's {x['a']}"\n"""
    names = {change.gives for change in changes_of(source, {})}
    assert """return (x - 1, f"it's {x['a']}")""" in names


def test_the_tests_of_a_module_are_those_that_import_it() -> None:
    found = mutant_tests.tests_of
    assert "correctness_tests/harness/test_clock.py" in found("tinyllama.harness.measure.clock")
    # Through a module of correctness_tests.support.
    assert "correctness_tests/gate/test_gate_pair.py" in found("tinyllama.harness.gate.pair")
    # No test imports it: those of the modules that do.
    assert found("tinyllama.training.memory")
    # One test imports it; others have pytest load the plugin that does.
    near = mutant_tests.nearest("tinyllama.harness.plugins.recording")
    several, suites = (
        f"correctness_tests/harness/test_{n}.py" for n in ("several_gpus", "benchmarks")
    )
    assert near.index(several) < near.index(suites)
    # Of those without the module's name, first those that contain the constant's.
    near = mutant_tests.nearest("tinyllama.harness.gate.side", "ON_GPU")
    own = sum("side" in Path(one).stem for one in near)
    assert "correctness_tests/gate/test_gate_constants.py" in near[own : own + 4]


def test_every_module_is_tested() -> None:
    untested = {
        module
        for folder in mutant_tests.FOLDERS
        for path in (mutant_record.ROOT / folder).rglob("*.py")
        if not mutant_tests.tests_of(module := mutant_tests.module_of(path))
        and changes_of(path.read_text(), {})
    }
    # What the package `tinyllama.model` itself has is one name, for users.
    assert untested <= {"tinyllama.model"}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    tried = [
        Tried("a.b", Trial(3, "1 -> 2", "x = 2", SURVIVED)),
        Tried("a.c", Trial(4, "1 -> 3", "x = 3", KILLED, "test_it")),
    ]
    mutant_record.write(tmp_path / "record.json", 7, 99, tried)
    assert mutant_record.read(tmp_path / "record.json") == tried
    assert tried[0].unexplained(set())
    assert not tried[0].unexplained({("a.b", "x = 2")})
    assert not tried[1].unexplained(set())


def test_the_order_of_a_seed_is_that_of_any_part() -> None:
    """So that more of a sample can be tried later, or after a change of other code."""
    some = module_mutants.mutants("training.curve")
    order = module_mutants.drawn(some, 3)
    assert module_mutants.drawn(some[::-1], 3) == order
    assert module_mutants.drawn(some[5:], 3) == [one for one in order if one in some[5:]]
    assert module_mutants.drawn(some, 4) != order


def test_each_explanation_is_of_a_mutant_of_the_code_as_it_is() -> None:
    explained = {one for one in mutant_record.explained() if one[0].startswith("tinyllama.")}
    assert explained
    folders = [mutant_record.ROOT / folder for folder in mutant_tests.FOLDERS]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    texts = {mutant_tests.module_of(path): path.read_text() for path in files}
    settings, found = defaults(texts.values()), set()
    for module, text in texts.items():
        if any(f"{name}.".startswith(f"{module}.") for name, _ in explained):
            found |= {Mutant(module, "", change).key for change in changes_of(text, settings)}
    assert explained - found == set()


def test_a_record_is_of_all_modules(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        module_mutants.main(["--only", "training.curve", "--json", str(tmp_path / "x.json")])


@pytest.mark.parametrize("ended", [1, 2])
def test_a_sample_that_did_not_end_has_no_rate(
    ended: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What survives is tried longest: the others alone would flatter."""

    def some(left: list[Any], *rest: object) -> list[Any]:
        trial = Trial(1, "1 -> 2", "x = 2", KILLED)
        return [Tried(one.name, trial) for one in left[:ended]]

    monkeypatch.setattr(module_mutants, "attempts", some)
    monkeypatch.setattr(Tried, "key", property(id))
    assert module_mutants.main(["--only", "training.curve", "--sample", "2"]) == 2 - ended
    assert ("no rate" in capsys.readouterr().out) == (ended == 1)


def test_the_lines_of_a_change_are_those_of_its_statement() -> None:
    source = "LIMIT = 2\ndef f(x):\n    return g(\n        x,\n        x + 1,\n    )\n"
    lines = {
        change.text: Mutant("here", "here.py", change).lines for change in changes_of(source, {})
    }
    assert lines == {"2 -> 3": None, "x + 1 -> x - 1": range(3, 6), "1 -> 2": range(3, 6)}


def test_other_tests_of_the_function_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function keeps by hand is made in the first test that asks for it."""
    source = "KEPT = []\ndef f(x):\n    if not KEPT:\n        KEPT.append(x + 1)\n    return KEPT\n"
    change = next(one for one in changes_of(source, {}) if one.text == "x + 1 -> x - 1")
    mutant = Mutant("here", "here.py", change)
    lines = {"3": ["a", "b"], "4": ["b"], "5": ["a", "b"], "9": ["c"]}
    one = mutant_tests.Trace("", {"a": 1.0, "b": 2.0, "c": 1.0}, [], [], {"here.py": lines})
    one.digests["here.py"] = "same"
    monkeypatch.setattr(mutant_tests, "trace", lambda *_: one)
    monkeypatch.setattr(mutant_tests, "digest", lambda _: "same")
    server = Server(Path())
    asked = "here.py", mutant.lines, mutant.around, server
    assert list(mutant_tests.chosen(["t"], *asked)) == ["b", "a"]
    assert list(mutant_tests.chosen(["t"], *asked, budget=2.5)) == ["b"]
    # Of a line that no test is seen to execute, any may be the test.
    assert mutant_tests.chosen(["t"], "here.py", range(7, 8), mutant.around, server).keys() == {
        *("a", "b", "c")
    }


def test_other_lines_have_the_numbers_that_they_had() -> None:
    source = (
        "def f(x):\n    call(\n        x,\n    )\n    return (\n        x +\n        1\n    )\n"
    )
    texts = {change.text: change.source for change in changes_of(f"{source}LAST = 3\n", {})}
    assert {"call(x) -> pass", "x + 1 -> x - 1"} <= texts.keys()
    for text in texts.values():
        assert ast.parse(text).body[-1].lineno == 9


SWAPPED = """import functools
ONE = [lambda: 1]


class Kept:
    limit = 3

    def twice(self, x):
        return 2 * x + 0 * Kept.limit


def around(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) + 1
    return inner


@functools.cache
def half(x):
    return x // 2


@around
def three(x): return x * 3


TWO = half(4)
"""


@pytest.fixture
def here(tmp_path: Path) -> tuple[Any, Functions]:
    """A module of a file, and its functions."""
    (tmp_path / "here.py").write_text(SWAPPED)
    spec = importlib.util.spec_from_file_location("here", tmp_path / "here.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, Functions(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "asked", "given"),
    [
        ("2 * x", "2 + x", lambda it: it.Kept().twice(5), 7),
        ("(x) + 1", "(x) - 1", lambda it: it.three(5), 14),  # made when it was imported
        ("x * 3", "x + 3", lambda it: it.three(5), 9),
        ("x // 2", "x * 2", lambda it: it.half(4), 8),  # whose value is remembered
    ],
)
def test_a_function_is_swapped(
    here: tuple[Any, Functions], old: str, new: str, asked: Callable[[Any], int], given: int
) -> None:
    module, functions = here
    own = asked(module)
    functions.empty_caches()
    functions.swap(Path(module.__file__), SWAPPED.replace(old, new))
    assert asked(module) == given != own


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("limit = 3", "limit = 4"),
        ("half(4)", "half(5)"),
        ("[lambda: 1]", "[]"),
        ("@around", "@functools.cache"),
        ("return function(x) + 1", "return x + 1"),
        ("import functools", "import functools, os"),
        ("", ""),
    ],
)
def test_what_cannot_be_swapped_is_refused(here: tuple[Any, Functions], old: str, new: str) -> None:
    module, functions = here
    with pytest.raises(NotSwappedError):
        functions.swap(Path(module.__file__), SWAPPED.replace(old, new))


@pytest.mark.parametrize("file", [mutant_record.RECORD, mutant_record.OF_MODULES])
def test_records_name_no_folder_of_a_machine(file: Path) -> None:
    assert not mutant_record.FOLDER.search(file.read_text())


def test_a_message_is_recorded_without_folders(tmp_path: Path) -> None:
    said = f"{tmp_path}/tinyllama/x.py:3: no file '/tmp/pytest-of-me/ab/c.json', half 1/2 or a/b"
    assert mutant_record.relative(said, tmp_path) == (
        "tinyllama/x.py:3: no file 'c.json', half 1/2 or a/b"
    )
    trial = Trial(3, "1 -> 2", "x = 2", RAISED, said)
    mutant_record.write(tmp_path / "modules.json", 0, 1, [Tried("a.b", trial)])
    mutant_record.add(tmp_path / "kernels.json", [KernelTrials("a.b", "0", [], 1, 0, [trial])])
    for path in tmp_path.glob("*.json"):
        assert str(tmp_path) not in path.read_text()


# -- tests in a copy of a tree --------------------------------------------------------------------

CODE = """KEPT = 3


def twice(x):
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
    assert traced.tests(MODULE, range(4, 6), server.tree) == every
    assert traced.tests(MODULE, range(8, 10), server.tree) == {UNTRACED}, "it is not known"
    # What runs at import is of no test, and any may read it.
    assert traced.tests(MODULE, None, server.tree) == {*every, *slow, f"{FILE}::test_kept"}
    other = traced.tests("tinyllama/model/other.py", None, server.tree)
    assert other == traced.tests(MODULE, None, server.tree)
    assert mutant_tests.trace(FILE, server) == traced, "kept"
    # Lines of a file that has changed since are not those that were traced.
    (server.tree / MODULE).write_text("\n\n" + CODE)
    assert traced.tests(MODULE, range(8, 10), server.tree) == every


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
