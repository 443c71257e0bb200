"""Each worker has its own GPU, and each session that times holds one; GPUs are stood in for."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyllama.harness.gate.device_guard import BusyError, device_lock
from tinyllama.harness.plugins import recording

ONE, OTHER = (torch.device("cuda", index) for index in range(2))


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that can be told apart."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=f"gpu-{d.index}")
    )
    monkeypatch.setattr(recording, "WAIT", 0.1)


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


@pytest.mark.usefixtures("two_gpus")
def test_a_session_and_a_gate_exclude_each_other_on_one_gpu_only(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(record=False))
    session: Any = SimpleNamespace(exitstatus=0)
    mine = recording.Recording(config, tmp_path, compare=False)
    mine.hold_gpu(ONE)
    mine.hold_gpu(ONE)  # the next group of the same session
    with pytest.raises(BusyError), device_lock(ONE, 0):
        pytest.fail("held twice")
    with device_lock(OTHER, 0):
        mine.hold_gpu(torch.device("cpu"))
    mine.conclude(session)
    with device_lock(ONE, 0):
        pass
