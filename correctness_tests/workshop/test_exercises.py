"""The exercises' tables, the starters and their solutions, and the commands of the pages."""

import re
import sys
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import printed, ran, refused
from tinyllama.cli import exercise, main
from tinyllama.harness.check.finding import Candidate, Finding
from tinyllama.harness.check.run import run
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.profiling.block_sizes import LESSON
from tinyllama.workshop import exercises

PAGES = LESSON.parents[1]
ROOT = PAGES.parents[1]
FILES = ("rms_norm", "swiglu", "rope")
OPS_OF = {"rms_norm": "rms_norm", "swiglu": "silu_mul", "rope": "rope"}
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
pytest.importorskip("triton")


def said(path: Path, check: str) -> str:
    """What a check of a file's provider says."""
    return checked(path, (check,))[0].message


def outcomes(path: Path, only: tuple[str, ...]) -> dict[str, str]:
    """The outcome of each check of the provider that a file declares."""
    return {finding.check: finding.outcome.value for finding in checked(path, only)}


def checked(path: Path, only: tuple[str, ...]) -> list[Finding]:
    from tinyllama.ops import OPS

    op = OPS[OPS_OF[path.stem]]
    with providers_restored(OPS.values()):
        load_file(path, Registry())
        return list(run(Candidate(op, op["lesson"]), only))


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_a_starter_is_red_until_its_blanks_are_filled(name: str) -> None:
    starter, solution = (PAGES / kind / f"{name}.py" for kind in ("starters", "solutions"))
    text, right = (path.read_text(encoding="utf-8") for path in (starter, solution))
    body = text.partition("\nimport torch\n")[2]
    assert "____" in body
    pattern = re.escape(body).replace("____", "(.+)")
    assert re.fullmatch(pattern, right.partition("\nimport torch\n")[2]), "they differ elsewhere"
    only = ("outputs", "gradients")
    assert "passed" not in outcomes(starter, only).values()
    first = 1 + text[: text.index("____", text.index(body))].count("\n")
    assert f"{name}.py:{first}: NameError: name '____'" in said(starter, "outputs")
    assert set(outcomes(solution, only).values()) == {"passed"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "right", "wrong", "check"),
    [
        ("rms_norm", "n_elements + eps", "n_elements", "outputs"),
        ("swiglu", "1 + gate * rest", "1 + gate", "gradients"),
        ("rope", "first * sin + second * cos", "second * cos - first * sin", "outputs"),
    ],
)
def test_a_wrong_answer_is_found(
    name: str, right: str, wrong: str, check: str, tmp_path: Path
) -> None:
    text = (PAGES / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong), encoding="utf-8")
    assert outcomes(tmp_path / f"{name}.py", ("outputs", "gradients"))[check] == "failed"


@pytest.mark.slow("every check of three files takes a minute")
@pytest.mark.parametrize("name", FILES)
def test_a_solution_passes_every_check(name: str) -> None:
    """As a participant checks a file, in a process of its own."""
    assert main(["check", str(PAGES / "solutions" / f"{name}.py"), "--device", "cpu"]) == 0


def test_the_command_and_the_functions_have_the_same_names() -> None:
    assert list(exercise.NAMES) == list(exercises.EXERCISES)


def test_transactions_do_not_depend_on_the_block_size() -> None:
    header, *rows = exercises.memory_pattern(torch.device("cpu"))
    assert header[-1] == "in all"
    assert {row[-1] for row in rows} == {"64"}
    assert [row[1] for row in rows] == ["32", "16", "8", "4", "2"]


def test_scores_grow_with_the_square_of_the_length_and_flash_attention_does_not() -> None:
    *_, last = exercises.attention_memory(torch.device("cpu"))
    assert 3.7 < float(last[3]) < 4.0
    assert float(last[4]) == pytest.approx(2.0, abs=0.01)


@pytest.mark.long
def test_each_block_size_is_compiled_and_the_time_needs_a_gpu() -> None:
    rows = printed("exercise", "block-sizes", "--device", "cpu").splitlines()
    assert [row.split()[0] for row in rows[1:]] == [str(block) for block in exercises.BLOCKS]
    assert all(row.endswith("needs a GPU") for row in rows[1:])
    widest = [int(row.split()[3]) for row in rows[1:]]
    assert widest == sorted(widest), "larger blocks allow wider accesses"
    assert widest[0] < widest[-1] == 16


@pytest.mark.slow("kernels are compiled: six seconds")
def test_larger_blocks_of_attention_take_more_registers_until_they_spill() -> None:
    _, *rows = exercises.attention_blocks(torch.device("cpu"))
    sizes = [int(row[0]) * int(row[1]) for row in rows]
    registers, spilled = ([int(row[column]) for row in rows] for column in (2, 3))
    assert sizes == sorted(sizes)
    assert registers[0] < registers[-1]
    assert spilled[0] == 0 < spilled[-1]
    assert {row[-1] for row in rows} == {"needs a GPU"}


@pytest.mark.long
def test_the_picture_of_attentions_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    printed("exercise", "attention-memory", "--picture", path, "--device", "cpu")
    assert path.read_text(encoding="utf-8").count("<svg") == 1
    for name, file, what in (
        ("block-sizes", path, "--picture draws attention-memory, not block-sizes: remove it"),
        ("attention-memory", tmp_path / "none" / "x.svg", "--picture"),
    ):
        assert what in refused("exercise", name, "--picture", file, "--device", "cpu")


def test_both_kernels_of_swiglu_are_right() -> None:
    _, *rows = exercises.swiglu(torch.device("cpu"))
    assert [row[0] for row in rows] == ["naive", "triton"]
    assert all(0 < float(row[1]) < 1e-4 for row in rows)


# -- the pages ----------------------------------------------------------------------------------


def commands() -> list[str]:
    """Every fenced command of the pages, in order."""
    pages_of_exercises = [f"EXERCISE_{number}" for number in range(1, 10)]
    names = ("README", "VERSIONS", *pages_of_exercises, "ANSWERS", "TROUBLESHOOTING")
    pages = [PAGES / f"{name}.md" for name in names]
    assert sorted(pages) == sorted(PAGES.glob("*.md")), "a page is not read"
    blocks = [b for page in pages for b in COMMANDS.findall(page.read_text(encoding="utf-8"))]
    return [line for block in blocks for line in block.splitlines()]


def test_every_exercise_is_on_the_pages() -> None:
    for name in exercise.NAMES:
        assert f"python -m tinyllama exercise {name}" in commands()


@pytest.mark.slow("every command of the pages takes two minutes")
def test_every_command_of_the_pages_runs(tmp_path: Path) -> None:
    """In order, in one folder, as a participant types them; on whatever device there is."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    before = 'export PATH="$PWD:$PATH" PYTHONPATH=' + str(ROOT)
    for command in commands():
        line = f"set -e -o pipefail; {before}; {command}"
        done = ran("bash", "-c", line, cwd=tmp_path, env=None, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, command
