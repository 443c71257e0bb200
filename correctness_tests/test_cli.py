"""The command line, as its users meet it: exit status, what is printed, what is written."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tinyllama
from correctness_tests.faults import dead_swiglu_tier, tier_with
from tinyllama import cli, files
from tinyllama.config import PRESETS, ModelConfig, TrainConfig
from tinyllama.model import TinyLlama
from tinyllama.ops import OPS
from tinyllama.tiers import TIERS

TINY = ["train", "--preset", "tiny", "--batch-size", "2", "--seq-len", "8", "--device", "cpu"]
SHORT = [*TINY, "--num-steps", "2"]
ROOT = Path(tinyllama.__file__).parents[1]


def record_of(path: Path, *argv: str, status: int = 0) -> dict:
    """The JSON of a short run."""
    assert cli.main([*SHORT, *argv, "--json", str(path)]) == status
    return json.loads(path.read_text())


def python(*argv: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, check=False
    )


# -- a run ------------------------------------------------------------------------------------


def test_a_run_prints_progress_and_summary(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way of being told that this is a terminal
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main([*SHORT, "--tier", "v2"]) == 0
    out, err = (re.sub(r"\x1b[^a-zA-Z]*[a-zA-Z]", "", text) for text in capsys.readouterr())
    assert re.search(r"2/2 loss \d\.\d{4} +[\d,.]+ samples/s +[\d,]+ tokens/s +[\d.]+ MiB", err)
    for line in (
        r"tier +v2, eager, fp32",
        r"data +random tokens",
        r"steps +1 to 2",
        r"loss +\d\.\d{4} first, \d\.\d{4} last",
        r"speed +[\d,.]+ samples/s, [\d,]+ tokens/s",
        r"phases +forward [\d.]+ ms, backward [\d.]+ ms, optimizer [\d.]+ ms",
        r"live memory +6\.5 MiB \(parameters, gradients and optimizer state\)",
        r"peak memory +[\d,.]+ MiB \(resident set of the process\)",
        r"gradients +20 of 20 parameters received one",
        r"versions +.*python .*torch ",
    ):
        assert re.search(line, out), line


def test_json_holds_what_is_printed(tmp_path):
    record = record_of(tmp_path / "run.json", "--seed", "3", "--diagnose")
    assert record["status"] == "completed"
    assert len(record["losses"]) == len(record["step_seconds"]) == 2
    assert record["model"]["hidden_dim"] == 128
    assert record["train"]["seed"] == 3
    assert record["phase_seconds"].keys() == {"forward", "backward", "optimizer"}
    names = [name for name, _ in TinyLlama(PRESETS["tiny"]).named_parameters()]
    assert record["gradients"] == dict.fromkeys(names, True)
    assert record["memory"]["live_bytes"] > 0
    assert record["versions"]["tinyllama"] == tinyllama.__version__
    assert [found["step"] for found in record["diagnoses"]] == [1, 2]
    first = record["diagnoses"][0]["ops"][0]
    assert first["name"] == "embedding"
    assert first["output"].keys() == {"minimum", "maximum", "std", "nonfinite"}


def test_without_options_the_settings_are_the_documents():
    args = cli._parser().parse_args(["train"])
    assert cli._settings(args, None) == (ModelConfig(), TrainConfig())


def test_options_override_the_preset(tmp_path):
    options = ["--hidden-dim", "48", "--num-layers", "1", "--num-heads", "6", "--num-kv-heads", "3"]
    model = record_of(tmp_path / "run.json", *options)["model"]
    assert (model["hidden_dim"], model["num_layers"]) == (48, 1)
    assert (model["num_heads"], model["num_kv_heads"], model["ffn_dim"]) == (6, 3, 256)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ([], "fp32"),
        (["--use-amp"], "bf16"),
        (["--precision", "fp16"], "fp16"),
        (["--use-amp", "--precision", "bf16"], "bf16"),
    ],
)
def test_amp_is_bf16(tmp_path, options, precision):
    assert record_of(tmp_path / "run.json", *options)["train"]["precision"] == precision


def test_parts_of_a_tier_can_be_switched_off(tmp_path):
    options = ["--tier", "v2", "--without", "attention", "--without", "compile"]
    assert record_of(tmp_path / "run.json", *options)["tier"] == "v2-no-attention-compile"


def test_it_trains_on_text(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("to be or not to be")
    (tmp_path / "corpus" / ".hidden").write_text("that is the question")
    record = record_of(tmp_path / "run.json", "--data", str(tmp_path / "corpus"))
    assert record["batches"]["files_taken"] == record["batches"]["files_left_out"] == 1
    assert (
        "data         text, 18 bytes, 1 files taken, 1 files left out\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--diagnose"], [1, 7]),
        (["--diagnose-every", "3"], [1, 3, 6, 7]),
        ([], []),
    ],
)
def test_diagnosis_shows_the_steps_asked_for(capsys, options, steps):
    assert cli.main([*TINY, "--num-steps", "7", *options]) == 0
    out = capsys.readouterr().out
    titles = re.findall(r"Step (\d+), loss [\d.]+, run again .* uncompiled and uncaptured", out)
    assert [int(step) for step in titles] == steps
    assert out.count("layers.1.add_rms_norm.sum") == len(steps)


# -- saved and resumed ------------------------------------------------------------------------


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(tmp_path):
    """So ``--resume PATH`` alone continues the curve; ``--num-steps`` are added."""
    path = str(tmp_path / "saved")
    options = ["--precision", "bf16", "--learning-rate", "0.01", "--seed", "7"]
    whole = record_of(tmp_path / "whole.json", *options, "--num-steps", "5")
    record_of(tmp_path / "half.json", *options, "--save", path)
    resume = ["train", "--device", "cpu", "--resume", path, "--num-steps", "3"]
    assert cli.main([*resume, "--json", str(tmp_path / "resumed.json")]) == 0
    resumed = json.loads((tmp_path / "resumed.json").read_text())
    assert resumed["start"] == 2
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["train"] == {**whole["train"], "num_steps": 3}


def test_text_must_be_named_again_and_other_text_is_said(tmp_path, capsys):
    text, path = tmp_path / "text", str(tmp_path / "saved")
    text.write_text("to be or not to be")
    assert cli.main([*SHORT, "--data", str(text), "--save", path]) == 0
    assert cli.main([*SHORT, "--resume", path]) == 2
    assert "was trained on text of 18 bytes: name it with --data" in capsys.readouterr().err
    assert cli.main([*SHORT, "--resume", path, "--data", str(text)]) == 0
    assert "note" not in capsys.readouterr().err
    text.write_text("that is the question")
    assert cli.main([*SHORT, "--resume", path, "--data", str(text)]) == 0
    note = "tinyllama: note: the data is not what the checkpoint was trained on"
    assert note in capsys.readouterr().err


# -- runs that go wrong -----------------------------------------------------------------------


def test_lost_gradients_are_shown_loudly(tmp_path, monkeypatch, capsys):
    with dead_swiglu_tier() as tier:
        monkeypatch.setitem(TIERS, "dead", tier)
        record = record_of(tmp_path / "run.json", "--tier", "dead", status=1)
    out = capsys.readouterr().out
    assert "12 of 20 parameters received one" in out
    assert "NO GRADIENT at 8 of 20 parameters:" in out
    assert "layers.1.w_gate: all zero" in out
    assert record["gradients"]["layers.1.w_gate"] is False


def test_a_diverging_run_stops_and_says_where(tmp_path, capsys):
    options = ["--learning-rate", "1e18", "--num-steps", "9"]
    record = record_of(tmp_path / "run.json", *options, status=1)
    assert record["status"] == "failed"
    assert len(record["losses"]) < 9
    reason = r"failed: the loss of step \d is nan: the first op whose output is not finite is \w+"
    assert re.search(reason, capsys.readouterr().out)


def test_ctrl_c_prints_and_writes_what_was_done(tmp_path, monkeypatch, capsys):
    from tinyllama import summary

    def stop(self, record) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(summary.ProgressBar, "update", stop)
    options = ["--num-steps", "9", "--save", str(tmp_path / "saved")]
    record = record_of(tmp_path / "run.json", *options, status=130)
    out = capsys.readouterr().out
    assert re.search(r"steps +1 to 1\n", out)
    assert "interrupted: Ctrl-C after 1 of 9 steps" in out
    assert record["status"] == "interrupted"
    assert len(record["losses"]) == 1
    monkeypatch.undo()
    assert cli.main([*SHORT, "--resume", str(tmp_path / "saved")]) == 0


def test_ctrl_c_in_a_real_process(tmp_path):
    argv = [sys.executable, "-m", "tinyllama", *TINY, "--num-steps", "1000000"]
    process = subprocess.Popen(
        [*argv, "--json", str(tmp_path / "run.json"), "--data", str(ROOT / "tinyllama")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    drawn = ""
    while "training" not in drawn:
        drawn += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: Ctrl-C after" in out
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "interrupted"


# -- values that cannot be used ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-heads 7", "hidden_dim 128 does not divide by num_heads 7: change one of them"),
        ("--num-kv-heads 3", "num_heads 4 does not divide by num_kv_heads 3: change one of them"),
        ("--seq-len 0", "seq_len is 0: use a whole number of at least 1"),
        ("--batch-size -1", "batch_size is -1: use a whole number of at least 1"),
        ("--num-steps 0", "num_steps is 0: use a whole number of at least 1"),
        ("--num-steps ten", "argument --num-steps: 'ten' is not a whole number: use one"),
        ("--seed -1", "seed is -1: use a whole number from 0"),
        ("--learning-rate fast", "argument --learning-rate: 'fast' is not a number: use one like"),
        ("--learning-rate nan", "learning_rate is nan: use a finite number"),
        ("--learning-rate -0.1", "learning_rate is -0.1: use a finite number that is not negative"),
        ("--tier v9", "tier 'v9' does not exist: use one of v1, v2"),
        ("--without speed", "tier v1 has no switch 'speed': use one of"),
        ("--preset huge", "argument --preset: invalid choice: 'huge'"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--precision tf32", "precision tf32 is not there on cpu: "),
        ("--use-amp --precision fp32", "--use-amp means --precision bf16, and --precision is fp32"),
        ("--device tpu", "device 'tpu' is unknown: use cpu, cuda or cuda:N"),
        ("--device cuda:99", "device 'cuda:99' is not there: torch sees"),
        ("--data {tmp}/none", "data '{tmp}/none' does not exist: name a text file or a folder"),
        ("--data {tmp}/empty", "data '{tmp}/empty' has 0 bytes of text"),
        ("--data {tmp}/short", "data '{tmp}/short' has 5 bytes of text"),
        ("--resume {tmp}/none", "checkpoint '{tmp}/none' does not exist: name a file that --save"),
        ("--resume {tmp}/short", "checkpoint '{tmp}/short' is not a readable safetensors file"),
        (
            "--resume {tmp}/other",
            "checkpoint '{tmp}/other' has hidden_dim 32, the model 128: leave",
        ),
        ("--save {tmp}/none/x", "--save '{tmp}/none/x': no folder '{tmp}/none'; make it first"),
        ("--save {tmp}", "--save '{tmp}' is a folder: name a file in it"),
        ("--json {tmp}/none/x", "--json '{tmp}/none/x': no folder '{tmp}/none'; make it first"),
        ("--diagnose-every 0", "--diagnose-every is 0: use a whole number of at least 1"),
        ("--epochs 3", "unrecognized arguments: --epochs 3 (see tinyllama --help)"),
        ("--batch-size 100000000000000", "use a smaller model or batch"),
    ],
    ids=lambda value: value.split(" {tmp}")[0] if value.startswith("--") else "",
)
def test_a_bad_value_is_one_line_and_status_2(tmp_path, capsys, options, message):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("abcde")
    narrow = ["--hidden-dim", "32", "--save", str(tmp_path / "other")]
    if "other" in options:
        assert cli.main([*SHORT, *narrow]) == 0
        capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    outputs = ["--save", str(tmp_path / "saved"), "--json", str(tmp_path / "run.json")]
    assert cli.main([*SHORT, *outputs, *options.format(tmp=tmp_path).split()]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("tinyllama: error: ")
    assert message.format(tmp=tmp_path) in line
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--save", "--json"])
def test_a_folder_that_is_not_writable_is_refused_before_training(
    tmp_path, monkeypatch, capsys, option
):
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path) != tmp_path)
    assert cli.main([*SHORT, option, str(tmp_path / "file")]) == 2
    assert f"folder '{tmp_path}' is not writable" in capsys.readouterr().err


def test_a_machine_without_triton_is_told_how_to_get_it(monkeypatch, capsys):
    eager = OPS["rms_norm"]["eager"].call
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with tier_with("rms_norm", eager, requires=("triton",)) as tier:
        monkeypatch.setitem(TIERS, "needy", tier)
        assert cli.main([*SHORT, "--tier", "needy"]) == 2
    assert "needs triton: triton is not installed (pip install" in capsys.readouterr().err


def test_no_command_is_an_error(capsys):
    assert cli.main([]) == 2
    assert "tinyllama: error: the following arguments are required" in capsys.readouterr().err


def test_a_bad_value_in_a_real_process():
    done = python("-m", "tinyllama", "train", "--num-heads", "7")
    assert done.returncode == 2
    assert done.stderr == (
        "tinyllama: error: hidden_dim 512 does not divide by num_heads 7: change one of them\n"
    )


# -- the rest ---------------------------------------------------------------------------------


def test_help_and_version_load_no_torch():
    code = """
import sys
from tinyllama.cli import main
for argv in (["--version"], ["--help"], ["train", "--help"]):
    try:
        main(argv)
    except SystemExit as end:
        assert end.code == 0
assert "torch" not in sys.modules
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"tinyllama {tinyllama.__version__}" in done.stdout
    assert "steps of this run; with --resume they are added to those done" in " ".join(
        done.stdout.split()
    )


def test_doctor_says_what_runs_here_and_why_the_rest_cannot(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in (
        r"torch +│ \d",
        r"v1 +│ PyTorch baseline +│ yes",
        r"v2 +│ .* │ yes",
        r"capture +│ no: device graphs need a GPU",
        r"compile +│ no: torch.compile needs a C\+\+ compiler",
        r"rocprofv3 +│ no: not on PATH",
        r"ncu +│ no: not on PATH",
    ):
        assert re.search(line, out), line


def test_the_loss_starts_at_that_of_guessing(tmp_path):
    assert record_of(tmp_path / "run.json")["losses"][0] == pytest.approx(math.log(1000), rel=0.02)
