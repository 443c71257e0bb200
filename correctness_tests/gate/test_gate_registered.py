"""The gate learns of benchmarks by registration; the harness names nothing that lies above it."""

import re
from types import ModuleType

import pytest

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gated_suite import CONFTEST, GatedSuite
from correctness_tests.support.timed_suite import lines
from tinyllama.harness.gate.registered import Registered

pytest_plugins = ["pytester"]

ABOVE = re.compile(r"tinyllama[./](bench|cli|model|training)\b|perf_tests/|\bTinyLlama\b|TierStep")
SECOND = """
class Second:
    def pytest_tinyllama_benchmarks(self, config):
        return 3


def pytest_configure(config):
    config.pluginmanager.register(Second())
"""


def test_the_harness_names_nothing_that_lies_above_it() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / "tinyllama/harness").rglob("*.py"))
        for match in ABOVE.finditer(path.read_text())
    ]
    assert found == []


def test_a_function_that_workers_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match=r"benchmarks is .*<lambda>.*: define it at the top level"):
        Registered(ModuleType("ops"), lambda device: [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("conftest", "number"),
    [(CONFTEST.replace("pytest_tinyllama_benchmarks", "nothing"), 0), (CONFTEST + SECOND, 2)],
    ids=["none", "two"],
)
def test_a_gate_takes_what_one_conftest_registers(
    gated: GatedSuite, conftest: str, number: int
) -> None:
    gated.write("conftest.py", conftest)
    found = gated.run()
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, f"{number} conftests implement pytest_tinyllama_benchmarks")
    assert gated.script.launches == 0
