"""A base that cannot take the judge's instrument is no base, before anything runs; one whose
ops are files, where the candidate's are folders, is one."""

from pathlib import Path

import pytest

from correctness_tests.support.gate_fakes import SIDES
from correctness_tests.support.gated_suite import GatedSuite
from tinyllama.harness.gate.benchmarks import ON_CPU, Benchmark
from tinyllama.harness.gate.comparison import sources
from tinyllama.harness.gate.pair import Tree

pytest_plugins = ["pytester"]

SIDE = "tinyllama/harness/gate/side.py"
BEFORE_THE_MOVE = ["tinyllama/harness/op.py", "tinyllama/harness/kernels.py"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "since"),
    [
        (BEFORE_THE_MOVE, "the harness was moved into folders"),
        (["tinyllama/harness/declare/registry.py"], "that file was added"),
    ],
    ids=["flat", "older"],
)
@pytest.mark.parametrize("directly", [True, False])
def test_a_base_without_what_the_instrument_imports_is_none(
    gated: GatedSuite, before: list[str], since: str, directly: bool
) -> None:
    for name in before:
        gated.write(name, "")
    gated.commit("the base")
    gated.write(str(gated.judge / SIDE), "from tinyllama.harness.measure import clock\n")
    importing = SIDE if directly else "tinyllama/harness/measure/clock.py"
    text = "def f():\n    from tinyllama.harness.declare.op import Op\n"
    gated.write(str(gated.judge / importing), text)
    for tree in (gated.path, gated.judge):
        gated.write(str(tree / "tinyllama/harness/declare/op.py"), "Op = 1\n")
    status, cases = gated.cases(against="main")
    assert status == 18
    said = str(cases["main main"])
    assert "the base has no tinyllama/harness/declare/op.py" in said
    assert f"it is from before {since}. Compare with a commit that has it" in said
    assert gated.script.launches == 0


@pytest.mark.long
def test_a_base_need_not_have_what_no_worker_imports(gated: GatedSuite) -> None:
    session = gated.judge / "tinyllama/harness/gate/session.py"
    gated.write(str(session), "import tinyllama.harness.machine.new\n")
    gated.write(str(gated.judge / "tinyllama/harness/machine/new.py"), "")
    gated.write("tinyllama/changed.py", "x = 2\n")
    assert gated.run(against="main").ret == 0


@pytest.mark.long
def test_a_base_without_an_op_that_the_instrument_imports_is_older(gated: GatedSuite) -> None:
    for tree in (gated.path, gated.judge):
        gated.write(str(tree / "tinyllama/ops/norm/__init__.py"), "x = 1\n")
    gated.write(str(gated.judge / SIDE), "import tinyllama.ops.norm\n")
    status, cases = gated.cases(against="main")
    assert status == 18
    assert "it is from before that file was added" in str(cases["main main"])


@pytest.mark.long
def test_a_base_whose_ops_are_files_is_compared_with_folders(gated: GatedSuite) -> None:
    gated.write("tinyllama/ops/norm.py", "x = 1\n")
    gated.commit("the base")
    for tree in (gated.path, gated.judge):
        text = "from tinyllama.ops.norm import kernels\n"
        gated.write(str(tree / "tinyllama/ops/norm/__init__.py"), text)
    gated.write("tinyllama/ops/norm/kernels.py", "x = 1\n")
    (gated.path / "tinyllama/ops/norm.py").unlink()
    gated.write(str(gated.judge / SIDE), "import tinyllama.ops.norm\n")
    assert gated.run(against="main").ret == 0


@pytest.mark.long
def test_a_candidate_without_what_the_instrument_imports_is_judge_changed(
    gated: GatedSuite,
) -> None:
    gated.write("tinyllama/harness/declare/op.py", "Op = 1\n")
    gated.commit("the base")
    (gated.path / "tinyllama/harness/declare/op.py").unlink()
    gated.write("tinyllama/harness/declare/ops.py", "Op = 1\n")
    gated.write(str(gated.judge / SIDE), "from tinyllama.harness.declare.op import Op\n")
    gated.write(str(gated.judge / "tinyllama/harness/declare/op.py"), "Op = 1\n")
    status, cases = gated.cases(against="main")
    assert status == 19
    assert "the candidate has no tinyllama/harness/declare/op.py" in str(cases["main candidate"])
    assert gated.script.launches == 0


def test_an_op_that_became_a_folder_is_not_identical(tmp_path: Path) -> None:
    trees = [Tree(side, tmp_path / side, "", "", tmp_path) for side in SIDES]
    for tree, name in zip(trees, ("norm.py", "norm/__init__.py"), strict=True):
        path = tree.root / "tinyllama/ops" / name
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
    one = Benchmark("norm", None, "tinyllama.ops.norm", ON_CPU)
    base, candidate = (sources(tree, one) for tree in trees)
    assert base[0].keys() == {"tinyllama/ops/norm.py"}
    assert candidate[0].keys() == {"tinyllama/ops/norm/__init__.py"}
