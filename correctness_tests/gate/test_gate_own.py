"""The gate of another repository: the installed harness judges the ops of its files."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gated_suite import git, plain_git
from correctness_tests.support.own_repository import OP
from tinyllama import ops
from tinyllama.cli import gate as command
from tinyllama.cli import main, parser
from tinyllama.harness.gate import accepted, comparison, judge, team
from tinyllama.harness.gate.benchmarks import Own, Registered, strays
from tinyllama.harness.gate.pair import Tree
from tinyllama.harness.gate.proof import check_report, tree_digest
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.gate.worker import Side
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.measure import op_contender
from tinyllama.suites.entry import expanded

PACKAGE = "tinyllama.ops"
PATTERN = "kernels/*.py"
CPU = torch.device("cpu")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two ops, one of which imports a module of the tree; the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(op_contender, "_LOADED", {})
    monkeypatch.delitem(sys.modules, "own_helper", raising=False)  # of the test before
    monkeypatch.syspath_prepend(str(tmp_path))
    plain_git(monkeypatch)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "own_helper.py").write_text("ONE = 1.0\n")
    (tmp_path / "kernels/once.py").write_text(OP.format(name="once", body="x + x"))
    text = OP.format(name="twice", body="x + ONE * x")
    (tmp_path / "kernels/twice.py").write_text(f"from own_helper import ONE\n{text}")
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message=all")
    return tmp_path


@pytest.mark.long
def test_the_benchmarks_are_those_of_the_files_of_a_tree(tree: Path) -> None:
    side = Side("cpu", PACKAGE, own=Own((PATTERN,)))
    assert side.identity()["root"] == str(tree)
    found = {one.name.partition("-N")[0]: one.module for one in side.benchmarks()}
    assert found == {
        **dict.fromkeys(("once-eager", "once-sum"), "kernels/once.py"),
        **dict.fromkeys(("twice-eager", "twice-sum"), "kernels/twice.py"),
    }
    assert side.left_out() == {}
    only = Side("cpu", PACKAGE, own=Own((PATTERN,), names=("once",)))
    assert {one.timed.op for one in only.benchmarks()} == {"once"}


def test_an_op_without_timed_cases_is_left_out_by_name(tree: Path) -> None:
    text = OP.format(name="never", body="x + x").replace("    timed=[Case(N=16, D=8)],\n", "")
    (tree / "kernels/never.py").write_text(text)
    side = Side("cpu", PACKAGE, own=Own((PATTERN,)))
    assert {one.timed.op for one in side.benchmarks()} == {"once", "twice"}
    assert side.left_out() == {
        "op never declares no timed cases: add timed=[Case(...)]": 2,
    }


def test_the_gate_takes_the_files_that_pytest_takes(tmp_path: Path) -> None:
    """In a folder of any name, at any depth: what pytest tests and the gate leaves out would be
    green whatever it costs."""
    root = tmp_path / "[ab] *"
    for name in ("one.py", "in/two.py", "in/in/three.py", "in/note.txt", "[ab].py"):
        (root / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "kernels" / name).touch()
    patterns = ("kernels/**/t*.py", "kernels/*.py", "kernels/in/../one.py", "kernels/[ab].py")
    found = Own(patterns).found(root)
    names = ["in/in/three.py", "in/two.py", "[ab].py", "one.py"]
    paths = [str(root / "kernels" / name) for name in names]
    assert list(dict.fromkeys(str(Path(one).resolve()) for one in found)) == paths
    assert expanded("ops", patterns, root) == paths


@pytest.mark.long
def test_a_side_that_runs_code_from_elsewhere_says_which(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed copy of the tree's package, or the other side's, that a file of ops imports."""
    assert strays(tree) == []
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "own_helper.py"
    elsewhere.write_text("ONE = 1.0\n")
    monkeypatch.syspath_prepend(str(elsewhere.parent))
    side = Side("cpu", PACKAGE, own=Own((PATTERN,)))
    assert side.identity()["root"] == str(elsewhere)


def test_what_a_file_imports_is_its_source(tree: Path) -> None:
    benchmarks = {one.name: one for one in Side("cpu", PACKAGE, own=Own((PATTERN,))).benchmarks()}
    once, twice = (
        next(b for n, b in benchmarks.items() if n.startswith(o)) for o in ("once", "tw")
    )

    def read(one: Any) -> set[str]:
        side = Tree("base", tree, sys.executable, "main", tree / "caches")
        comparison._sources.cache_clear()
        return set(comparison.sources(side, one)[0])

    assert read(once) == {"kernels/once.py"}
    assert read(twice) == {"kernels/twice.py", "own_helper.py"}
    (tree / "src").mkdir()
    (tree / "own_helper.py").rename(tree / "src/own_helper.py")
    assert read(twice) == {"kernels/twice.py", "src/own_helper.py"}


def test_any_file_of_the_tree_that_changes_meanwhile_is_seen(tree: Path) -> None:
    registered = Registered(ops.__name__, own=Own((PATTERN,)))
    before = comparison.contents(tree, registered)
    assert comparison.contents(tree, registered) == before
    (tree / "own_helper.py").write_text("ONE = 2.0\n")
    assert comparison.contents(tree, registered) != before


def test_the_base_keeps_the_benchmarks_of_patterns_that_the_candidate_dropped(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "pyproject.toml").write_text(f'[tool.tinyllama]\nops = ["{PATTERN}"]\n')
    git("add", "--all")
    git("commit", "--quiet", "--message=ops")
    commit = git("rev-parse", "HEAD")
    (tree / "pyproject.toml").write_text('[tool.tinyllama]\nops = ["kernels/once.py"]\n')
    with prepared(tree, commit, "kernels/once.py", monkeypatch) as setting:
        own = setting.registered.own
        assert own.files == ("kernels/once.py", PATTERN)
        assert not (setting.base.root / "tinyllama").exists()


@contextmanager
def prepared(tree: Path, commit: str, files: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The setting of a comparison of the tree with a commit."""
    request: Any = SimpleNamespace(
        all_verdicts=False,
        ops=(),
        registered=Registered(ops.__name__, own=Own((files,))),
        root=tree,
        label="main",
        commit=commit,
        python=sys.executable,
        device=CPU,
        results=tree / "results",
        version="0",
        watch=None,
        candidate_label="candidate",
        seconds=Stages(),
        say=print,
        doing=print,
    )
    monkeypatch.setattr(comparison, "Session", lambda setting: setting)
    with comparison.prepared(request) as setting:
        yield setting


@pytest.mark.long
def test_both_sides_are_what_git_holds_without_bytecode(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes bytecode that says so in the place of source, and a file that git ignores is in
    no report."""
    compiled = tree / "kernels/__pycache__/once.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    git("add", "--all")
    git("commit", "--quiet", "--message=bytecode")
    (tree / ".gitignore").write_text("ignored.py\n")
    for name in ("ignored.py", "new.py", "notes.txt"):
        (tree / name).touch()
    with prepared(tree, "main", PATTERN, monkeypatch) as setting:
        has = {"kernels/once.py", "kernels/twice.py", "own_helper.py"}
        for side, more in ((setting.base, set()), (setting.candidate, {"new.py"})):
            files = (path for path in side.root.rglob("*.*") if path.is_file())
            assert {path.relative_to(side.root).as_posix() for path in files} == has | more
        assert setting.changed == (), "the bytecode is the base's"
    compiled.write_text("more")
    with prepared(tree, "main", PATTERN, monkeypatch) as setting:
        (change,) = setting.changed
        assert change.name == "kernels/__pycache__/once.pyc"


def test_a_module_in_the_place_of_another_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sitecustomize.py", "torch.py", "other.py"):
        (tree / name).touch()
    with prepared(tree, "main", PATTERN, monkeypatch) as setting:
        assert {one.name for one in setting.changed} == {"sitecustomize.py", "torch.py"}


def test_a_link_to_itself_is_a_file_as_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.resolve` raises RuntimeError there."""
    (tree / "loop").symlink_to("loop")
    git("add", "--all")
    git("commit", "--quiet", "--message=loop")
    (tree / "new.py").touch()
    with prepared(tree, "main", PATTERN, monkeypatch) as setting:
        for side in (setting.base, setting.candidate):
            assert os.readlink(side.root / "loop") == "loop"
    assert tree_digest(tree, tree / "loop") != tree_digest(tree, None)
    check_report(tree / "report", tree)
    with pytest.raises(UsageError, match="git tracks that file"):
        check_report(tree / "loop", tree)
    assert main(["gate", "loop", "--against", "main", "--gate-json", str(tree / "loop")]) == 2


@pytest.mark.parametrize("to", ["/etc/passwd", "a whole path inside"])
def test_a_candidate_with_a_link_out_of_its_tree_cannot_be_compared(
    to: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = next(tree.glob("kernels/*.py"))
    (tree / "kernels/more.py").symlink_to(to if to.startswith("/") else inside)
    with (
        pytest.raises(comparison.UnreadableError, match="links out of its tree"),
        prepared(tree, "main", PATTERN, monkeypatch),
    ):
        pass


@pytest.mark.parametrize("of_base", [False, True])
@pytest.mark.parametrize("pattern", ["/etc/x.py", "../x.py", "kernels/../../*.py"])
def test_files_of_ops_that_are_not_in_the_tree_are_an_error(
    pattern: str, of_base: bool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pytest tests and the gate leaves out would be green whatever it costs."""
    if of_base:
        (tree / team.FILE).write_text(f"[tool.tinyllama]\nops = ['{pattern}']\n")
        git("add", "--all")
        git("commit", "--quiet", "--message=ops")
    with (
        pytest.raises(ValueError, match=f"ops: '{re.escape(pattern)}' leads out of the tree"),
        prepared(tree, "main", PATTERN if of_base else pattern, monkeypatch),
    ):
        pass


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", [accepted.FILE, team.FILE])
def test_a_file_that_accepts_or_sets_and_is_not_in_git_is_an_error(
    name: str, linked: bool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reviewer would see it."""
    (tree / ".gitignore").write_text("hidden\n" if linked else f"/{name}\n")
    git("add", "--all")
    git("commit", "--quiet", "--message=ignored")
    (tree / ("hidden" if linked else name)).touch()
    if linked:
        (tree / name).symlink_to("hidden")
    with (
        pytest.raises(ValueError, match=rf"{name} is not in git.*git add --force"),
        prepared(tree, "main", PATTERN, monkeypatch),
    ):
        pass


def test_temporary_files_in_the_tree_that_is_compared_are_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base would be unpacked there, and be untracked code of the candidate."""
    (tree / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tree / "tmp"))
    with (
        pytest.raises(ValueError, match="set TMPDIR to another folder"),
        prepared(tree, "main", PATTERN, monkeypatch),
    ):
        pass


def test_the_command_is_that_of_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(root: Path, line: list[str], *more: Any) -> int:
        asked[:] = line
        return 10

    monkeypatch.setattr(command, "check_asked", lambda *_: None)
    monkeypatch.setattr(judge, "run", run)
    report = tmp_path / "out.json"
    line = f"gate --against main --ops a.py b.py --op once --gate-json {report} --device cpu"
    args = parser().parse_args(line.split())
    assert args.run(args) == 10
    given = ["--against=main", "--op=once", "--device=cpu", f"--gate-json={report}"]
    assert asked[-7:] == [*given, "--ops", "a.py", "b.py"]
    with pytest.raises(UsageError, match="name a base"):
        command.run(parser().parse_args(["gate"]))


@pytest.mark.slow("it starts a gate; test_worker.py ends workers, test_gate_fails_closed.py sides")
@pytest.mark.parametrize(
    "ends", ["import os; os._exit(0)", "raise SystemExit(0)", "import pytest; pytest.exit('', 0)"]
)
def test_an_op_that_ends_its_process_with_0_is_a_worker_that_died(
    tree: Path, quiet: None, capfd: pytest.CaptureFixture[str], ends: str
) -> None:
    (tree / "kernels/once.py").write_text(f"{ends}\n")
    args = parser().parse_args(["gate", "--against=main", "--device=cpu", f"--ops={PATTERN}"])
    assert args.run(args) == 17
    assert "WORKER DIED" in capfd.readouterr().out


@pytest.mark.slow("it starts a gate, whose workers import torch")
def test_no_conftest_of_the_candidate_is_loaded_by_its_judge(
    tree: Path, quiet: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor an op: each would end it, and with status 0."""
    ends = "import os, sys\n\nif '_pytest' in sys.modules:\n    os._exit(0)\n"
    (tree / "kernels/once.py").write_text(ends + (tree / "kernels/once.py").read_text())
    git("commit", "--all", "--quiet", "--message=ends")
    (tree / "conftest.py").write_text("import os\n\nos._exit(0)\n")
    (tree / "kernels/once.py").write_text((tree / "kernels/once.py").read_text() + "# more\n")
    args = parser().parse_args(["gate", "--against=main", "--device=cpu", f"--ops={PATTERN}"])
    assert args.run(args) == 19, "it was added, and would judge"
    out = capfd.readouterr().out
    assert "4 IDENTICAL" in out
    assert "conftest.py" in out


def test_a_judge_that_ends_with_0_without_a_report_is_not_green(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where a report of an earlier run is, that is not taken for its own."""
    earlier = tmp_path / "gate.json"
    earlier.write_text("{}")
    monkeypatch.setattr(command, "judged", lambda args, report: 0)
    (tree / "kernels/new.py").touch()
    asked = ["gate", "--against=main", "--device=cpu", f"--ops={PATTERN}"]
    args = parser().parse_args([*asked, f"--gate-json={earlier}"])
    assert args.run(args) == 15
    assert not earlier.exists()
    assert "MISSING: pytest ended with 0, but " in capfd.readouterr().err


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A machine that nobody else uses, whoever does."""
    beside = tmp_path_factory.mktemp("beside")
    (beside / "sitecustomize.py").write_text(
        "import os\n\nos.getloadavg = lambda: (0.0, 0.0, 0.0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{beside}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TMPDIR", str(beside))  # where devices are locked


@pytest.mark.slow("it starts a gate, whose workers import torch")
def test_equal_files_are_identical(tree: Path, quiet: None) -> None:
    (tree / "kernels/once.py").write_text((tree / "kernels/once.py").read_text() + "# more\n")
    argv = ["-m", "tinyllama", "gate", "--against=main", "--device=cpu", f"--ops={PATTERN}"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 IDENTICAL" in done.stdout


@pytest.mark.slow("it starts a gate, which times two benchmarks")
def test_a_table_elsewhere_that_changed_is_named_and_its_op_is_measured(
    tree: Path, quiet: None
) -> None:
    read = "import pathlib\npathlib.Path(__file__).parent.parent.joinpath('t/x.json').read_text()\n"
    (tree / "t").mkdir()
    (tree / "t/x.json").write_text("[1]")
    (tree / "kernels/once.py").write_text(read + (tree / "kernels/once.py").read_text())
    git("add", "--all")
    git("commit", "--quiet", "--message=a table")
    (tree / "t/x.json").write_text("[2]")
    argv = ["-m", "tinyllama", "gate", "--against=main", "--device=cpu", f"--ops={PATTERN}"]
    argv.append("--op=once")
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)
    assert " IDENTICAL," not in done.stdout, done.stdout + done.stderr
    assert "not IDENTICAL: 2 benchmarks: it opens t/x.json, which differs" in done.stdout
