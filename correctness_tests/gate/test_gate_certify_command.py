"""``tinyllama certify``, on sides that answer from a script: blocks are added one by one and stay,
and a certificate is written where there are enough."""

import contextlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness_tests.support.gate_fakes import CPU, Script, died, wrong
from tinyllama.cli import certifying, main
from tinyllama.harness.gate import device_guard
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE
from tinyllama.harness.gate.calibrate import Noise, noise_path
from tinyllama.harness.gate.device_guard import DeviceGuard, device_lock
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.records.results import versions

USAGE = 2


class Certify:
    """The command, with its folder of results and what its sides answer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, Script("a", "b", device=CPU, noise=0.005)
        for identity in self.script.identity.values():
            identity["versions"] = versions()

    def run(self, *args: str) -> int:
        return main(["certify", "--device=cpu", f"--results-dir={self.folder}", *args])

    @property
    def noise(self) -> Noise:
        return Noise.load(self.folder, device_name(CPU))

    def blocks(self) -> list[set[str]]:
        return [set(block.statistics) for block in self.noise.blocks]

    def file(self, name: str) -> Path:
        return noise_path(self.folder, device_name(CPU)).with_name(name)


@pytest.fixture
def certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certify:
    command = Certify(tmp_path)

    def listed(root: Path, device: Any) -> Any:
        tree = type("Side", (), {"tree": command.script.setting().base})()
        return command.script._benchmarks(tree)

    pool = SimpleNamespace(pairs=command.script.pairs)
    monkeypatch.setattr(certifying, "PairPool", lambda timed: contextlib.nullcontext(pool))
    monkeypatch.setattr(certifying, "pairs_at_once", lambda device: 1)
    monkeypatch.setattr(certifying, "benchmarks_of", listed)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where devices are locked
    monkeypatch.setattr(device_guard, "WAIT", 0.0)
    monkeypatch.setattr(DeviceGuard, "before", lambda self: None)
    return command


@pytest.mark.parametrize("at_once", [1, 3])
def test_blocks_add_up_from_run_to_run(
    certify: Certify, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(certifying, "pairs_at_once", lambda device: at_once)
    for _ in range(2):
        assert certify.run("--blocks=3") == USAGE, "too few for a certificate"
    assert certify.blocks() == [{"a", "b"}] * 6
    assert len({block.statistics["a"][DEVICE] for block in certify.noise.blocks}) == 6


@pytest.mark.long
def test_twenty_blocks_of_a_quiet_device_are_a_certificate(
    certify: Certify, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify.run("--blocks=20") == 0
    said = capsys.readouterr().out
    assert "block 20 of 20" in said
    assert said.count("holds ") == 3
    path = certify.file("certificate.json")
    content = json.loads(path.read_text())
    assert {detection["benchmark"] for detection in content["found"]} == {"a", "b"}
    before = path.read_bytes()
    certify.script.on(CANDIDATE, "verify", wrong())
    assert certify.run("--blocks=1") == 1
    assert path.read_bytes() == before, "what is wrong now is not certified by earlier blocks"


@pytest.mark.parametrize(
    ("script", "blocks", "said"),
    [
        ((BASE, "make", died(), None, 4), [{"a", "b"}] * 2, ""),
        ((CANDIDATE, "turn", died(), "a", 3), [{"a", "b"}, {"b"}, {"b"}], "NOT JUDGED a"),
        ((CANDIDATE, "turn", died(), None, None), [], "NOT JUDGED b"),
    ],
    ids=["no process", "one benchmark", "all"],
)
def test_blocks_are_kept_when_something_fails_and_what_failed_is_not_certified(
    certify: Certify, capsys: pytest.CaptureFixture[str], script: Any, blocks: Any, said: str
) -> None:
    side, method, answer, benchmark, launch = script
    certify.script.on(side, method, answer, benchmark, launch=launch)
    assert certify.run("--blocks=3") != 0
    assert certify.blocks() == blocks
    assert said in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("untimed", [True, False])
def test_what_is_not_timed_in_each_run_is_not_certified(certify: Certify, untimed: bool) -> None:
    """A further benchmark, and one whose results alone are verified here."""
    if untimed:
        certify.script.untimed["b"] = "its kernels are interpreted"
    else:
        certify.script.further = {"b"}
    assert certify.run("--blocks=20") == 0
    assert certify.blocks() == [{"a"}] * 20


def test_the_ops_of_the_current_folder_are_certified(
    certify: Certify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(certify.folder)
    assert certify.run("--blocks=1") == USAGE
    assert "no ops are named" in capsys.readouterr().err
    (certify.folder / "pyproject.toml").write_text('[tool.tinyllama]\nops = ["kernels/*.py"]\n')
    certify.run("--blocks=1")
    assert certify.blocks() == [{"a", "b"}]


@pytest.mark.parametrize("look", ["lock", "during", "before"])
def test_a_device_that_is_held_or_disturbed_gives_status_14(
    certify: Certify, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    if look == "lock":
        with device_lock(CPU, 0):
            assert certify.run("--blocks=1") == 14
    else:
        monkeypatch.setattr(DeviceGuard, look, lambda self, *pids: "other work runs here")
        assert certify.run("--blocks=1") == 14
    assert certify.blocks() == []
