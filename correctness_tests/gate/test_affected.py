"""Which benchmarks a change reaches: the three kinds of files of docs/gate.md."""

from pathlib import Path

import pytest

from correctness_tests.support.own_repository import write_files
from tinyllama.harness.gate.affected import Change
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.snapshots import Difference

TREE = {
    "kernels/a.py": """
        import helper
        from triton import jit

        @jit
        def kernel(x, BLOCK):
            return x

        def call(x):
            "What it does."
            from late import slow
            return slow(kernel(x))
        """,
    "kernels/b.py": "def call(x):\n    return x\n",
    "kernels/docs.py": "def call(x):\n    'two'\n    return call.__doc__\n",
    "package/__init__.py": "from package import core\n",
    "package/core.py": "from . import inner\n",
    "package/inner.py": "x = 1\n",
    "package/tuned/h100.json": "{}",
    "helper.py": "x = 1\n",
    "late.py": "def slow(x):\n    return x\n",
    "elsewhere/table.json": "{}",
    "README.md": "words",
    "other.py": "x = 1\n",
}
BENCHMARKS = {
    name: Benchmark(name, None, module)
    for name, module in {
        "a": "kernels/a.py",
        "b": "kernels/b.py",
        "docs": "kernels/docs.py",
        "package": "package",
    }.items()
}
STEP = Benchmark("step", None, "kernels/b.py", factory="steps:Step")
EVERY = {*BENCHMARKS}


def change(folder: Path, name: str, old: str, new: str | None, *, mode: bool = False) -> Change:
    """Of trees in which one file differs. new: None removes it; old: empty adds it."""
    base = dict(TREE)
    candidate = {**TREE, name: (TREE.get(name, "") or "").replace(old, new or "") or (new or "")}
    if new is None:
        del candidate[name]
    trees = (write_files(folder / "base", base), write_files(folder / "candidate", candidate))
    differing = Change(*trees, [Difference(name, mode, new is None)])
    differing.benchmarks = list(BENCHMARKS.values())
    return differing


@pytest.mark.parametrize(
    ("name", "old", "new", "reached"),
    [
        pytest.param("kernels/a.py", "return x\n", "return x + 1\n", {"a"}, id="the op's file"),
        pytest.param("kernels/a.py", "import helper", "import helper  # why", set(), id="comment"),
        pytest.param("kernels/a.py", "What it does.", "Other words.", set(), id="docstring"),
        pytest.param("kernels/docs.py", "two", "three", {"docs"}, id="a docstring that is read"),
        pytest.param("helper.py", "1", "2", {"a"}, id="what it imports"),
        pytest.param("late.py", "return x", "return x + 1", {"a"}, id="imported in a function"),
        pytest.param("package/inner.py", "1", "2", {"package"}, id="a relative import"),
        pytest.param("package/tuned/h100.json", "{}", "[]", {"package"}, id="package data"),
        pytest.param("kernels/table.json", "", "[]", {"a", "b", "docs"}, id="data beside an op"),
        pytest.param("elsewhere/table.json", "{}", "[]", EVERY, id="data in another folder"),
        pytest.param("other.py", "1", "2", EVERY, id="a file that no op imports"),
        pytest.param("other.py", "1", None, EVERY, id="which is gone"),
        pytest.param("new.py", "", "x = 1", EVERY, id="or new"),
        pytest.param("README.md", "words", "others", set(), id="a document"),
        pytest.param("tests/test_a.py", "", "x = 1", set(), id="a test"),
    ],
)
def test_a_file_reaches_the_benchmarks_that_run_it(
    tmp_path: Path, name: str, old: str, new: str | None, reached: set[str]
) -> None:
    differing = change(tmp_path, name, old, new)
    assert {n for n, benchmark in BENCHMARKS.items() if differing.why(benchmark)} == reached


def test_a_mode_that_changes_is_a_difference(tmp_path: Path) -> None:
    assert change(tmp_path, "helper.py", "1", "1", mode=True).why(BENCHMARKS["a"]) == "helper.py"


def test_the_body_of_a_kernel_is_no_host_code(tmp_path: Path) -> None:
    body = change(tmp_path / "body", "kernels/a.py", "    return x\n", "    return x * 2\n")
    assert body.why(BENCHMARKS["a"])
    assert not body.why(BENCHMARKS["a"], host=True)
    host = change(tmp_path / "host", "kernels/a.py", "slow(kernel(x))", "kernel(x)")
    assert host.why(BENCHMARKS["a"], host=True)


def test_a_training_step_runs_every_op(tmp_path: Path) -> None:
    assert change(tmp_path, "helper.py", "1", "2").why(STEP) == "helper.py"


def test_the_op_whose_own_file_differs_is_told_from_those_that_import_it(tmp_path: Path) -> None:
    assert change(tmp_path / "own", "kernels/a.py", "x\n", "x + 1\n").op_differs(BENCHMARKS["a"])
    assert not change(tmp_path / "other", "helper.py", "1", "2").op_differs(BENCHMARKS["a"])
