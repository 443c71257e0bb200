"""A suite of two groups whose timings come from a file, for the specifications of the plugin.

Its fixtures, ``suite``, ``recorded`` and ``baseline``, are in the folder's conftest; a test module
that uses them names pytester in its ``pytest_plugins``.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tinyllama.harness.machine import facts as machine
from tinyllama.harness.records import results

# Triton aborts when one process imports it twice, and pytester forgets what a test imported.
results.versions()
ROOT = Path(results.__file__).parents[3]
COMPARE = "--benchmark-compare"

CONFTEST = """
import json
from pathlib import Path

pytest_plugins = [
    "tinyllama.suites.entry",
    "tinyllama.harness.plugins.suite",
    "tinyllama.harness.plugins.benchmarks",
]


def pytest_tinyllama_groups(config):
    return json.loads(Path("expected.json").read_text())


def pytest_benchmark_generate_machine_info(config):
    return {}  # asking the processor takes a second
"""

SUITE = """
import json, os
from pathlib import Path
import pytest
from tinyllama.harness.records.entries import CurveEntry, OpEntry

OP = dict.fromkeys(("op", "provider", "role", "case", "dtype", "values", "passes"), "x")
FIGURES = json.loads(Path("figures.json").read_text())


@pytest.fixture(scope="module", params=list(FIGURES), ids=str)
def group(request, recording):
    with recording.group(request.param) as measured:
        for name, values in FIGURES[request.param].items():
            measured.add(OpEntry(name=name, **OP, **values))
        yield measured


def test_it_is_right(group):
    {right}


def test_it_is_fast(group, benchmark):
    benchmark.pedantic(lambda: None, rounds=2)
"""


class Suite:
    """A suite in a folder of its own, run in this process."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.monkeypatch = pytester, monkeypatch
        pytester.makeconftest(CONFTEST)
        pytester.makeini(
            f"[pytest]\npythonpath = {ROOT}\n"
            "addopts = -p no:cacheprovider -p no:hypothesispytest -p no:anyio\n"
            "markers =\n    slow: left out\n    target: a bar\n"
        )
        self.expect("one", "two")
        self.right()
        self.measure()
        self.commit("a" * 40)

    def expect(self, *groups: str) -> None:
        Path("expected.json").write_text(json.dumps(groups))

    def right(self, statement: str = "assert True") -> None:
        self.pytester.makepyfile(test_timed=SUITE.replace("{right}", statement))

    def target(self, statement: str) -> None:
        """With a test more, that holds a group to a bar."""
        test = f"\n\n@pytest.mark.target\ndef test_target(group, recording):\n    {statement}\n"
        self.pytester.makepyfile(test_timed=SUITE.replace("{right}", "assert True") + test)

    def measure(self, seconds: Any = 1.0, names: str = "ab", groups: str = "one two") -> None:
        """What the suite will find: ``seconds`` of the first name of each group, 1 of others."""
        figures = {
            group: {
                f"{group}/{name}": timing(seconds if name == names[0] else 1.0) for name in names
            }
            for group in groups.split()
        }
        Path("figures.json").write_text(json.dumps(figures))

    def commit(self, commit: str) -> None:
        self.monkeypatch.setattr(results, "current_commit", lambda tree: commit)

    def disturb(self, reasons: list[str | None]) -> None:
        """The reasons that the plugin is told, one after the other."""
        answers = iter(reasons)
        self.monkeypatch.setattr(machine, "disturbance", lambda device: next(answers, None))

    def run(self, *args: str) -> pytest.RunResult:
        argv = ("test_timed.py", "--device", "cpu", *args)
        return self.pytester.runpytest_inprocess(*argv, no_reraise_ctrlc=True)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.paths()]

    def paths(self) -> list[Path]:
        return sorted(self.pytester.path.glob("results/*/*.json"))


def timing(seconds: Any) -> dict[str, Any]:
    return {"seconds": seconds, "seconds_quartiles": [seconds, seconds]}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "disturbance", lambda device: None)
    return Suite(pytester, monkeypatch)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first baseline of a process is kept."""
    return tmp_path_factory.mktemp("recorded") / "results"


@pytest.fixture
def baseline(suite: Suite, recorded: Path) -> Suite:
    """A suite that has a baseline of both groups, which is recorded once."""
    results_dir = suite.pytester.path / "results"
    if recorded.exists():
        shutil.copytree(recorded, results_dir)
    else:
        assert suite.run("--record").ret == 0
        shutil.copytree(results_dir, recorded)
    assert [record["complete"] for record in suite.records()] == [True, True]
    return suite


def lines(result: pytest.RunResult, *patterns: str) -> None:
    text = result.stdout.str() + result.stderr.str()
    for pattern in patterns:
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}\n{text}"


def ends(result: pytest.RunResult, status: int, *says: str) -> None:
    """A run has this exit status, and says this."""
    assert result.ret == status, result.stdout.str()
    lines(result, *says)
