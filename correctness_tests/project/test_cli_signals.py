"""A command that a signal ends, or whose output nobody reads, shows no traceback."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from correctness_tests.support.commands import (
    ENVIRONMENT,
    TINY,
    ran,
)
from tinyllama.training import checkpoint


@pytest.mark.long
def test_output_that_nobody_reads_or_that_has_no_place_is_no_traceback() -> None:
    argv = [sys.executable, "-m", "tinyllama", "exercise", "--starter", "rope"]
    for place, said in (("| true", ""), ("> /dev/full", "No space left on device\n")):
        done = ran("bash", "-o", "pipefail", "-c", f"{shlex.join(argv)} {place}")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == bool(said), done.stderr
        assert done.stderr.endswith(said)


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
