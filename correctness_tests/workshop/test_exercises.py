"""The exercises' tables, the starters and their solutions, and the commands of the page."""

import re
import sys
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ROOT, printed, ran, refused, tinyllama
from tinyllama.cli import exercise
from tinyllama.workshop import blanks, exercises

pytest.importorskip("triton")
PAGE = ROOT / "docs" / "workshop.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) for name in ("rms_norm", "swiglu")] + ["rope"],
)
def test_unfilled_starter_reports_its_blanks_and_nothing_else(name: str, tmp_path: Path) -> None:
    text = printed("exercise", "--starter", name)
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if "____" in line]
    message = refused("check", file, "--device", "cpu")
    assert re.search(rf"{name}\.py has \d+ blanks, the first in line {lines[1]}: ", message)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "right", "wrong", "check"),
    [
        ("rms_norm", "n_elements + eps", "n_elements", "outputs"),
        ("swiglu", "1 + gate * rest", "1 + gate", "gradients"),
        ("rope", "first * sin + second * cos", "second * cos - first * sin", "outputs"),
        ("ultra", "if grads[1] is not None:", "if False:", "gradients"),
    ],
)
def test_wrong_answer_fails_its_check(
    name: str, right: str, wrong: str, check: str, tmp_path: Path
) -> None:
    file, text = tmp_path / f"{name}.py", blanks.solution(name)
    assert right in text
    file.write_text(text.replace(right, wrong))
    done = tinyllama("check", file, "--only", check, "--device", "cpu")
    assert done.status == 1
    assert re.search(rf"lesson: {check}: wrong result in ", done.out)


@pytest.mark.long
def test_check_finds_faults_of_open_exercise(tmp_path: Path) -> None:
    """The starter has no backward pass, and hides that its kernel is never launched."""
    file, text = tmp_path / "ultra.py", blanks.solution("ultra")
    file.write_text(blanks.starter("ultra"))
    assert "gradients" in tinyllama("check", file, "--only", "gradients", "--device", "cpu").out
    launch = "fused_kernel[grid](x, residual, weight, y, total, rstd, D, eps, BLOCK=block)"
    assert launch in text
    file.write_text(text.replace(launch, "total.copy_(x + residual)"))
    done = tinyllama("check", file, "--only", "kernel launched", "--device", "cpu")
    assert (done.status, "kernel launched" in done.out) == (1, True)


@pytest.mark.slow("every check of four files takes a minute")
@pytest.mark.parametrize("name", blanks.NAMES)
def test_solution_passes_every_check(name: str) -> None:
    file = blanks.HERE / "solutions" / f"{name}.py"
    assert tinyllama("check", file, "--device", "cpu").status == 0


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    text = printed("exercise", "attention-memory", "--device", "cpu")
    *_, eager, flash = text.splitlines()[len(exercises.LENGTHS)].split()
    assert 3.7 < float(eager) < 4.0
    assert float(flash) == pytest.approx(2.0, abs=0.01)
    assert "twice the tokens" in text


@pytest.mark.long
def test_block_sizes_are_those_of_a_participants_file(tmp_path: Path) -> None:
    file = tmp_path / "rms_norm.py"
    file.write_text(blanks.solution("rms_norm"))
    rows = printed("exercise", "block-sizes", "--file", file, "--device", "cpu").splitlines()
    assert rows == printed("exercise", "block-sizes", "--device", "cpu").splitlines()
    columns = list(zip(*(row.split() for row in rows[1:-1]), strict=True))
    assert columns[:3] == [
        ("64", "128", "256", "512", "1024"),
        ("32", "16", "8", "4", "2"),
        ("64",) * 5,
    ]
    assert all(row.endswith("needs a GPU") for row in rows[1:-1])
    widest = list(map(int, columns[5]))
    assert widest == sorted(widest), "larger blocks allow wider accesses"
    file.write_text(blanks.starter("rms_norm"))
    message = refused("exercise", "block-sizes", "--file", file, "--device", "cpu")
    assert "rms_norm.py has" in message
    assert "blanks" in message


@pytest.mark.slow("kernels are compiled: six seconds")
def test_larger_blocks_of_attention_take_more_registers_until_they_spill() -> None:
    _, *rows = exercises.attention_blocks(CPU)
    registers, spilled = ([int(row[column]) for row in rows] for column in (2, 3))
    assert registers[0] < registers[-1]
    assert spilled[0] == 0 < spilled[-1]


def test_both_kernels_of_swiglu_are_right() -> None:
    _, *rows = exercises.swiglu(CPU)
    assert [row[0] for row in rows] == ["naive", "triton"]
    assert all(0 < float(row[1]) < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "one of the arguments NAME --starter --solution is required"),
        (["block-sizes", "--starter", "rope"], "--starter: not allowed with argument NAME"),
        (["swiglu", "--file", "x.py"], "--file is for block-sizes"),
    ],
)
def test_options_that_do_not_fit_are_one_error(options: list[str], reason: str) -> None:
    assert reason in refused("exercise", *options)


# -- the page -----------------------------------------------------------------------------------


def commands() -> list[str]:
    """Every fenced command of the page, in order."""
    blocks = COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.splitlines()]


def test_every_exercise_is_on_the_page() -> None:
    for name in exercise.NAMES:
        assert any(f"tinyllama exercise {name}" in command for command in commands()), name


@pytest.mark.slow("every command of the page takes two minutes")
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    """In order, in one folder, as a participant types them; on whatever device there is."""
    (tmp_path / "tinyllama").write_text(f'#!/bin/sh\nexec {sys.executable} -m tinyllama "$@"\n')
    (tmp_path / "tinyllama").chmod(0o755)
    before = f'export PATH="$PWD:$PATH" PYTHONPATH={ROOT}'
    for command in commands():
        line = f"set -e -o pipefail; {before}; {command}"
        done = ran("bash", "-c", line, cwd=tmp_path, env=None, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, command
