"""What a gate is asked for: every base by its name, and no option under which less is compared."""

import shutil
import sys
from pathlib import Path

import pytest

from correctness_tests.support.gate_fakes import CPU, SIDES, Script
from correctness_tests.support.gated_suite import GatedSuite, git
from correctness_tests.support.timed_suite import lines
from tinyllama.harness.gate import comparison
from tinyllama.harness.gate.pair import BASE

pytestmark = pytest.mark.long

pytest_plugins = ["pytester"]

USAGE = pytest.ExitCode.USAGE_ERROR
REFUSED = [
    (["-n", "2"], "-n: "),
    (["-n", "2", "--dist", "no"], ""),
    (["--benchmark-disable"], "measures nothing"),
    (["--benchmark-skip"], "measures nothing"),
    (["--collect-only"], "nothing would be compared"),
    (["--co", "-q"], "nothing would be compared"),
    (["--fixtures"], "--fixtures: nothing would be compared"),
    (["--fixtures-per-test"], "--fixtures-per-test: nothing would be compared"),
    (["--markers"], "--markers: nothing would be compared"),
    (["--help"], "--help: nothing would be compared"),
    (["-h"], "--help: nothing would be compared"),
    (["-VV"], "--version: nothing would be compared"),
    (["--setup-only"], "nothing would be compared"),
    (["--setup-plan"], "nothing would be compared"),
    (["--benchmark-histogram"], "draws no records"),
    (["--benchmark-autosave"], "--benchmark-autosave: "),
    (["--benchmark-save", "it"], "--benchmark-save: "),
    (["--benchmark-json", "out.json"], "--benchmark-json: "),
    (["-k", "one"], "-k: the gate times every benchmark"),
    (["-m", "slow"], "-m: the gate times every benchmark"),
    (["--deselect", "test_timed.py::test_one"], "--deselect: the gate times every benchmark"),
    (["--groups", "steps"], "--groups: the gate times every benchmark"),
    (["--record"], "--record: the gate times every benchmark"),
    (["--benchmark-compare-fail=mean:5%"], "thresholds are declared by the benchmarks"),
    (["--ops", "test_timed.py"], "--ops: the gate times the benchmarks of this"),
    (["test_timed.py::test_one"], "tests are named one by one"),
    (["--tree="], "--tree is empty"),  # as of a variable that is not set
]


@pytest.mark.parametrize(("args", "text"), REFUSED, ids=[" ".join(args) for args, _ in REFUSED])
@pytest.mark.parametrize("compare", [[], ["--benchmark-compare"]], ids=["", "compare"])
def test_what_would_leave_something_out_is_refused(
    gated: GatedSuite, args: list[str], text: str, compare: list[str]
) -> None:
    found = gated.run(*args, *compare)
    assert found.ret == USAGE
    assert text in found.stdout.str() + found.stderr.str()
    assert gated.script.launches == 0


def test_no_stored_run_is_compared_with(gated: GatedSuite) -> None:
    found = gated.run("--benchmark-compare=0001")
    assert found.ret == USAGE
    assert "give the option no value" in found.stderr.str()


@pytest.mark.parametrize(
    "args",
    [
        ["--benchmark-compare"],
        ["--benchmark-only"],
        ["-p", "no:xdist"],
        ["-p", "no:terminal"],
        ["-q"],
        ["-x"],
        ["--ignore", "test_timed.py"],
        ["-n", "0"],
    ],
    ids=" ".join,
)
def test_what_changes_nothing_hides_no_slowdown(gated: GatedSuite, args: list[str]) -> None:
    gated.script.slower("a", device_seconds=1.5)
    gated.pytester.makepyfile(test_timed="def test_one(): pass")
    assert gated.run(*args).ret == 10


@pytest.mark.parametrize("args", [["--fixtures"], ["--markers"], ["--help"], ["--version"]])
def test_what_only_shows_something_says_so_or_is_not_green(
    gated: GatedSuite, args: list[str]
) -> None:
    found = gated.run(*args)
    assert "SAME" not in found.stdout.str()
    assert gated.script.launches == 0


# -- bases ------------------------------------------------------------------------------------

NAMES = ["a'b", 'a"b', "$(touch${IFS}x)", "--all", "-x", "--upload-pack=touch", "a;b", "feature/é"]


@pytest.mark.parametrize("name", NAMES)
def test_a_base_of_any_name_is_that_commit(gated: GatedSuite, name: str) -> None:
    git("update-ref", f"refs/heads/{name}", git("rev-parse", "main~1"))
    status, cases = gated.cases(against=name)
    assert status == 0
    assert len(cases) == 2
    assert not (gated.path / "x").exists()


@pytest.mark.parametrize("name", ["main", "HEAD"])
def test_a_tree_is_not_compared_with_itself(gated: GatedSuite, name: str) -> None:
    found = gated.run(against=name)
    assert found.ret == USAGE
    assert "this tree is that revision, byte for byte" in found.stderr.str()
    gated.write("tinyllama/new.py", "x = 1\n")
    assert gated.run(against=name).ret == 0, "an untracked file is part of it"


def test_a_branch_that_moves_meanwhile_is_the_commit_that_it_was(gated: GatedSuite) -> None:
    git("branch", "other", "main~1")
    gated.scripts["other"] = Script("a", device=CPU)
    bases = []

    def moved(benchmark: str) -> int:
        git("update-ref", "refs/heads/other", "main")
        return 7

    def seen(benchmark: str) -> int:
        bases.append(gated.scripts["other"].session.setting.base.root)
        assert not (bases[0] / "tinyllama/changed.py").exists(), "main has it"
        return 7

    gated.script.on(BASE, "inputs", moved)
    gated.scripts["other"].on(BASE, "inputs", seen)
    assert gated.run("--against=other").ret == 0
    assert bases


def test_one_of_two_bases_that_is_this_tree_is_refused(gated: GatedSuite) -> None:
    assert gated.run("--against=main").ret == USAGE


def test_outside_a_repository_there_is_no_base(gated: GatedSuite) -> None:
    shutil.rmtree(gated.path / ".git")
    found = gated.run()
    assert found.ret == USAGE
    assert "cannot be read as a git checkout" in found.stderr.str()


@pytest.mark.parametrize("side", SIDES)
def test_both_sides_are_measured_with_the_judges_files(gated: GatedSuite, side: str) -> None:
    gated.write(str(gated.judge / "tinyllama/harness/measure/clock.py"), "TICKS = 3\n")
    gated.write("tinyllama/harness/measure/clock.py", "TICKS = 4\n")
    gated.commit("the base")
    gated.write("tinyllama/changed.py", "x = 2\n")
    seen = []

    def inputs(benchmark: str) -> int:
        tree = getattr(gated.script.session.setting, side).root
        seen.append((tree / "tinyllama/harness/measure/clock.py").read_text())
        return 7

    gated.script.on(side, "inputs", inputs)
    assert gated.run(against="main").ret == 0
    assert set(seen) == {"TICKS = 3\n"}
    assert (gated.path / "tinyllama/harness/measure/clock.py").read_text() == "TICKS = 4\n"
    assert not getattr(gated.script.session.setting, side).root.exists(), "a copy of its own"


# -- interpreters -----------------------------------------------------------------------------


def test_another_interpreter_runs_the_same_tree(gated: GatedSuite, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    gated.script.identity[BASE]["versions"] = {"torch": "2.9"}
    status, cases = gated.cases(f"--against-env={other}", against="")
    assert status == 0
    assert len(cases) == 2
    setting = gated.script.session.setting
    assert setting.toolchains
    assert setting.base.root == setting.candidate.root == gated.path
    assert setting.base.caches != setting.candidate.caches


def test_an_interpreter_that_is_not_there_is_refused(gated: GatedSuite, tmp_path: Path) -> None:
    for name in ("nowhere", tmp_path, "test_timed.py", sys.executable):
        assert gated.run(f"--against-env={name}", against="").ret == USAGE


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nowhere/out.json", "results", "x" * 256, "/proc/out.json"])
def test_a_report_that_cannot_be_written_is_refused_at_once(gated: GatedSuite, name: str) -> None:
    (gated.path / "results").mkdir()
    found = gated.run("--gate-json", name)
    assert found.ret == USAGE
    lines(found, f"--gate-json .*{name}'(:| is a folder:| cannot be written:)")
    assert gated.script.launches == 0


def test_a_report_without_a_gate_is_refused(gated: GatedSuite) -> None:
    assert gated.run("--gate-json", "out.json", against="").ret == USAGE


@pytest.mark.parametrize("named", [True, False])
def test_the_noise_of_the_device_is_read_where_it_is_named_and_never_from_the_candidate(
    gated: GatedSuite, tmp_path: Path, named: bool
) -> None:
    from tinyllama.harness.gate.calibrate import noise_path
    from tinyllama.harness.machine.device import device_name

    root = tmp_path if named else gated.path / "results"
    path = noise_path(root, device_name(gated.script.device))
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    status, cases = gated.cases(*(["--results-dir", str(root)] if named else []))
    assert status == (15 if named else 0)
    assert ("holds no A/A blocks" in str(cases)) is named


def test_the_instrument_is_all_that_measures() -> None:
    """What the workers import of the harness to time a call is laid over the base."""
    from correctness_tests.support.commands import ROOT
    from tinyllama.bench.gated import REGISTERED
    from tinyllama.harness.gate.sources import closure

    found = set(comparison.instrument(ROOT, REGISTERED))
    assert {f"tinyllama/bench/{name}.py" for name in ("gated", "steps", "workloads")} < found
    gate = {p.name for p in (ROOT / "tinyllama/harness/gate").glob("*.py")}
    assert {f"tinyllama/harness/gate/{name}" for name in gate} < found
    of_sides = {str(p.relative_to(ROOT)) for p in closure(ROOT, ["tinyllama.harness.gate.worker"])}
    of_ops = {str(p.relative_to(ROOT)) for p in closure(ROOT, ["tinyllama.ops.rms_norm"])}
    timing = {p for p in of_sides - of_ops if p.startswith("tinyllama/harness/")}
    # No time depends on these: the machine's facts, records, and what verifies a result.
    facts = ("__init__", "device", "errors", "facts", "files", "sensors", "toml")
    known = {f"machine/{name}" for name in facts}
    known |= {"measure/__init__", "measure/rounds"}
    known |= {f"records/{name}" for name in ("__init__", "entries", "results")}
    known |= {f"correct/{name}" for name in ("__init__", "cases", "compare", "evaluate", "poison")}
    assert timing - found <= {f"tinyllama/harness/{name}.py" for name in known}
