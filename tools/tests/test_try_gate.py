"""Branches whose worth is known: that they still are what they say, and what is made of the gate's
words."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from correctness_tests.support.gate_samples import gate_report, run
from tinyllama.harness.gate import config, snapshots
from tinyllama.harness.gate.affected import Change
from tinyllama.harness.gate.benchmarks import BASE, Benchmark
from tinyllama.harness.gate.pair import Tree
from tinyllama.harness.gate.workspace import benchmarks_of, registered_in
from tools import try_gate
from tools.try_gate import BRANCHES, Edit, branched, copied

CPU = torch.device("cpu")
CHANGED = {  # by branch, an op of which benchmarks change
    "same-kernel": "cross_entropy",
    "same-in-many": "silu_mul",
    "retuned-table": "rms_norm",
    "slower-kernel": "rms_norm",
    "slower-host": "rms_norm",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tried") / "base"
    copied(ROOT, copy)
    return copy


def checked_out(base: Path, root: Path, name: str) -> Path:
    """A tree in which that branch is checked out; made once."""
    if not root.exists():
        subprocess.run(["git", "clone", "--quiet", str(base), str(root)], check=True)
        branched(root, name)
    return root


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> list[Benchmark]:
    rules = config.load(ROOT)
    tree = Tree(BASE, ROOT, sys.executable, "itself", tmp_path_factory.mktemp("caches"))
    return benchmarks_of(tree, CPU, registered_in([ROOT], rules, rules))


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_changes_what_it_says_and_nothing_else(
    name: str, base: Path, declared: list[Benchmark]
) -> None:
    root = checked_out(base, base.with_name(name), name)
    with snapshots.opened(root) as repository:
        trees = (
            repository.of_commit(repository.resolve(revision)) for revision in (f"{name}~1", name)
        )
        differences = repository.changed(*trees)
    change = Change(base, root, differences, config.load(ROOT).unrelated or ())
    change.benchmarks = declared
    changed = {benchmark.name for benchmark in declared if change.why(benchmark)}
    names = {benchmark.name for benchmark in declared}
    if name in CHANGED:
        ops = {
            benchmark.timed.op
            for benchmark in declared
            if benchmark.name in changed and not benchmark.factory
        }
        assert CHANGED[name] in ops
        assert ops.isdisjoint({"silu_mul", "rms_norm", "adamw"} - {CHANGED[name]})
    else:
        assert changed == (set() if name == "comments" else names)


RIGHT = """
import os, sys, torch, triton.runtime.interpreter
for root in sys.argv[1:]:
    if not os.fork():
        sys.path.insert(0, root)
        import tinyllama
        from tinyllama.ops import OPS
        op = OPS["rms_norm"]
        x, w = torch.randn(3, 27, 24), torch.randn(24)
        a, b = (op[p].call(x, w, eps=1e-5) for p in ("eager", "triton"))
        torch.testing.assert_close(a, b)
        print(tinyllama.__file__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, root
"""


def test_branches_are_right(base: Path, tmp_path: Path) -> None:
    """They are to be stopped for their time alone. Each is imported in a process of its own."""
    roots = [base.with_name(name) for name in BRANCHES]
    for name, root in zip(BRANCHES, roots, strict=True):
        checked_out(base, root, name)
    env = {**ENVIRONMENT, "PYTHONPATH": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RIGHT, *map(str, roots)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).parents[1] for line in done.stdout.splitlines()] == roots


def test_an_edit_fits_once_or_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one two two")
    Edit("a.py", "one", "1").apply(tmp_path)
    Edit("a.py", "two", "2", first=True).apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "1 2 two"
    for file, old in (("a.py", "one"), ("a.py", "t"), ("b.py", "one")):
        (tmp_path / "a.py").write_text("two t")
        with pytest.raises(ValueError, match=f"{file} has '{old}'"):
            Edit(file, old, "").apply(tmp_path)


# -- what is made of the gate's words -----------------------------------------------------------


def test_a_slower_kernel_is_to_be_named() -> None:
    kernel, host = BRANCHES["slower-kernel"], BRANCHES["slower-host"]
    right = gate_report(moved="rms_norm_forward: a call of 9.0 us -> a call of 9.7 us")
    assert not kernel.wrong(run(10, right))
    assert "rms_norm_forward" in kernel.wrong(run(10, gate_report(moved="fill: 1 us")))[0]
    assert (
        "device_seconds"
        in kernel.wrong(run(10, gate_report("host_seconds", moved="rms_norm_forward")))[0]
    )
    assert not host.wrong(run(10, gate_report("host_seconds")))
    assert "host_seconds" in host.wrong(run(10, right))[0]
    assert kernel.wrong(run(10, right, seconds=181.0)) == ["it took 181 s, not 180"]
    assert "INCONCLUSIVE" in kernel.wrong(run(11, gate_report(outcome="INCONCLUSIVE")))[0]


def test_what_is_not_slower_is_to_be_green() -> None:
    same = {"verdicts": [{"outcome": "SAME"}], "comparisons": []}
    assert not BRANCHES["everything"].wrong(run(0, same))
    assert BRANCHES["comments"].wrong(run(0, same)) == ["some are SAME"]
    assert BRANCHES["everything"].wrong(run(10, gate_report()))[0] == "some are SLOWER"
    assert BRANCHES["slower-host"].wrong(run(0, same))[0] == "status 0"


def test_an_unknown_branch_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert try_gate.main(["--only", "nope"]) == 2
    assert "'nope' is not a branch: use some of comments" in capsys.readouterr().err
