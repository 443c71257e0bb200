"""`pytest perf_tests -n 2`: whole groups on two GPUs, in one report; GPUs are stood in for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from correctness_tests.support.timed_suite import COMPARE, CONFTEST, Suite, ends, lines, timing
from tinyllama.harness.plugins import benchmarks

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

    def baseline(self) -> None:
        """Recorded in this process, one group after the other."""
        self.pytester.makeconftest(CONFTEST)
        self.right()
        self.disturb([])
        assert super().run("--record").ret == 0
        self.pytester.makeconftest(TWO_GPUS + CONFTEST)
        self.write()

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


@pytest.mark.slow("workers of its own, which import torch")
def test_two_groups_run_at_once_each_whole_on_its_gpu_in_one_report(spread: Spread) -> None:
    """And the worst verdict of any worker is the exit status."""
    spread.baseline()
    figures = json.loads(Path("figures.json").read_text())
    figures["one"]["one/a"] = timing(1.2)
    Path("figures.json").write_text(json.dumps(figures))
    found = spread.run("--record", COMPARE, "-n", "2")
    recorded = ("recorded .*one.json: no baseline", "recorded .*two.json$")
    compared = (r"SLOWER one/a: seconds 1\.200", r"SAME one/b", r"SAME two/a", r"SAME two/b")
    ends(found, 10, *recorded, *compared, r"exit status 10; the worst verdict is SLOWER \(10\)")
    assert {Path(f"{n}.began").read_text() for n in ("one", "two")} == {"cuda:0", "cuda:1"}
    assert {Path(f"{n}.workers").read_text() for n in ("one", "two")} == {"gw0" * 3, "gw1" * 3}
    made = sorted((r["group"], r["complete"]) for r in spread.records())
    assert made == [("one", False), ("one", True), ("two", True), ("two", True)]


@pytest.mark.slow("workers of its own, which import torch")
def test_a_worker_that_dies_and_a_test_that_fails_leave_no_baseline(spread: Spread) -> None:
    """The group of the one that died is missing, as is one that nothing measured."""
    spread.expect("one", "two", "three")
    spread.write(statement="os._exit(3) if group.record.group == 'one' else 1 // (2 - number)")
    found = spread.run("--record", "-n", "2", "--max-worker-restart", "0")
    assert found.ret == 1
    missing = (f"MISSING {name}: expected, and not measured" for name in ("one", "three"))
    worst = r"the worst verdict is MISSING \(15\)"
    lines(found, *missing, "recorded .*two.json: no baseline", worst)
    assert [(r["group"], r["complete"]) for r in spread.records()] == [("two", False)]


@pytest.mark.parametrize(("workers", "device"), [(3, None), (2, "cpu")])
def test_more_workers_than_gpus_are_refused(
    workers: int, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "gpus", lambda: [torch.device("cuda", n) for n in range(2)])
    option = SimpleNamespace(dist="load", tx=["popen"] * workers, device=device)
    config: Any = SimpleNamespace(option=option)
    said = f"-n {workers}: .* one group at a time on a GPU, and there are 2: remove -n"
    with pytest.raises(pytest.UsageError, match=said):
        benchmarks.check_measuring(config)
    option.tx, option.device = ["popen"] * 2, None
    benchmarks.check_measuring(config)
