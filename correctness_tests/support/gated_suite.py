"""A small git repository in which pytest gates the working tree against its commits, both sides
answering from a script (`gate_fakes`); the plugin, git and the files around it are real.

The fixture ``gated`` is in the folder's conftest; a test module that uses it names pytester in its
``pytest_plugins``.
"""

import importlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import scipy.stats  # noqa: F401  else a run of pytester loads parts of it, and forgets them

from correctness_tests.support.gate_fakes import CPU, REGISTERED, Script
from correctness_tests.support.timed_suite import ROOT
from tinyllama.harness.gate import comparison, judged
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Setting
from tinyllama.harness.plugins import gating as plugin

CONFTEST = """
pytest_plugins = [
    "tinyllama.suites.entry",
    "tinyllama.harness.plugins.suite",
    "tinyllama.harness.plugins.benchmarks",
    "tinyllama.harness.plugins.gate",
]


def pytest_tinyllama_groups(config):
    return ["steps"]


def pytest_tinyllama_benchmarks(config):
    from correctness_tests.support.gate_fakes import REGISTERED

    return REGISTERED


def pytest_benchmark_generate_machine_info(config):
    return {}  # asking the processor takes a second
"""
TESTS = """
def test_one():
    raise AssertionError("a gate runs no test")


def test_two(benchmark):
    raise AssertionError("a gate runs no test")
"""


class Watched(DeviceGuard):
    """What disturbs the device before, and after."""

    before_reason: str | None = None
    after_reason: str | None = None
    unseen: str | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unreadable = self.unseen

    def before(self) -> str | None:
        return self.before_reason

    def during(self, pids: Sequence[int] = ()) -> str | None:
        return None

    def after(self) -> str | None:
        return self.after_reason


class GatedSuite:
    """``scripts``: by the name that --against is given, else ``script``."""

    def __init__(
        self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, path_of_judge: Path
    ) -> None:
        self.pytester, self.monkeypatch = pytester, monkeypatch
        self.script = Script("a", "b", device=CPU)
        self.scripts: dict[str, Script] = {}
        self.path = pytester.path
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_timed=TESTS)
        pytester.makeini(
            f"[pytest]\npythonpath = {ROOT}\n"
            "addopts = -p no:cacheprovider -p no:hypothesispytest -p no:anyio\n"
            "markers =\n    slow: left out\n"
        )
        self.judge = path_of_judge  # its instrument, which needs nothing of a tree
        files = comparison.instrument(ROOT, REGISTERED)
        one_of_each = {Path(name).parent: name for name in files}
        for name in (*judged.INSTRUMENT_FILES, *one_of_each.values()):
            self.write(str(self.judge / name), "")
        self.write(".gitignore", "*.xml\nresults/\n.benchmarks/\n__pycache__/\nout.json\n")
        git("init", "--quiet", "--initial-branch=main")
        self.commit("the base")
        self.write("tinyllama/changed.py", "x = 1\n")
        self.commit("the candidate")

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, message: str) -> None:
        git("add", "--all")
        git("commit", "--quiet", f"--message={message}")

    def session(self, setting: Setting) -> Session:
        """In the place of `Session`: the same, with sides that answer from a script."""
        script = self.scripts.get(setting.base.label, self.script)
        fakes: dict[str, Any] = {
            "pairs": script.pairs,
            "affected": script.affected,
            "effort": script.effort,
            "at_once": 1,  # on a machine of any size
        }
        script.session = Session(replace(setting, **fakes))
        return script.session

    def run(self, *args: str, against: str = "main~1") -> pytest.RunResult:
        """Of the tests in the folder; against nothing where that is empty."""
        gate = [f"--against={against}"] if against else []
        judging = ["--tree=."] if {"--against", "--against-env"} & _options([*gate, *args]) else []
        argv = ("test_timed.py", "--device", "cpu", *gate, *judging, *args)
        return self.pytester.runpytest_inprocess(*argv, no_reraise_ctrlc=True)

    def cases(self, *args: str, **options: Any) -> tuple[int, dict[str, str | None]]:
        """The exit status, and what made the test cases of JUnit fail, by base and benchmark."""
        found = self.run("--junitxml", "out.xml", *args, **options)
        suite = ElementTree.parse("out.xml").getroot()[0]
        cases = {}
        for case in suite:
            failure = next(iter([*case.findall("failure"), *case.findall("error")]), None)
            name = f"{case.get('classname')} {case.get('name')}".removeprefix("compare.")
            cases[name] = None if failure is None else failure.get("message")
        counted = sum(int(suite.get(name, "0")) for name in ("failures", "errors"))
        assert counted == sum(message is not None for message in cases.values())
        assert int(suite.get("tests", "0")) == len(cases)
        return int(found.ret), cases

    def report(self) -> dict[str, Any]:
        """What --gate-json out.json wrote."""
        content: dict[str, Any] = json.loads((self.path / "out.json").read_text())
        return content


def _options(args: Sequence[str]) -> set[str]:
    return {one.partition("=")[0] for one in args}


@pytest.fixture(scope="session")
def scipy_loaded() -> None:
    """Before any test: pytester forgets what a test imported, and numpy cannot be loaded again."""
    importlib.import_module("scipy.stats")


@pytest.fixture
def gated(
    scipy_loaded: None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> GatedSuite:
    plain_git(monkeypatch)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        if name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where devices are locked
    monkeypatch.setattr(plugin, "WAIT", 0.0)
    monkeypatch.setattr(plugin, "DeviceGuard", type("DeviceGuard", (Watched,), {}))
    judge = tmp_path / "a judge"
    monkeypatch.setattr(comparison, "HARNESS", judge)
    suite = GatedSuite(pytester, monkeypatch, judge)
    monkeypatch.setattr(comparison, "Session", suite.session)
    return suite


def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """git as it is where nobody set anything but an author."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


def git(*args: str) -> str:
    run = subprocess.run(["git", *args], capture_output=True, check=True, text=True)
    return run.stdout.strip()
