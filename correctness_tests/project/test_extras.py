"""Without the packages of an extra every file of tests is collected; its tests say why they skip.

`pip install -e '.[test]'` brings none of them, and `make test` is to run all the same.
"""

import re

import pytest

from correctness_tests.support.commands import ROOT, python
from tinyllama.harness.machine.parsed import tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    extra: [re.split(r"[^\w-]", requirement)[0] for requirement in needed]
    for extra, needed in PROJECT["optional-dependencies"].items()
    if extra != "test"
}
MODULES = {"nvidia-ml-py": "pynvml", "liger-kernel": "liger_kernel"}  # where names differ
# None in sys.modules: an import of it fails as that of what is not installed.
COLLECT = """
import sys
hidden = sys.argv[1].split()
sys.modules.update(dict.fromkeys(hidden))
import pytest
status = pytest.main(sys.argv[2:])
assert not any(map(sys.modules.get, hidden))
sys.exit(status)
"""


@pytest.mark.slow("it collects all tests twice, in processes of their own")
@pytest.mark.parametrize("without", ["triton", "the rest"])
def test_all_tests_are_collected_without_an_extra(without: str) -> None:
    """Triton is apart: a file that is skipped without it may import more that is missing."""
    alone = without == "triton"
    extras = [names for extra, names in EXTRAS.items() if (extra == "triton") == alone]
    hidden = " ".join(MODULES.get(name, name) for names in extras for name in names)
    words = ["correctness_tests", "--collect-only", "-qq", "--device", "cpu", "-p", "no:xdist"]
    done = python("-c", COLLECT, hidden, *words, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
