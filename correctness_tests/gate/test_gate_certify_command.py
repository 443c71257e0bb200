"""``tinyllama certify``, on sides that answer from a script: blocks are added one by one and kept,
and a certificate is written where there are enough."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.gate_fakes import CPU, Script, died, wrong
from tinyllama.cli import certifying, main
from tinyllama.cli.certifying import ROOT
from tinyllama.harness.gate.calibrate import Noise, load, noise_path
from tinyllama.harness.gate.device_guard import DeviceGuard, device_lock
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.schedule import timing_processor
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

    def blocks(self) -> list[dict[str, dict[str, float]]]:
        return [each.statistics for each in Noise.load(self.folder, device_name(CPU)).blocks]

    def file(self, name: str) -> Path:
        return noise_path(self.folder, device_name(CPU)).parent / name


@pytest.fixture
def certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certify:
    made = Certify(tmp_path)

    @contextlib.contextmanager
    def launcher(timed: int) -> Iterator[Any]:
        yield made.script.pairs

    def listed(root: Path, device: Any, registered: Any) -> Any:
        tree = type("Side", (), {"tree": made.script.setting().base})()
        return made.script._benchmarks(tree)

    monkeypatch.setattr(certifying, "launcher", launcher)
    monkeypatch.setattr(certifying, "pairs_at_once", lambda device: 1)
    monkeypatch.setattr(certifying, "benchmarks_of", listed)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where devices are locked
    monkeypatch.setattr(certifying, "WAIT", 0.0)
    monkeypatch.setattr(DeviceGuard, "before", lambda self: None)
    return made


def test_blocks_add_up_from_run_to_run(certify: Certify) -> None:
    assert certify.run("--blocks=2") == USAGE, "too few for a certificate"
    assert certify.run("--blocks=3") == USAGE
    assert [set(block) for block in certify.blocks()] == [{"a", "b"}] * 5
    assert len({block["a"][DEVICE] for block in certify.blocks()}) == 5
    waves = [one.wave for one in Noise.load(certify.folder, device_name(CPU)).blocks]
    assert all(waves)
    assert len(set(waves)) == 5, "one at a time"
    settled = {args for *_, method, args in certify.script.asked if method == "pin"}
    assert settled == {(timing_processor(CPU),), (None,)}


def test_blocks_that_are_prepared_at_once_are_one_wave(
    certify: Certify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certifying, "pairs_at_once", lambda device: 3)
    assert certify.run("--blocks=6") == USAGE
    waves = [one.wave for one in Noise.load(certify.folder, device_name(CPU)).blocks]
    assert [waves.count(one) for one in waves] == [3] * 6


@pytest.mark.long
def test_twenty_blocks_of_a_quiet_device_are_a_certificate(
    certify: Certify, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify.run("--blocks=20", "--merges=1000") == 1, "1000 merges bound no 0.1%"
    said = capsys.readouterr().out
    assert "block 20 of 20" in said
    assert "MISSED false alarms in under 0.1% of merges" in said
    content = load(certify.file("certificate.json"))
    assert {one["benchmark"] for one in content["found"]} == {"a", "b"}
    assert all(bar["held"] for bar in content["bars"][1:])
    assert certify.run("--blocks=0", "--merges=10000") == 0
    assert len(certify.blocks()) == 20


def test_a_block_is_kept_when_the_next_one_cannot_be_taken(certify: Certify) -> None:
    certify.script.on(BASE, "make", died(), launch=4)  # after the preparation and two blocks
    assert certify.run("--blocks=5") == USAGE
    assert len(certify.blocks()) == 2


def test_a_disturbed_block_is_not_kept(
    certify: Certify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = iter([None, "another process", None])
    monkeypatch.setattr(DeviceGuard, "during", lambda self, pids: next(reasons))
    certify.run("--blocks=2")
    assert len(certify.blocks()) == 2
    assert "blocks are discarded (1): another process" in capsys.readouterr().out


def test_what_fails_is_said_not_to_be_certified_and_the_others_are(
    certify: Certify, capsys: pytest.CaptureFixture[str]
) -> None:
    certify.script.on(CANDIDATE, "turn", died(), "a", launch=3)
    certify.run("--blocks=3")
    assert [set(block) for block in certify.blocks()] == [{"a", "b"}, {"b"}, {"b"}]
    assert "not certified: NOT JUDGED a" in capsys.readouterr().out


@pytest.mark.long
def test_further_cases_are_not_certified(certify: Certify) -> None:
    certify.script.further = {"b"}
    assert certify.run("--blocks=20", "--merges=1000") == 1, "1000 merges bound no 0.1%"
    assert [set(block) for block in certify.blocks()] == [{"a"}] * 20
    content = load(certify.file("certificate.json"))
    assert {one["benchmark"] for one in content["found"]} == {"a"}


@pytest.mark.long
def test_what_is_wrong_now_is_not_certified_by_what_it_gave_before(certify: Certify) -> None:
    assert certify.run("--blocks=20", "--merges=1000") in (0, 1)
    path = certify.file("certificate.json")
    before = path.read_bytes()
    certify.script.on(CANDIDATE, "verify", wrong())
    assert certify.run("--blocks=1", "--merges=1000") == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("args", [["--blocks=0"], ["--validate"]], ids=str)
def test_a_name_of_nothing_is_an_error(
    certify: Certify, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert certify.run("--only=nothing*", *args) == USAGE
    assert "--only 'nothing*': no benchmark of cpu has such a name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad",
    ["--blocks=-1", "--merges=10", "--seconds=-5", "--seconds=nan", "--results-dir=/proc/nope"],
)
def test_what_cannot_be_asked_for_is_an_error_that_names_it(
    certify: Certify, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    assert certify.run("--blocks=1", bad) == USAGE
    option, _, value = bad.partition("=")
    said = capsys.readouterr().err
    assert option in said
    assert value in said
    assert certify.blocks() == [], "nothing was measured"


def test_a_device_that_is_held_or_disturbed_is_14(
    certify: Certify, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_lock(CPU, 0):
        assert certify.run("--blocks=1") == 14
    for look in ("during", "before"):
        monkeypatch.setattr(DeviceGuard, look, lambda self, *pids: "other work runs here")
        assert certify.run("--blocks=1") == 14
    assert certify.blocks() == []


@pytest.mark.long
def test_blocks_of_other_versions_stay_and_do_not_count(certify: Certify) -> None:
    for identity in certify.script.identity.values():
        identity["versions"] = {"torch": "1.0"}
    certify.run("--blocks=20")
    assert len(certify.blocks()) == 20
    assert certify.run("--blocks=0") == USAGE
    assert not certify.file("certificate.json").exists()


@pytest.mark.long
@pytest.mark.slow("it starts a process, and a side of the gate")
def test_it_may_be_asked_from_any_folder(tmp_path: Path) -> None:
    """As the installed script asks, whose path holds this tree's package and not its folder."""
    asked = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tinyllama.cli import main; "
        f"sys.path.remove({str(ROOT)!r}); "
        "sys.exit(main(['certify', '--validate', '--device=cpu', '--only=nobody']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path, capture_output=True, text=True
    )
    assert "--only 'nobody': no benchmark of cpu has such a name" in done.stderr
    assert done.returncode == USAGE


@pytest.mark.long
def test_a_validation_adds_work_to_some_and_writes_what_was_found(certify: Certify) -> None:
    certify.script.names = {BASE: list("abcdef"), CANDIDATE: list("abcdef")}
    seen: dict[str, Any] = {}
    pairs = certify.script.pairs

    @contextlib.contextmanager
    def watched(trees: Any, *rest: Any) -> Iterator[Any]:
        seen.update({tree.name: dict(tree.slowed) for tree in trees})
        with pairs(trees, *rest) as one:
            yield one

    certify.script.pairs = watched  # type: ignore[assignment]
    certify.script.slower("f", device_seconds=1.2)
    assert certify.run("--validate") == 0
    content = json.loads(certify.file("validation.json").read_text())
    assert content["slowed"] == dict(zip("abcdef", (0, 0.01, 0.02, 0.03, 0.05, 0.1), strict=True))
    assert seen == {BASE: {}, CANDIDATE: {n: s for n, s in content["slowed"].items() if s}}
    assert (content["device"], content["wrong"]) == (device_name(CPU), [])
    assert content["benchmarks"]["f"]["outcome"] == "SLOWER"
    assert content["benchmarks"]["a"]["outcome"] == "SAME"
    assert certify.blocks() == [], "they are no equal sides"


@pytest.mark.long
@pytest.mark.parametrize(
    ("times", "answer", "wrong"),
    [
        pytest.param({}, None, "f", id="missed"),
        pytest.param({"a": 1.2, "f": 1.2}, None, "a", id="a false alarm"),
        pytest.param({"a": 0.8, "f": 1.2}, None, "a", id="equal sides of which one is FASTER"),
        pytest.param({"d": 0.8, "f": 1.2}, None, "d", id="FASTER by what was added"),
        pytest.param({}, ("begin", 60.0, "f"), "f", id="SLOWER to compile, and its time missed"),
        pytest.param({"f": 1.2}, ("counted", {"peak_bytes": 500}, "d"), "d", id="fewer bytes"),
    ],
)
def test_a_validation_whose_verdicts_are_not_what_was_added_fails(
    certify: Certify, times: dict[str, float], answer: tuple[str, Any, str] | None, wrong: str
) -> None:
    certify.script.names = {BASE: list("abcdef"), CANDIDATE: list("abcdef")}
    certify.script.on(BASE, "counted", {"peak_bytes": 1000}, "d")
    certify.script.on(CANDIDATE, "counted", {"peak_bytes": 1000}, "d")
    if answer is not None:
        certify.script.on(CANDIDATE, *answer)
    for name, ratio in times.items():
        certify.script.slower(name, device_seconds=ratio)
    assert certify.run("--validate") == 1
    content = json.loads(certify.file("validation.json").read_text())
    assert content["wrong"] == [wrong]
