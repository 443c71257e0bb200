"""Every command with any values of its options: an exit status and a line, never a traceback.

The commands and their options are those of the parser, so a new one is tried without a word here.
What takes minutes is left out once the arguments were judged: `LEFT_OUT` says what.
"""

import argparse
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="extra 'test' is not installed: it brings hypothesis")

import hypothesis
from hypothesis import strategies as st

from correctness_tests.support.sample_records import plain_record
from tinyllama import cli
from tinyllama.cli import certifying, kernels, summary
from tinyllama.cli.argument_types import file_path
from tinyllama.harness.check import remote
from tinyllama.harness.records import results
from tinyllama.training import train

SUBPARSERS = argparse._SubParsersAction
(COMMANDS,) = (a.choices for a in cli.parser()._actions if isinstance(a, SUBPARSERS))
FEW, MANY = 12, 300
BYTES = 4 * 2**30  # that a command may allocate
GOLDEN = Path(__file__).parents[1] / "model" / "golden" / "version-2.safetensors"

STATUSES = {0, 1, 2, *range(10, 16), 130}
NUMBERS = ["1", "2", "3", "0", "-1", "7", "1.5", "0.01", "3e38", "1e999", "-1e-400", "nan", "", " "]
NUMBERS += ["2147483647", "2147483648", str(2**63), str(10**30), "9" * 5000, "1_0", "\u0663", "0x1"]
NAMES = ["", "cpu", "cuda:99", f"cuda:{10**30}", "meta", "!", "*", "[", "A Card", "small-bf16"]
NAMES += ["v2", "v9", "rms_norm", "attention", "sm_90", "none", "a\0b", "\udcff", "x" * 5000]
NAMES += ["%s {x} [/b]"]
FILES = "text folder pipe dangling loop missing missing/under text/under results record.json"
FILES += " checkpoint damaged nested.json"
PATHS = [f"{{folder}}/{name}" for name in (*FILES.split(), "x" * 256, "\udcff")]
PATHS += ["-", ".", "/", "/dev/null", "/dev/zero", "/dev/full", "/proc/x", "~", "//"]
PATHS += ["", " ", "a\0b"]

# A step of a small model; what is drawn comes later, and replaces it.
SMALL = ["--preset", "tiny", "--batch-size", "2", "--seq-len", "8", "--num-steps", "2"]
SMALL += ["--device", "cpu"]
FIRST = {
    "train": SMALL,
    "profile": ["--print-command", *SMALL],
    "stages": ["--list"],
    "exercise": ["attention-memory"],
}
TOO_LARGE = {"medium", "large"}


def value_of(action: argparse.Action) -> st.SearchStrategy[str]:
    if action.choices is not None:
        return st.sampled_from([*(str(c) for c in action.choices if c not in TOO_LARGE), "nope"])
    if action.type in (file_path, Path):
        return st.sampled_from(PATHS)
    if action.type is None:
        return st.sampled_from(NAMES) | st.text(max_size=5)
    return st.sampled_from(NUMBERS) | st.integers().map(str) | st.floats().map(str)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """The arguments of any command: mostly few options, now and then one that does not exist."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    argv = [name, *FIRST.get(name, [])]
    actions = [a for a in COMMANDS[name]._actions if a.dest != "help"]
    options = [a for a in actions if a.option_strings]
    chosen = draw(st.lists(st.sampled_from(options), max_size=3)) if options else []
    for action in [*(a for a in options if a.required), *chosen]:
        flag = action.option_strings[-1]
        argv.append(flag if action.nargs == 0 else f"{flag}={draw(value_of(action))}")
    for action in (a for a in actions if not a.option_strings):
        count = draw(st.integers(0, 2)) if action.nargs else 1
        argv += [draw(value_of(action)) for _ in range(count)]
    extra = draw(st.sampled_from([[]] * 30 + [["--nope"], ["more"], [""]]))
    return [*argv, *extra]


def filled(folder: Path) -> None:
    """What paths name: good and bad files of every kind."""
    shutil.copy(results.save(plain_record(), folder / "results"), folder / "record.json")
    shutil.copy(GOLDEN, folder / "checkpoint")
    content = bytearray(GOLDEN.read_bytes())
    content[-1000] ^= 1
    (folder / "damaged").write_bytes(content)
    (folder / "text").write_text("to be or not to be, that is the question\n" * 20)
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "folder").mkdir()
    (folder / "folder" / "a.txt").write_text("to be or not to be " * 20)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


@contextmanager
def bounded() -> Iterator[None]:
    """What would allocate more than `BYTES` gets a MemoryError."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes: the work of check, kernels and certify after their arguments were judged;
    of a training all but three steps, and models of more than 1 GiB."""

    def three_steps(record: Any) -> None:
        if record.number % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(remote, "check", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "_rows", lambda *_: iter(()))
    monkeypatch.setattr(certifying, "record", lambda *_: True)
    monkeypatch.setattr(certifying, "show", lambda *_: 0)
    monkeypatch.setattr(summary, "progress_bar", lambda config: nullcontext(three_steps))
    monkeypatch.setattr(train, "memory_bytes", lambda device: 2**30)


def hold(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Run a command in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        filled(Path(folder))
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", folder)
        capsys.readouterr()
        with bounded():
            status = cli.main([word.replace("{folder}", folder) for word in argv])
        _, err = capsys.readouterr()
        assert status in STATUSES
        assert "Traceback" not in err
        said = [line for line in err.splitlines() if not line.startswith("tinyllama: note: ")]
        if status == 2:
            (line,) = said
            assert line.startswith("tinyllama: error: ")
        else:
            assert len(said) <= 1
        left = [path.name for path in Path(folder).rglob(".tinyllama-*")]
        assert not left


@pytest.mark.long
@pytest.mark.usefixtures("left_out")
@pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow("300 commands take minutes"))]
)
def test_no_values_of_options_raise(
    examples: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # of a busy machine
    )
    @hypothesis.given(lines())
    def holds(argv: list[str]) -> None:
        hold(argv, monkeypatch, capsys)

    holds()
