"""A new op passes by its own place alone: one file in tinyllama/ops, and the generated list."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import ENVIRONMENT, ROOT, python, ran
from tools.try_gate import copied

NEW = "tinyllama/ops/softmax.py"
# What asks for something of every op or kernel, and the cases of the new one.
TESTS = (
    "correctness_tests/ops/test_ops.py",
    "correctness_tests/ops/test_references.py",
    "correctness_tests/kernels",
    "correctness_tests/harness/test_kernels.py",
    "correctness_tests/project/test_docs.py",
)
CHOSEN = (
    "softmax and (N3V64 or N1024) and (fp32 or sm_90) or every or generated or tree or declares"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this project, committed, with docs/examples/softmax.py among its ops."""
    copy = tmp_path / "tree"
    copied(ROOT, copy)
    shutil.copy(ROOT / "docs/examples/softmax.py", copy / NEW)
    return copy


def passes(tree: Path, *args: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if "PYTEST" not in name}
    done = python("-m", *args, cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_new_op_is_one_file(tree: Path) -> None:
    if find_spec("ruff") is not None:
        passes(tree, "ruff", "check")
        passes(tree, "ruff", "format", "--check")
    passes(tree, "tools.generate_docs")
    passes(tree, "pytest", "-q", "-p", "no:xdist", "-k", CHOSEN, *TESTS)
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    changed = ran(*status, cwd=tree, check=True).stdout
    assert changed.splitlines() == [" M docs/api.md", f"?? {NEW}"]
