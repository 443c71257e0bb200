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
    SHORT,
    TINY,
    Done,
    ran,
    tinyllama,
)
from tinyllama.training import checkpoint


def test_output_that_nobody_reads_or_that_has_no_place_is_no_traceback() -> None:
    argv = [sys.executable, "-m", "tinyllama", "how", "get_trace.sh"]
    for place, said in (("| true", ""), ("> /dev/full", "No space left on device\n")):
        done = ran("bash", "-o", "pipefail", "-c", f"{shlex.join(argv)} {place}")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == bool(said), done.stderr
        assert done.stderr.endswith(said)


def test_no_file_takes_the_place_of_a_stream_that_is_closed(tmp_path: Path) -> None:
    """A shell closes them with ``>&-``; Python then has none, and the next file has its number."""
    code = "import os, sys; from tinyllama import cli; cli.main(['how', 'get_trace.sh']); "
    code += "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); print('lost', flush=True); "
    code += "os.system('echo lost'); sys.exit(7 if sys.stdout.isatty() or file < 3 else 0)"
    file = tmp_path / "file"
    done = ran("bash", "-c", f"{shlex.join([sys.executable, '-c', code, str(file)])} >&-")
    assert (done.returncode, done.stderr, file.read_text()) == (0, "", "")


def test_ctrl_c_before_there_is_a_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyllama.training.data.TextBytes.__init__", stop)
    done = tinyllama(*SHORT, "--data", "anything")
    assert done == Done(130, "", "tinyllama: interrupted\n")


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
    one = checkpoint.load(saved)
    assert one.interrupted
    assert one.steps == len(result["losses"]) > 0
