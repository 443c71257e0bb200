"""The programs of docs/FIELD.md print what their comments say, on the releases that they name."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import python
from field import run as field

TEXT = (field.ROOT / "docs" / "FIELD.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\S+ \S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_each_library_of_the_index_has_a_program_for_its_newest_release() -> None:
    newest = field.declared().newest
    assert set(PROGRAMS) == {f"{library} {release}" for library, release in newest.items()}


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
    done = python(str(program), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", PROGRAMS[named], re.MULTILINE)
    assert done.stdout.splitlines() == [one for text in comments for one in text.split(", ")]
