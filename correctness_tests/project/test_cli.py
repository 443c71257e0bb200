"""The command line, as its users meet it: exit status, what is printed, what is written."""

import errno
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tinyllama as package
from correctness_tests.support.commands import (
    ENVIRONMENT,
    SHORT,
    TINY,
    printed,
    python,
    ran,
    refused,
    tinyllama,
)
from correctness_tests.support.faults import dead_swiglu_tier
from tinyllama.harness.machine import files
from tinyllama.model.config import PRESETS
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.training import checkpoint


def run_json(path: Path, *argv: str, status: int = 0) -> tuple[str, dict[str, Any]]:
    """What a short run prints, and its JSON."""
    done = tinyllama(*SHORT, *argv, "--json", path)
    assert done.status == status, done.err
    return done.out, json.loads(path.read_text())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["gate", "--against", ""], "against"),
        (["tune", "--show", "--chip", ""], "chip"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_empty_text_is_an_error(argv: list[str], name: str) -> None:
    """As of a variable that is not set: it does not count as an option that is not given."""
    assert f"error: {name} is empty: give a value, or leave it out" in refused(*argv)


def test_every_field_of_a_config_with_a_help_text_is_an_option(tmp_path: Path) -> None:
    options = ["--hidden-dim", "48", "--num-layers", "1", "--num-heads", "6", "--num-kv-heads", "3"]
    options += ["--ffn-dim", "40", "--vocab-size", "60", "--seed", "3"]
    _, record = run_json(tmp_path / "run.json", *options)
    shape = {name: record["model"][name] for name in ("hidden_dim", "num_layers", "num_heads")}
    assert shape == {"hidden_dim": 48, "num_layers": 1, "num_heads": 6}
    more = [record["model"][name] for name in ("num_kv_heads", "ffn_dim", "vocab_size")]
    assert [*more, record["train"]["seed"]] == [3, 40, 60, 3]


# -- a run ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_prints_a_summary() -> None:
    out = printed(*SHORT, "--tier", "v2")
    for line in (
        r"tier +v2, eager, fp32",
        r"loss +\d\.\d{4} first, \d\.\d{4} last",
        r"speed +[\d,.]+ samples/s, [\d,]+ tokens/s",
        r"live memory +6\.5 MiB \(parameters, gradients and optimizer state\)",
        r"gradients +20 of 20 parameters received one",
    ):
        assert re.search(line, out), line


@pytest.mark.long
def test_json_has_what_is_printed(tmp_path: Path) -> None:
    options = ["--diagnose", "--accumulate", "3", "--max-grad-norm", "0.001"]
    out, record = run_json(tmp_path / "run.json", *options)
    assert record["status"] == "completed"
    assert len(record["losses"]) == len(record["step_seconds"]) == 2
    names = [name for name, _ in TinyLlama(PRESETS["tiny"]).named_parameters()]
    assert record["gradients"] == dict.fromkeys(names, True)
    assert record["versions"]["tinyllama"] == package.__version__
    assert [diagnosis["step"] for diagnosis in record["diagnoses"]] == [1, 2]
    assert record["diagnoses"][0]["ops"][0]["name"] == "embedding"
    assert all(norm > 0.001 for norm in record["gradient_norms"])
    assert re.search(r"batch +3 x 2 x 8 tokens, seed 0\n", out)
    assert re.search(r"clipped +2 of 2 steps, to norm 0\.001 \(it was [\d.]+ to [\d.]+\)\n", out)


@pytest.mark.long
def test_small_memory_and_switches_are_named(tmp_path: Path) -> None:
    fast = run_json(tmp_path / "fast.json", "--tier", "v2")[1]
    out, small = run_json(tmp_path / "small.json", "--tier", "v2", "--memory", "small")
    assert small["losses"] == fast["losses"]
    assert re.search(r"live memory +4\.8 MiB \(parameters and optimizer state\)\n", out)
    options = ["--tier", "v2", "--without", "attention", "--without", "compile"]
    assert run_json(tmp_path / "off.json", *options)[1]["tier"] == "v2-no-attention-compile"


# -- saved and resumed ------------------------------------------------------------------------


@pytest.mark.long
def test_a_resumed_run_takes_its_settings_from_the_checkpoint(tmp_path: Path) -> None:
    """So ``--resume PATH`` alone continues the curve; ``--num-steps`` are added."""
    path = str(tmp_path / "saved")
    options = ["--precision", "bf16", "--learning-rate", "0.01", "--max-grad-norm", "0.5"]
    straight = run_json(tmp_path / "straight.json", *options, "--num-steps", "5")[1]
    run_json(tmp_path / "half.json", *options, "--save", path)
    resume = ("train", "--device", "cpu", "--resume", path, "--num-steps", "3")
    printed(*resume, "--json", tmp_path / "resumed.json")
    resumed = json.loads((tmp_path / "resumed.json").read_text())
    assert resumed["start"] == 2
    assert resumed["losses"] == straight["losses"][2:]
    assert resumed["train"] == {**straight["train"], "num_steps": 3}
    told = ["--resume", path, "--max-grad-norm", "none"]
    assert run_json(tmp_path / "other.json", *told)[1]["train"]["max_grad_norm"] is None


@pytest.mark.long
def test_a_resumed_run_on_text_needs_the_text(tmp_path: Path) -> None:
    text, path = tmp_path / "text", str(tmp_path / "saved")
    text.write_text("to be or not to be")
    assert "text, 18 bytes, 1 files taken" in printed(*SHORT, "--data", text, "--save", path)
    message = refused(*SHORT, "--resume", path)
    assert "was trained on text of 18 bytes: name it with --data" in message
    same = tinyllama(*SHORT, "--resume", path, "--data", text)
    text.write_text("that is the question")
    other = tinyllama(*SHORT, "--resume", path, "--data", text)
    assert (same.status, other.status) == (0, 0)
    assert "note" not in same.err
    assert "note: the data is not what the checkpoint was trained on" in other.err


# -- runs that go wrong -----------------------------------------------------------------------


@pytest.mark.long
def test_lost_gradients_are_shown_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_swiglu_tier() as tier:
        monkeypatch.setitem(TIERS, "v1", tier)
        out, record = run_json(tmp_path / "run.json", status=1)
    assert "NO GRADIENT at 8 of 20 parameters:" in out
    assert "layers.1.w_gate: all zero" in out
    assert record["gradients"]["layers.1.w_gate"] is False


@pytest.mark.long
def test_a_diverging_run_stops_and_names_the_op(tmp_path: Path) -> None:
    options = ["--learning-rate", "1e18", "--num-steps", "9", "--diagnose"]
    out, record = run_json(tmp_path / "run.json", *options, status=1)
    assert (record["status"], len(record["losses"])) == ("failed", 1)
    assert [diagnosis["step"] for diagnosis in record["diagnoses"]] == [1, 2]
    assert re.search(r"failed: the loss of step 2 is nan: the first op whose output is not", out)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = checkpoint.save_file

    def interrupted(*args: Any) -> None:
        signal.raise_signal(number)
        save_file(*args)

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    done = tinyllama(*SHORT, "--save", tmp_path / "saved")
    assert (done.status, done.err) == (130, "tinyllama: interrupted\n")
    assert checkpoint.load(tmp_path / "saved").steps == 2


@pytest.mark.slow("it starts a training run, which imports torch")
@pytest.mark.parametrize(("number", "name"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_a_signal_in_a_real_process(tmp_path: Path, number: str, name: str) -> None:
    saved = tmp_path / "saved"
    argv = [sys.executable, "-m", "tinyllama", *TINY, "--num-steps", "1000000"]
    process = subprocess.Popen(
        [*argv, "--json", str(tmp_path / "run.json"), "--save", str(saved)],
        env={**ENVIRONMENT, "TERM": "xterm", "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        drawn = ""
        while "training" not in drawn:
            character = process.stderr.read(1)
            assert character, f"the run ended by itself: {drawn}"
            drawn += character
        process.send_signal(signal.Signals[number])
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"interrupted: {name} after" in out
    assert "Traceback" not in err
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["status"] == "interrupted"
    saved_run = checkpoint.load(saved)
    assert saved_run.interrupted
    assert saved_run.steps == len(result["losses"]) > 0


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full at the end: the summary and the JSON are there, and the checkpoint too."""
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    there.mkdir()
    elsewhere.mkdir()
    replace = files.os.replace

    def full(source: Path, target: Path) -> None:
        if target == there / "saved":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", full)
    monkeypatch.setattr(files.tempfile, "tempdir", str(elsewhere))
    done = tinyllama(*SHORT, "--save", there / "saved", "--json", there / "run.json")
    assert done.status == 1
    assert len(json.loads((there / "run.json").read_text())["losses"]) == 2
    assert re.search(r"loss +\d\.\d{4} first", done.out)
    (kept,) = elsewhere.glob("tinyllama-kept-*/saved")
    assert f"the new content is in '{kept}'" in done.err
    assert checkpoint.load(kept).steps == 2
    assert [path.name for path in there.iterdir()] == ["run.json"]


# -- the rest ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--version"], 0),
        (["train", "--help"], 0),
        (["check", "nofile.py"], 2),
        (["check", __file__, "--only", "speed"], 2),
        (["train", "--tier", "v9"], 2),
        (["profile", "compare", "none", "none"], 2),
        (["exercise"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_help_and_refusals_load_no_torch(argv: list[str], status: int) -> None:
    code = f"""
import sys
from tinyllama.cli import main
try:
    status = main({argv!r})
except SystemExit as end:
    status = end.code
assert status == {status}, status
assert "torch" not in sys.modules
"""
    start = time.monotonic()
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 10, "under 2 s on an idle machine"


@pytest.mark.long
def test_output_that_nobody_reads_or_that_has_no_place_is_no_traceback() -> None:
    argv = [sys.executable, "-m", "tinyllama", "exercise", "--starter", "rope"]
    for place, said in (("| true", ""), ("> /dev/full", "No space left on device\n")):
        done = ran("bash", "-o", "pipefail", "-c", f"{shlex.join(argv)} {place}")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == bool(said), done.stderr
        assert done.stderr.endswith(said)


@pytest.mark.long
def test_doctor_says_what_runs_here_and_why_the_rest_cannot() -> None:
    nothing = dict.fromkeys(("PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    done = python("-m", "tinyllama", "doctor", env={**ENVIRONMENT, **nothing, "COLUMNS": "160"})
    for line in (
        r"v2 +│ .* │ yes +│ eager; without capture: device graphs need a GPU +│",
        r"compile +│ no: torch.compile needs a C\+\+ compiler",
        r"rocprofv3 +│ no: not on PATH",
    ):
        assert re.search(line, done.stdout), line
