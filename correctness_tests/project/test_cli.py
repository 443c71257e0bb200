"""The command line, as its users meet it: exit status, what is printed, what is written."""

import errno
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import tinyllama as package
from correctness_tests.support.commands import (
    SHORT,
    TINY,
    printed,
    python,
    refused,
    tinyllama,
)
from correctness_tests.support.faults import dead_swiglu_tier
from tinyllama import cli
from tinyllama.cli import train
from tinyllama.cli.summary import ProgressBar
from tinyllama.harness.machine import files
from tinyllama.model.config import PRESETS
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS
from tinyllama.training import checkpoint
from tinyllama.training.train import StepRecord


def shown(path: Path, *argv: str, status: int = 0) -> tuple[str, dict]:
    """What a short run prints, and its JSON."""
    done = tinyllama(*SHORT, *argv, "--json", path)
    assert done.status == status, done.err
    return done.out, json.loads(path.read_text())


def record_of(path: Path, *argv: str, status: int = 0) -> dict:
    return shown(path, *argv, status=status)[1]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["gate", "--against", "main", "--tree", ""], "tree"),
        (["gate", "--against", ""], "against"),
        (["gate", "--against", "main", "--judge", ""], "judge"),
        (["gate", "--against", "main", "--op", "a", "--op", ""], "op"),
        (["tune", "--show", "--chip", ""], "chip"),
        (["report", "--device", ""], "device"),
        (["how", ""], "name"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_an_empty_text_is_an_error(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a variable that is not set: it does not count as an option that is not given."""
    assert cli.main(argv) == cli.BAD_VALUE
    assert f"error: {name} is empty: give a value, or leave it out" in capsys.readouterr().err


# -- a run ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_prints_progress_and_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.long
def test_json_holds_what_is_printed(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run.json", "--seed", "3", "--diagnose")
    assert record["status"] == "completed"
    assert len(record["losses"]) == len(record["step_seconds"]) == 2
    assert record["model"]["hidden_dim"] == 128
    assert record["train"]["seed"] == 3
    assert record["phase_seconds"].keys() == {"forward", "backward", "optimizer"}
    names = [name for name, _ in TinyLlama(PRESETS["tiny"]).named_parameters()]
    assert record["gradients"] == dict.fromkeys(names, True)
    assert record["memory"]["live_bytes"] > 0
    assert record["versions"]["tinyllama"] == package.__version__
    assert [diagnosis["step"] for diagnosis in record["diagnoses"]] == [1, 2]
    first = record["diagnoses"][0]["ops"][0]
    assert first["name"] == "embedding"
    assert first["output"].keys() == {"minimum", "maximum", "std", "nonfinite"}


def test_options_override_the_preset(tmp_path: Path) -> None:
    options = ["--hidden-dim", "48", "--num-layers", "1", "--num-heads", "6", "--num-kv-heads", "3"]
    model = record_of(tmp_path / "run.json", *options)["model"]
    assert (model["hidden_dim"], model["num_layers"]) == (48, 1)
    assert (model["num_heads"], model["num_kv_heads"], model["ffn_dim"]) == (6, 3, 256)


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (["--num-heads", "16", "--hidden-dim", "1024"], (16, 8)),  # the documents' medium
        (["--num-heads", "16", "--num-kv-heads", "4"], (16, 4)),
        (["--preset", "large"], (32, 8)),
        (["--preset", "large", "--num-heads", "16"], (16, 8)),
        (["--num-heads", "3", "--num-kv-heads", "1", "--hidden-dim", "48"], (3, 1)),
    ],
)
def test_key_heads_are_half_of_the_heads_that_are_given(
    options: list[str], heads: tuple[int, int]
) -> None:
    model, _ = train.settings(cli.parser().parse_args(["train", *options]), None)
    assert (model.num_heads, model.num_kv_heads) == heads


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ([], "fp32"),
        (["--use-amp"], "bf16"),
        (["--precision", "fp16"], "fp16"),
        (["--use-amp", "--precision", "bf16"], "bf16"),
    ],
)
def test_amp_is_bf16(tmp_path: Path, options: list[str], precision: str) -> None:
    assert record_of(tmp_path / "run.json", *options)["train"]["precision"] == precision


@pytest.mark.long
def test_parts_of_a_tier_can_be_switched_off(tmp_path: Path) -> None:
    options = ["--tier", "v2", "--without", "attention", "--without", "compile"]
    assert record_of(tmp_path / "run.json", *options)["tier"] == "v2-no-attention-compile"


@pytest.mark.long
def test_clipping_and_accumulation(tmp_path: Path) -> None:
    options = ["--accumulate", "3", "--max-grad-norm", "0.001"]
    out, record = shown(tmp_path / "run.json", *options)
    assert (record["train"]["accumulate"], record["train"]["max_grad_norm"]) == (3, 0.001)
    assert all(norm > 0.001 for norm in record["gradient_norms"])
    assert re.search(r"batch +3 x 2 x 8 tokens, seed 0\n", out)
    assert re.search(r"clipped +2 of 2 steps, to norm 0\.001 \(it was [\d.]+ to [\d.]+\)\n", out)


@pytest.mark.long
def test_small_memory(tmp_path: Path) -> None:
    fast = record_of(tmp_path / "fast.json", "--tier", "v2")
    out, small = shown(tmp_path / "small.json", "--tier", "v2", "--memory", "small")
    assert small["losses"] == fast["losses"]
    assert (fast["plan"], small["plan"]) == ("eager", "small-memory")
    assert re.search(r"tier +v2, small-memory, fp32\n", out)
    assert re.search(r"live memory +4\.8 MiB \(parameters and optimizer state\)\n", out)


@pytest.mark.long
def test_it_trains_on_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("to be or not to be")
    (tmp_path / "corpus" / ".hidden").write_text("that is the question")
    out, record = shown(tmp_path / "run.json", "--data", str(tmp_path / "corpus"))
    assert record["batches"]["files_taken"] == record["batches"]["files_left_out"] == 1
    assert "data         text, 18 bytes, 1 files taken, 1 files left out\n" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "steps"),
    [(["--diagnose"], [1, 7]), (["--diagnose-every", "3"], [1, 3, 6, 7]), ([], [])],
)
def test_diagnosis_shows_the_steps_asked_for(options: list[str], steps: list[int]) -> None:
    out = printed(*TINY, "--num-steps", "7", *options)
    titles = re.findall(r"Step (\d+), loss [\d.]+, run again .* uncompiled and uncaptured", out)
    assert [int(step) for step in titles] == steps
    assert out.count("layers.1.add_rms_norm.sum") == len(steps)


# -- saved and resumed ------------------------------------------------------------------------


@pytest.mark.long
def test_a_resumed_run_takes_its_settings_from_the_checkpoint(tmp_path: Path) -> None:
    """So ``--resume PATH`` alone continues the curve; ``--num-steps`` are added."""
    path = str(tmp_path / "saved")
    options = ["--precision", "bf16", "--learning-rate", "0.01", "--seed", "7"]
    uninterrupted = record_of(tmp_path / "whole.json", *options, "--num-steps", "5")
    record_of(tmp_path / "half.json", *options, "--save", path)
    resume = ("train", "--device", "cpu", "--resume", path, "--num-steps", "3")
    printed(*resume, "--json", tmp_path / "resumed.json")
    resumed = json.loads((tmp_path / "resumed.json").read_text())
    assert resumed["start"] == 2
    assert resumed["losses"] == uninterrupted["losses"][2:]
    assert resumed["train"] == {**uninterrupted["train"], "num_steps": 3}


@pytest.mark.long
def test_a_resumed_run_keeps_its_step_until_told_otherwise(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    record_of(tmp_path / "a.json", "--accumulate", "2", "--max-grad-norm", "0.5", "--save", path)
    resume = ["--resume", path]
    settings = record_of(tmp_path / "b.json", *resume)["train"]
    assert (settings["accumulate"], settings["max_grad_norm"]) == (2, 0.5)
    options = [*resume, "--accumulate", "1", "--max-grad-norm", "none", "--memory", "small"]
    assert record_of(tmp_path / "c.json", *options)["train"]["max_grad_norm"] is None


@pytest.mark.long
def test_text_must_be_named_again_and_other_text_is_said(tmp_path: Path) -> None:
    text, path = tmp_path / "text", str(tmp_path / "saved")
    text.write_text("to be or not to be")
    printed(*SHORT, "--data", text, "--save", path)
    said = refused(*SHORT, "--resume", path)
    assert "was trained on text of 18 bytes: name it with --data" in said
    same = tinyllama(*SHORT, "--resume", path, "--data", text)
    text.write_text("that is the question")
    changed = tinyllama(*SHORT, "--resume", path, "--data", text)
    assert (same.status, changed.status) == (0, 0)
    assert "note" not in same.err
    assert "tinyllama: note: the data is not what the checkpoint was trained on" in changed.err


# -- runs that go wrong -----------------------------------------------------------------------


@pytest.mark.long
def test_lost_gradients_are_shown_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_swiglu_tier() as tier:
        monkeypatch.setitem(TIERS, "dead", tier)
        out, record = shown(tmp_path / "run.json", "--tier", "dead", status=1)
    assert "12 of 20 parameters received one" in out
    assert "NO GRADIENT at 8 of 20 parameters:" in out
    assert "layers.1.w_gate: all zero" in out
    assert record["gradients"]["layers.1.w_gate"] is False


@pytest.mark.long
def test_a_diverging_run_stops_and_says_where(tmp_path: Path) -> None:
    options = ["--learning-rate", "1e18", "--num-steps", "9", "--diagnose"]
    out, record = shown(tmp_path / "run.json", *options, status=1)
    assert record["status"] == "failed"
    assert len(record["losses"]) == 1
    assert [diagnosis["step"] for diagnosis in record["diagnoses"]] == [1, 2]
    assert record["diagnoses"][1]["loss"] is None
    assert "Step 2, loss not finite, run again for this table" in out
    assert re.search(
        r"failed: the loss of step 2 is nan: the first op whose output is not finite is \w+", out
    )


@pytest.mark.long
def test_ctrl_c_prints_and_writes_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyllama.cli import summary

    def stop(self: ProgressBar, record: StepRecord) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(summary.ProgressBar, "update", stop)
    options = ["--num-steps", "9", "--save", str(tmp_path / "saved")]
    out, record = shown(tmp_path / "run.json", *options, status=130)
    assert re.search(r"steps +1 to 1\n", out)
    assert "interrupted: Ctrl-C after 1 of 9 steps" in out
    assert record["status"] == "interrupted"
    assert len(record["losses"]) == 1
    monkeypatch.undo()
    printed(*SHORT, "--resume", tmp_path / "saved")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_checkpoint_is_written_waits_for_it(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file, before = checkpoint.save_file, signal.getsignal(number)

    def interrupted(*args: Any) -> None:
        signal.raise_signal(number)
        save_file(*args)

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    done = tinyllama(*SHORT, "--save", tmp_path / "saved")
    assert (done.status, done.err) == (130, "tinyllama: interrupted\n")
    assert checkpoint.load(tmp_path / "saved").steps == 2
    assert signal.getsignal(number) is before


@pytest.mark.long
def test_a_run_whose_checkpoint_cannot_be_written_is_shown_and_kept(
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
    (copy,) = elsewhere.glob("tinyllama-kept-*/saved")
    assert done.err == (
        f"tinyllama: error: '{there}/saved' cannot be written: No space left on device; what was "
        f"there before is unchanged, and the new content is in '{copy}': free some space, or name "
        "another place\n"
    )
    assert checkpoint.load(copy).steps == 2
    assert [path.name for path in there.iterdir()] == ["run.json"]


# -- the rest ---------------------------------------------------------------------------------


@pytest.mark.long
def test_help_and_version_load_no_torch() -> None:
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
    assert f"tinyllama {package.__version__}" in done.stdout
    assert "steps of this run; with --resume they are added to those done" in " ".join(
        done.stdout.split()
    )


def test_doctor_says_what_runs_here_and_why_the_rest_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = printed("doctor")
    for line in (
        r"torch +│ \d",
        r"v1 +│ PyTorch baseline +│ yes +│ eager +│",
        r"v2 +│ .* │ yes +│ eager; without capture: device graphs need a GPU +│",
        r"capture +│ no: device graphs need a GPU",
        r"compile +│ no: torch.compile needs a C\+\+ compiler",
        r"rocprofv3 +│ no: not on PATH",
        r"ncu +│ no: not on PATH",
    ):
        assert re.search(line, out), line
