"""Without the packages of an extra every file of tests is collected; its tests say why they skip.

`pip install -e '.[test]'` brings none of them, and `make test` is to run all the same.
"""

import re
import subprocess
import sys

import pytest

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from tinyllama.harness.machine.parsed import tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    extra: [re.split(r"[^\w-]", requirement)[0] for requirement in needed]
    for extra, needed in PROJECT["optional-dependencies"].items()
    if extra != "test"
}
MODULES = {"nvidia-ml-py": "pynvml", "liger-kernel": "liger_kernel"}  # where names differ
COLLECT = """
import sys

import pytest

hidden = set(sys.argv[1].split())


class Others:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next(filter(None, specs), None)

    def invalidate_caches(self):
        pass

    def find_distributions(self, context):
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(context)


sys.meta_path[:] = [Others(sys.meta_path[:])]
assert not hidden & sys.modules.keys()
status = pytest.main(sys.argv[2:])
assert not hidden & sys.modules.keys()
sys.exit(status)
"""


def collected(*hidden: str) -> subprocess.CompletedProcess[str]:
    """Collects the whole suite where these modules are not there."""
    words = ["correctness_tests", "--collect-only", "-qq", "--device", "cpu", "-p", "no:xdist"]
    return subprocess.run(
        [sys.executable, "-c", COLLECT, " ".join(hidden), *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow("it collects all tests twice, in processes of their own")
@pytest.mark.parametrize("without", ["triton", "the rest"])
def test_all_tests_are_collected_without_an_extra(without: str) -> None:
    """Triton is apart: a file that is skipped without it may import more that is missing."""
    alone = without == "triton"
    extras = [packages for extra, packages in EXTRAS.items() if (extra == "triton") == alone]
    result = collected(*(MODULES.get(name, name) for packages in extras for name in packages))
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
