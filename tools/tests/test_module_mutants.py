"""The tool that mutates Python modules: what it changes, and what it tries a change with."""

import ast
import contextlib
import importlib.util
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
from tools.tested import KILLED, RAISED, SURVIVED

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


def test_each_call_that_is_dropped_is_a_mutant() -> None:
    """By one name, all but the first of a function were taken for it."""
    source = "def f(x):\n    x.start()\n    if x:\n        x.wait('a\\n')\n    x.end()\n"
    names = [change.gives for change in changes_of(source, {}) if "pass" in change.text]
    assert names == ["pass  # x.start()", "pass  # x.wait('a\\n')", "pass  # x.end()"]


def test_a_change_has_the_same_name_in_each_version_of_python() -> None:
    """A formatted string is unparsed with other quotes in some."""
    source = """def f(x):\n    return x + 1, f"it's {x['a']}"\n"""
    names = {change.gives for change in changes_of(source, {})}
    assert """return (x - 1, f"it's {x['a']}")""" in names


def test_the_tests_of_a_module_are_those_that_import_it() -> None:
    found = mutant_tests.tests_of
    assert "correctness_tests/harness/test_clock.py" in found("tinyllama.harness.measure.clock")
    # One names it, and would fail where an explained line is another, whatever that does.
    assert not any("mutants" in one for one in found("tinyllama.harness.measure.clock"))
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


def test_the_tests_of_a_check_are_those_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words, at the start of a text: a comment may have the same words."""
    texts = {"test_a.py": "# one check\n", "test_b.py": 'CHECK = "one check: it fails"\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutant_tests, "ROOT", tmp_path)
    monkeypatch.setattr(mutant_tests, "tests_of", lambda _: dict.fromkeys(texts, 0))
    assert mutant_tests.nearest("here") == ["test_a.py", "test_b.py"]
    assert mutant_tests.nearest("here", "one_check") == ["test_b.py", "test_a.py"]


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


@pytest.mark.parametrize(
    ("ended", "first", "rate"), [([0, 1, 2], 3, "66.7%"), ([0, 2], 1, "0.0%"), ([1, 2], 0, "none")]
)
def test_a_run_that_is_cut_short_has_the_rate_of_the_first(
    ended: list[int],
    first: int,
    rate: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What survives is tried longest: those that ended after it would flatter."""

    def some(left: list[Any], *rest: object) -> Iterator[Tried]:
        for place in ended:
            outcome = KILLED if place else SURVIVED
            yield Tried(left[place].name, Trial(1, "1 -> 2", left[place].key[1], outcome))

    monkeypatch.setattr(module_mutants, "attempts", some)
    assert module_mutants.main(["--only", "training.curve", "--sample", "3"]) == 1
    said = capsys.readouterr().out
    assert f"of the first {first} of seed 0: {max(0, first - 1)} killed, 0 raised" in said
    assert f"{rate} of the mutants that ran" in said
    assert (f"no time is left: {3 - first} of the sample" in said) == (first < 3)


class Asked:
    """A server that notes what it is asked. A change that is planted survives, too."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, object]] = []

    def swapped(self, file: str, text: str, tests: object) -> tuple[str, str]:
        self.requests.append(("swapped", text))
        return SURVIVED, ""

    @contextlib.contextmanager
    def planted(self, file: str, text: str) -> Iterator[None]:
        self.requests.append(("planted", text))
        yield

    def run(self, tests: object) -> tuple[str, str]:
        return SURVIVED, ""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The only server of a run, in which each mutant has one test, of the nearest file."""
    one = Asked()

    @contextlib.contextmanager
    def servers(*_: object) -> Iterator[list[Asked]]:
        yield [one]

    monkeypatch.setattr(module_mutants, "servers", servers)
    monkeypatch.setattr(module_mutants, "nearest", lambda *_: ["t"])
    monkeypatch.setattr(module_mutants, "chosen", lambda files, *_: dict.fromkeys(files, 0.1))
    return one


def test_what_survives_is_planted_before_the_next_is_tried(asked: Asked) -> None:
    """So that a run that is cut short has tried the first of its sample to their end."""
    source = "LIMIT = 2\ndef f(x):\n    return x + 1\n"
    some = [Mutant("here", "here.py", change) for change in changes_of(source, {})]
    tried = list(module_mutants.attempts(some, 1, float("inf"), 1.0))
    assert [one.trial.outcome for one in tried] == [SURVIVED] * len(some)
    first, *others = (one.change.source for one in some)
    both = [(way, text) for text in others for way in ("swapped", "planted")]
    assert asked.requests == [("planted", first), *both]


@pytest.mark.parametrize("place", [0, 4, 9, 12])
def test_files_behind_the_one_that_kills_are_not_traced(
    place: int, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing all the files of a module takes minutes, and most mutants need the nearest ten."""
    files, traced = [str(number) for number in range(13)], []

    def chosen(some: list[str], *_: object) -> dict[str, float]:
        traced.extend(some)
        return dict.fromkeys(some, 0.1)

    def swapped(file: str, text: str, tests: dict[str, float]) -> tuple[str, str]:
        return (KILLED, "") if files[place] in tests else (SURVIVED, "")

    monkeypatch.setattr(module_mutants, "nearest", lambda *_: files)
    monkeypatch.setattr(module_mutants, "chosen", chosen)
    monkeypatch.setattr(asked, "swapped", swapped)
    change = changes_of("def f(x):\n    return x + 1\n", {})[0]
    some = [Mutant("here", "here.py", change)]
    (tried,) = module_mutants.attempts(some, 1, float("inf"), 1.0)
    assert tried.trial.outcome == KILLED
    assert traced == files[: place + 1]


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
