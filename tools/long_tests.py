"""Find the tests that take long, which `make test` leaves out and CI runs.

    python -m tools.long_tests [-n WORKERS]    (minutes: the whole suite, without a GPU)

Writes correctness_tests/long.txt, a function a line: the tests that take more than `LONGEST`
seconds of processor time, on average over their parameters, or over all tests that share a fixture.
Processes that a test starts and waits for count, too. What answers "are the kernels right?" and
"does a model learn?" stays in `make test` however long it takes: `ALWAYS`.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LIST = ROOT / "correctness_tests/long.txt"
LONGEST = 0.15  # seconds
ALWAYS = tuple(
    f"correctness_tests/{name}"
    for name in (
        "ops/test_checks.py::test_a_provider_of_the_tree_passes",
        *("ops/test_ops.py", "ops/test_properties.py"),
        *("model/test_gradients.py", "model/test_learning.py", "model/test_tiers.py"),
    )
)
TAKEN = "processor seconds"


def used() -> float:
    """Seconds of processor time of this process, and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Seconds:
    """In each process, notes a test's processor time in its reports; in the one that gets all
    reports, adds it up by function. What a fixture of many tests takes belongs to all that use it:
    without the first of them the next one would take that time."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ran = set[str]()  # not skipped
        self.made: dict[str, float] = {}  # in this process, by fixture
        self.found = defaultdict[str, list[float]](list)
        self.shared: dict[str, float] = {}
        self.users = defaultdict[str, set[str]](set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self.began = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        began = used()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                taken = used() - began
                self.began += taken
                self.made[f"{fixturedef.baseid}::{fixturedef.argname}"] = taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            ids = {
                name: made[-1].baseid for name, made in item._fixtureinfo.name2fixturedefs.items()
            }
            of = {key: self.made[key] for n, i in ids.items() if (key := f"{i}::{n}") in self.made}
            item.user_properties.append((TAKEN, (used() - self.began, of)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran.add(report.nodeid)
        if report.when != "teardown" or report.nodeid not in self.ran:
            return
        function = report.nodeid.partition("[")[0]
        noted: list[tuple[str, Any]] = report.user_properties
        for own, fixtures in [value for name, value in noted if name == TAKEN]:
            self.found[function].append(own)
            for fixture, taken in fixtures.items():
                self.shared[fixture] = max(taken, self.shared.get(fixture, 0.0))
                self.users[fixture].add(function)

    def long(self) -> list[str]:
        """The functions whose tests take long."""
        together = [(0.0, {name}) for name in self.found]
        together += [(self.shared[name], users) for name, users in self.users.items()]
        names = set[str]()
        for made, functions in together:
            each = [seconds for name in functions for seconds in self.found[name]]
            if (made + sum(each)) / len(each) > LONGEST:
                names |= functions
        return sorted(name for name in names if not name.startswith(ALWAYS))


def pytest_configure(config: pytest.Config) -> None:
    """In a worker of xdist, which loads this file by its name."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.long_tests", description=__doc__)
    parser.add_argument("-n", dest="workers", default=str((os.cpu_count() or 1) + 1))
    workers = parser.parse_args(argv).workers
    seconds = Seconds()
    words = ["correctness_tests", "-q", "-p", "tools.long_tests", "--device", "cpu"]
    status = pytest.main([*words, "-n", workers, "--dist", "worksteal"], plugins=[seconds])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"{LIST.name} was not written: the suite ended with status {int(status)}")
        return int(status)
    names = seconds.long()
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{LIST.name}: {len(names)} functions, {sum(len(seconds.found[n]) for n in names)} tests")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
