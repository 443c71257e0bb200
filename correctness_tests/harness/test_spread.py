"""`pytest perf_tests -n 2`: whole groups on two GPUs, in one report; GPUs are stood in for."""

from pathlib import Path

import pytest

from correctness_tests.support.timed_suite import COMPARE, CONFTEST, Suite, ends, lines

pytest_plugins = ["pytester"]

# In workers of xdist too, which monkeypatch does not reach.
TWO_GPUS = """
import os, tempfile
from types import SimpleNamespace
import torch
from tinyllama.harness.machine import facts
from tinyllama.harness.plugins import suite
from tinyllama.harness.records import results

tempfile.tempdir = os.getcwd()
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"gpu-{device.index}")
suite.default_device = lambda: torch.device("cuda")
suite.device_name = str
facts.disturbance = lambda device: None
made = results.new_record
results.new_record = lambda device, *rest: made(torch.device("cpu"), *rest)
"""

SUITE = """
import json, os, time
from pathlib import Path
import pytest
from tinyllama.harness.records.entries import OpEntry

OP = dict.fromkeys(("op", "provider", "role", "case", "dtype", "values", "passes"), "x")
FIGURES = json.loads(Path("figures.json").read_text())


@pytest.fixture(scope="module", params=list(FIGURES), ids=str)
def group(request, recording, device):
    name = request.param
    with recording.group(name) as measured:
        Path(f"{name}.began").write_text(str(device))
        end = time.monotonic() + WAIT
        while not all(Path(f"{each}.began").exists() for each in FIGURES):
            assert time.monotonic() < end, "the other group did not run at the same time"
            time.sleep(0.05)
        for entry, values in FIGURES[name].items():
            measured.add(OpEntry(name=entry, **OP, **values))
        yield measured


@pytest.mark.parametrize("number", range(3))
def test_it(group, number):
    with open(f"{group.record.group}.workers", "a") as out:
        out.write(os.environ["PYTEST_XDIST_WORKER"])
    STATEMENT
"""


class Spread(Suite):
    def write(self, wait: float = 30.0, statement: str = "pass") -> None:
        text = SUITE.replace("WAIT", str(wait)).replace("STATEMENT", statement)
        self.pytester.makepyfile(test_timed=text)

    def run(self, *args: str) -> pytest.RunResult:
        for path in (*Path().glob("*.began"), *Path().glob("*.workers")):
            path.unlink()
        return self.pytester.runpytest_subprocess("test_timed.py", *args, timeout=60)


@pytest.fixture
def spread(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Spread:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINYLLAMA_COMMIT", "a" * 40)
    this = Spread(pytester, monkeypatch)
    pytester.makeconftest(TWO_GPUS + CONFTEST)
    this.write()
    return this


def test_two_groups_run_at_once_each_whole_on_its_gpu_in_one_report(spread: Spread) -> None:
    """And the worst verdict of any worker is the exit status."""
    found = spread.run("--record", "-n", "2")
    ends(found, 0, "recorded .*one.json$", "recorded .*two.json$", "6 passed")
    assert {Path(f"{n}.began").read_text() for n in ("one", "two")} == {"cuda:0", "cuda:1"}
    assert {Path(f"{n}.workers").read_text() for n in ("one", "two")} == {"gw0" * 3, "gw1" * 3}
    assert sorted((r["group"], r["complete"]) for r in spread.records()) == [
        ("one", True),
        ("two", True),
    ]
    spread.measure(1.2)
    found = spread.run(COMPARE, "-n", "2")
    slower = (r"SLOWER one/a: seconds 1\.200", r"SLOWER two/a: seconds 1\.200")
    ends(found, 10, *slower, r"SAME one/b", "status 10")
    assert len(spread.records()) == 2


def test_what_fails_or_is_missing_is_said_and_no_baseline(spread: Spread) -> None:
    spread.expect("one", "two", "three")
    spread.write(statement="assert number < 2 or group.record.group == 'two'")
    found = spread.run("--record", "-n", "2")
    assert found.ret == 1
    lines(found, "recorded .*one.json: no baseline", "recorded .*two.json$")
    lines(
        found, "MISSING three: expected, and not measured", r"the worst verdict is MISSING \(15\)"
    )


def test_a_worker_that_dies_leaves_its_group_missing(spread: Spread) -> None:
    spread.write(statement="group.record.group == 'two' or os._exit(3)")
    found = spread.run("--record", "-n", "2", "--max-worker-restart", "0")
    assert found.ret == 1
    lines(found, "MISSING one: expected, and not measured", "recorded .*two.json$")
    assert [r["group"] for r in spread.records()] == ["two"]


@pytest.mark.parametrize("option", [("-n", "3"), ("-n", "2", "--device", "cpu")])
def test_more_workers_than_gpus_are_refused(spread: Spread, option: tuple[str, ...]) -> None:
    found = spread.run("--record", *option)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    lines(found, f"-n {option[1]}: .* one group at a time on a GPU, and there are 2: remove -n")
