"""Kernels of other projects under every check: what docs/FIELD.md, its record and its cases say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from field import run as field

CASES = field.declared()
TEXT = (field.ROOT / "docs" / "FIELD.md").read_text(encoding="utf-8")
CONVENTIONS = ("second derivative", "empty batch", "autocast")  # that no program reproduces
PROGRAMS = dict(re.findall(r"^```python\n# (\S+ \S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def name(case: field.Case) -> str:
    return f"{case.library}-{case.op}"


def release_folder(library: str, release: str) -> Path:
    """The folder of a release; the test is skipped where pip cannot install it."""
    try:
        return field.installed(library, release)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{library} {release} cannot be installed: pip ended with {error.returncode}")


def test_the_record_holds_what_the_cases_declare() -> None:
    record = field.recorded()
    for row, case in zip(record["cases"], CASES, strict=True):
        declared = json.loads(json.dumps(vars(case)))
        assert {key: row[key] for key in declared} == declared, name(case)
        assert case.surprises(row["found"]) == []


def test_a_program_reproduces_everything_that_fails_in_a_newest_release() -> None:
    record = field.recorded()
    newest = {case.library: case.newest for case in CASES}
    for library, release in newest.items():
        program = PROGRAMS.get(f"{library} {release}", "")
        comments = re.findall(r"^ *# ([\w, ]+): ([\w, ]+)$", program, re.MULTILINE)
        reproduced = {
            (op, check)
            for ops, checks in comments
            for op in ops.split(", ")
            for check in checks.split(", ")
        }
        assert reproduced >= {
            (row["op"], check)
            for row in record["cases"]
            if row["library"] == library
            for check in row["found"].get(release, ())
            if check not in CONVENTIONS
        }


@pytest.mark.slow("pip installs the release")
@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_prints_what_its_comments_say(title: str, tmp_path: Path) -> None:
    folder = release_folder(*title.split())
    program = tmp_path / "program.py"
    program.write_text("import torch\n\ntorch.manual_seed(0)\n" + PROGRAMS[title])
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(field.ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", PROGRAMS[title], re.MULTILINE)
    assert done.stdout.splitlines() == [word for text in comments for word in text.split(", ")]


@pytest.mark.slow("every check on kernels of other projects, which pip installs")
@pytest.mark.parametrize("case", CASES, ids=name)
def test_checks_find_what_is_known_of_a_release_and_nothing_else(case: field.Case) -> None:
    pytest.importorskip("triton")
    faults = {
        release: field.checked(case.library, case.op, release_folder(case.library, release))
        for release in case.releases
    }
    assert case.surprises(faults) == []
