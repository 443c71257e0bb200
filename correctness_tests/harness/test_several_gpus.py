"""Each worker has its own GPU, and each session that times holds one; GPUs are stood in for."""

import contextlib
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.bench.steps import StepContender
from tinyllama.harness.gate.side import Side
from tinyllama.harness.gate.team import Team
from tinyllama.harness.gate.watch import BusyError, Watch, device_lock
from tinyllama.harness.plugins import benchmarks, suite
from tinyllama.harness.plugins.card import Card, gpus
from tinyllama.harness.plugins.recording import Recording
from tinyllama.harness.records import results

ONE, OTHER = (torch.device("cuda", index) for index in range(2))


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs that can be told apart; -> those that were made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=f"gpu-{d.index}")
    )
    monkeypatch.setattr(Card.hold, "__defaults__", (0.1,))
    return current


def config(**options: Any) -> Any:
    given = {"device": None, "soak_seeds": 0, "soak_base": 0, **options}
    option = SimpleNamespace(**given)
    return SimpleNamespace(option=option, stash=pytest.Stash(), rootpath=None)


@pytest.mark.parametrize(("worker", "expected"), [("gw0", ONE), ("gw1", OTHER), ("gw2", ONE)])
def test_each_worker_takes_its_own_gpu_as_the_current_one(
    worker: str,
    expected: torch.device,
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)  # torch's threads stay
    this = config()
    this.workerinput = {}
    suite.pytest_configure(this)
    assert suite.worker_device(this) == expected
    assert two_gpus == [expected]


def test_two_workers_compute_on_two_gpus(tmp_path: Path) -> None:
    """Also what names no number: a tensor on "cuda"."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two workers with a GPU each need two GPUs")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, pytest, time, torch\n"
        "@pytest.mark.parametrize('number', range(8))\n"
        "def test_it(number, device):\n"
        "    time.sleep(0.5)\n"
        "    used = torch.ones(1, device='cuda').device\n"
        "    assert used == device\n"
        "    name = f\"{os.environ['PYTEST_XDIST_WORKER']} {used}\"\n"
        "    pathlib.Path(__file__).with_name(name).touch()\n"
    )
    plugin = ("-p", "tinyllama.harness.plugins.suite")
    command = (sys.executable, "-m", "pytest", "-q", "-n", "2", *plugin, str(tmp_path))
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout
    assert {path.name for path in tmp_path.glob("gw*")} == {"gw0 cuda:0", "gw1 cuda:1"}


def test_without_workers_no_gpu_is_touched_before_a_test_asks(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    suite.pytest_configure(config())
    assert two_gpus == []


@pytest.mark.usefixtures("two_gpus")
def test_sessions_take_gpus_that_are_free_and_the_third_is_refused() -> None:
    first, second, third = Card(), Card(), Card()
    assert first.hold_one_of(gpus()) == ONE
    assert second.hold_one_of(gpus()) == OTHER
    with pytest.raises(BusyError, match=f"cuda:0 was held by process {os.getpid()} for 0.1 s"):
        third.hold_one_of(gpus())
    first.release()
    assert third.hold_one_of(gpus()) == ONE
    third.release()
    second.release()


@pytest.mark.usefixtures("two_gpus")
def test_a_session_and_a_gate_exclude_each_other_on_one_gpu_only() -> None:
    mine = Card()
    mine.hold(ONE)
    mine.hold(ONE)  # the next group of the same session
    with pytest.raises(BusyError), device_lock(ONE, 0):
        pytest.fail("held twice")
    with device_lock(OTHER, 0):
        mine.hold(torch.device("cpu"))
    mine.release()
    with device_lock(ONE, 0):
        pass


@pytest.mark.usefixtures("two_gpus")
def test_a_session_that_records_names_the_gpu_that_it_got() -> None:
    """So that all that asks for a device, contenders' processes among it, uses this one."""
    this, mine = config(), Card()
    with device_lock(ONE, 0):
        benchmarks._hold(this, mine)
        assert this.option.device == "cuda:1"
    mine.release()
    named = config(device="cpu")
    benchmarks._hold(named, mine)
    assert named.option.device == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_a_session_without_a_gpu_does_not_start() -> None:
    with device_lock(ONE, 0), device_lock(OTHER, 0), pytest.raises(pytest.UsageError, match="held"):
        benchmarks._hold(config(), Card())


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_free_again_when_its_session_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, filelock, time\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\n"
        "print(flush=True)\ntime.sleep(60)"
    )
    path = tmp_path / "tinyllama-gate-gpu-0.lock"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        mine = Card()
        with pytest.raises(BusyError):
            mine.hold(ONE)
        other.kill()
        other.wait(30)
        mine.hold(ONE)
        mine.release()


@pytest.mark.usefixtures("two_gpus")
def test_a_group_is_measured_while_its_gpu_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(results, "new_record", lambda *_: pytest.fail("it begins"))
    this = Recording(config(record=False), tmp_path, compare=False, team=Team())
    default = torch.device("cuda")
    with pytest.raises(pytest.fail.Exception, match="it begins"), this.group("one"):
        pytest.fail("not reached")
    with pytest.raises(BusyError), device_lock(default, 0):
        pytest.fail("held twice")
    this.card.release()
    with device_lock(default, 0), pytest.raises(BusyError), this.group("two"):
        pytest.fail("measured without its GPU")


@pytest.mark.parametrize("made", [partial(StepContender, "tiny-fp32"), partial(Side, package="")])
def test_what_a_process_times_is_on_its_current_gpu(
    made: Any, two_gpus: list[torch.device]
) -> None:
    """A graph is captured on a stream of the current one, whatever GPU its tensors are on."""
    for device in ("cuda", "cuda:1"):  # "cuda" is the current one, which torch sets by number only
        with contextlib.suppress(Exception):  # these GPUs are made up
            made(device=device)
    assert two_gpus == [OTHER]


@pytest.mark.usefixtures("two_gpus")
def test_gates_on_two_gpus_do_not_disturb_each_other() -> None:
    """A/A pairs on both at once: each holds its own lock, and sees no stranger on its own GPU."""
    processes = {ONE: [os.getpid()], OTHER: [1]}

    def card(device: torch.device) -> Any:
        return SimpleNamespace(
            processes=lambda: processes[device], busy_share=lambda: 0.0, throttled=lambda: None
        )

    with device_lock(ONE, 0), device_lock(OTHER, 0):
        assert Watch(ONE, card(ONE)).before() is None
        stranger = Watch(OTHER, card(OTHER)).before()
    assert stranger == "other processes compute on the GPU: 1"
