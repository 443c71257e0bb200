"""The programs of docs/FIELD.md print what their comments say, on the releases that they name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from field import run as field

TEXT = (field.ROOT / "docs" / "FIELD.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\S+ \S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_each_library_of_the_index_has_a_program_for_its_newest_release() -> None:
    newest = field.declared().newest
    assert set(PROGRAMS) == {f"{library} {release}" for library, release in newest.items()}


def reproduced(library: str, release: str) -> set[tuple[str, str]]:
    """The ops and checks that a program's comments name."""
    comments = re.findall(r"^ *# ([\w, ]+): ([\w, ]+)$", PROGRAMS[f"{library} {release}"], re.M)
    return {(op, check) for of, by in comments for op in of.split(", ") for check in by.split(", ")}


def test_everything_that_fails_in_a_newest_release_is_reproduced() -> None:
    record, newest = field.recorded(), field.declared().newest
    for library, release in newest.items():
        rows = [row for row in record["cases"] if row["library"] == library]
        failing = {(row["op"], check) for row in rows for check in row["found"].get(release, ())}
        rows = [row for row in record["kernels"] if row["library"] == library]
        failing |= {(row["op"], check) for row in rows for check in row["found"]}
        assert reproduced(library, release) == failing


@pytest.mark.slow("pip installs the release")
@pytest.mark.parametrize("named", PROGRAMS)
def test_a_program_prints_what_it_says(named: str, tmp_path: Path) -> None:
    library, release = named.split()
    try:
        folder = field.installed(library, release, field.CACHE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{named} cannot be installed: pip ended with {error.returncode}")
    path = os.pathsep.join([str(folder), str(field.ROOT)])
    program = tmp_path / "program.py"
    program.write_text("import torch\n\ntorch.manual_seed(0)\n" + PROGRAMS[named])
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", PROGRAMS[named], re.MULTILINE)
    assert done.stdout.splitlines() == [one for text in comments for one in text.split(", ")]
