"""A repository of one's own: an installed plugin tests its ops, and its tests stay its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from correctness_tests.corpus.variants import FOLDER, variants_of
from correctness_tests.support.commands import ROOT
from correctness_tests.support.own_repository import OP, first_commit, git, plain_git
from correctness_tests.support.timed_suite import SUITE, Suite
from tinyllama.bench import ceilings, measure_ops
from tinyllama.harness import Registry, load_file
from tinyllama.harness.check.cases import op_cases
from tinyllama.harness.machine import facts as machine
from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.measure import op_contender
from tinyllama.harness.plugins.recording import Recording
from tinyllama.suites import entry, selection, timings

pytest_plugins = ["pytester"]

THEIRS = """
import pytest


@pytest.fixture
def device():
    return "theirs"


@pytest.mark.slow
@pytest.mark.parametrize("group", ["a group"])
@pytest.mark.parametrize("seed", [7])
def test_theirs(device, group, seed):
    assert (device, group, seed) == ("theirs", "a group", 7)
"""


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a comparison imports: pytester forgets what a test imported, and torch refuses to be
    imported twice."""
    path, registry = tmp_path_factory.mktemp("imported") / "doubled.py", Registry()
    write(str(path))
    load_file(path, registry)
    for case in op_cases(registry.values()):
        case.compare(torch.device("cpu"), 0)


@pytest.fixture
def repository(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """With the plugin as an installed wheel gives it, a right op and a test of its own."""
    plain_git(monkeypatch)
    for name in (
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "PYTEST_ADDOPTS",
        "TINYLLAMA_COMMIT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(op_contender, "_LOADED", {})
    monkeypatch.setattr(machine, "disturbance", lambda device: None)
    monkeypatch.setattr(ceilings, "copy_rate", lambda device: 1e12)  # these take a second each
    monkeypatch.setattr(ceilings, "product_rate", lambda name, device: 1e15)
    for module in (measure_ops, timings):
        monkeypatch.setattr(module, "providers_of", lambda op: list(op.providers))
    pytester.makeini("[pytest]\naddopts = -p tinyllama.suites.entry -p no:cacheprovider\n")
    (pytester.path / "kernels").mkdir()
    write("kernels/double.py")
    pytester.makepyfile(test_theirs=THEIRS)
    return pytester


def write(path: str, name: str = "double", body: str = "x + x") -> None:
    Path(path).write_text(OP.format(name=name, body=body))


def commit_all() -> None:
    Path(".gitignore").write_text("results/\n.benchmarks/\n__pycache__/\n")
    first_commit()


@pytest.mark.long
def test_the_ops_of_files_are_tested_and_nothing_else(repository: pytest.Pytester) -> None:
    write("kernels/twice.py", "twice", "x + 1.01 * x")
    result = repository.runpytest_inprocess("-v", "--ops", "kernels/double.py", "kernels/twice.py")
    counts = result.parseoutcomes()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert counts["passed"] > 10
    assert counts["failed"] > 4
    text = result.stdout.str()
    assert "test_theirs" not in text
    failed = [line for line in text.splitlines() if "FAILED" in line and "::" in line]
    assert failed
    assert all("[twice-sum-" in line for line in failed)


@pytest.mark.long
def test_a_repository_without_ops_does_not_notice(repository: pytest.Pytester) -> None:
    result = repository.runpytest_inprocess("-v")
    result.assert_outcomes(passed=1)
    assert "left out" not in result.stdout.str()
    config = repository.parseconfig()
    loaded = {name for name, _ in config.pluginmanager.list_name_plugin()}
    assert entry.__name__ in loaded
    assert not loaded & {*entry.PLUGINS, selection.__name__}


@pytest.mark.long
def test_its_own_tests_are_left_as_they_are(repository: pytest.Pytester) -> None:
    result = repository.runpytest_inprocess(
        "test_theirs.py", "--ops", "kernels/*.py", "--case-seed", "2", "-v"
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines_random(["*test_theirs?7-a group? PASSED*", "ops/accuracy*PASSED*"])


@pytest.mark.long
def test_pyproject_names_ops_for_a_run_without_paths(repository: pytest.Pytester) -> None:
    Path("tox.ini").unlink()
    Path("pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "-p tinyllama.suites.entry -p no:cacheprovider"\n'
        '[tool.tinyllama]\nops = ["kernels/*.py"]\n'
    )
    without_paths = repository.runpytest_inprocess("-v")
    without_paths.stdout.fnmatch_lines_random(["*double-sum-*PASSED*", "*test_theirs*PASSED*"])
    with_a_path = repository.runpytest_inprocess("-v", "test_theirs.py")
    with_a_path.assert_outcomes(passed=1)


@pytest.mark.long
def test_one_op_by_its_name_and_its_quick_cases(repository: pytest.Pytester) -> None:
    write("kernels/twice.py", "twice")
    options = ("--device=cpu", "--ops=kernels/*.py", "-m", "quick")
    repository.runpytest_inprocess(*options).assert_outcomes(passed=4, deselected=169)
    result = repository.runpytest_inprocess(*options, "--op=twice", "-v")
    assert result.parseoutcomes()["passed"] == 2
    assert "[double-" not in result.stdout.str()


@pytest.mark.long
def test_a_suite_of_a_conftest_takes_one_op_by_its_name(repository: pytest.Pytester) -> None:
    """As that of this repository: a conftest loads the plugins, and the tests are its own."""
    repository.makeconftest("pytest_plugins = ['tinyllama.harness.plugins.suite']\n")
    Path("test_theirs.py").unlink()
    repository.makepyfile(
        test_half="def test_all(): pass",
        test_others="import pytest\n"
        "@pytest.mark.parametrize('name', ['half', 'third'])\ndef test_one(name): pass\n",
    )
    result = repository.runpytest_inprocess("--op=half", "--device=cpu")
    result.assert_outcomes(passed=2, deselected=1)
    refused = [
        (["--op", "fourth"], "--op fourth: no collected test is about it"),
        (
            ["--ops", "kernels/double.py"],
            "--ops */kernels/double.py: no collected test is about it",
        ),
    ]
    for args, message in refused:
        result = repository.runpytest_inprocess(*args)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {message}"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ops", "nowhere*.py"], "--ops nowhere*.py: no such file"),
        (["--ops", "kernels"], "is no file: name Python files of ops, and folders of tests before"),
        (["--ops", "test_theirs.py"], "test_theirs.py declares no op and no provider"),
        (["--ops", "wrong.py"], "wrong.py:2: NameError: name 'nobody' is not defined"),
        (["--ops", "kernels/double.py", "--op", "half"], "--op 'half' is none of the ops: double"),
        (["--op", "rms_norm", "--record"], "--op: a record is of every op"),
    ],
)
def test_what_names_no_op_is_refused(
    repository: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    """Without waiting for a device that another session holds."""
    monkeypatch.setattr(Recording, "hold_gpu", lambda *_: pytest.fail("it waits"))
    Path("wrong.py").write_text("import torch\nnobody\n")
    result = repository.runpytest_inprocess(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{message.replace('[', '[[]')}*"])


def test_ops_without_timed_cases_are_named_where_times_are_asked_for(
    repository: pytest.Pytester, forked: None
) -> None:
    path = Path("kernels/double.py")
    text = path.read_text()
    path.write_text(text.replace("    timed=[Case(N=16, D=8)],\n", ""))
    assert path.read_text() != text
    commit_all()
    result = repository.runpytest_inprocess("--device=cpu", "--ops=kernels/double.py", "--record")
    text = "double: no timed cases: add timed=[[]Case(...)[]] to the op"
    result.stdout.fnmatch_lines([f"MISSING *{text}*"])
    assert result.ret == 1


@pytest.mark.long
def test_an_op_whose_result_is_wrong_has_no_time(repository: pytest.Pytester, forked: None) -> None:
    write("kernels/double.py", body="x + 1.01 * x")
    commit_all()
    result = repository.runpytest_inprocess("--device=cpu", "--ops=kernels/double.py", "--record")
    assert result.ret == 1
    (path,) = Path("results").glob("*/*-ops-fp32.json")
    record = json.loads(path.read_text())
    assert not record["complete"]
    entries = [entry for entry in record["entries"] if entry.get("provider") == "sum"]
    assert entries
    assert all("WrongResultError" in entry["cannot"] for entry in entries)
    assert not any("seconds" in entry for entry in entries)


@pytest.mark.long
def test_ops_are_compared_with_records_of_that_repository_and_one_with_its_part(
    repository: pytest.Pytester, forked: None
) -> None:
    """The run of one op makes no record."""
    write("kernels/twice.py", "twice")
    commit_all()
    # A CPU, which no other session holds: a GPU may be that of a test in another worker.
    files = ["--device=cpu", "--ops", "kernels/double.py", "kernels/twice.py"]
    first = repository.runpytest_inprocess(*files, "--benchmark-compare")
    assert first.ret == 12  # nothing to compare with yet
    (path,) = Path("results").glob("*/*-ops-fp32.json")
    record = json.loads(path.read_text())
    assert record["commit"] == git("rev-parse", "HEAD")
    assert {entry["op"] for entry in record["entries"] if "op" in entry} == {"double", "twice"}
    for fields in record["entries"]:
        if "op" in fields:
            seconds = 1e-9 if fields["op"] == "twice" else 1e3  # twice would be SLOWER
            for name in ("seconds", "host_seconds"):
                fields |= {name: seconds, f"{name}_quartiles": [seconds, seconds]}
    path.write_text(json.dumps(record))
    result = repository.runpytest_inprocess(*files, "--benchmark-compare", "--op=double")
    text = result.stdout.str()
    assert "FASTER op/double-sum-" in text
    assert "twice" not in text
    assert "MISSING" not in text
    result.stdout.fnmatch_lines(["not recorded ops-fp32: no baseline, since it is of double alone"])
    assert [*Path("results").glob("*/*.json")] == [path]


@pytest.mark.long
def test_a_conftest_of_timings_compares_the_groups_of_one_op(suite: Suite) -> None:
    """As that of this repository: a group without the op is neither measured nor missing."""
    ops = "\n\nclass Named:\n    name = 'x'\n"
    marked = "@pytest.mark.parametrize('op', [Named], ids=['x'])\ndef test_it_is_fast(op, "
    text = SUITE.replace("{right}", "assert True").replace("import pytest\n", f"import pytest{ops}")
    for name, group in (("one", "one"), ("two", "two")):
        part = text.replace("list(FIGURES)", f"[{group!r}]")
        part = part.replace("def test_it_is_fast(", marked) if name == "one" else part
        suite.pytester.makepyfile(**{f"test_{name}": part})
    Path("test_timed.py").unlink()
    run = suite.pytester.runpytest_inprocess
    assert run("--device=cpu", "--record").ret == 0
    result = run("--device=cpu", "--benchmark-compare", "--op=x")
    assert "group two" not in result.stdout.str()
    result.assert_outcomes(passed=2 + 2, deselected=2)  # tests, and verdicts
    assert result.ret == 0


@pytest.mark.long
def test_the_plugin_is_loaded_once_and_loads_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["pytest11"]
    assert points == {entry.__name__: entry.__name__}  # a conftest's name is the same plugin
    code = f"import pytest, sys; before = {{*sys.modules}}; import {entry.__name__}; " + (
        "print(*{*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert loaded == {"tinyllama", "tinyllama.suites", entry.__name__} | (loaded & {"glob"})


@pytest.mark.long
def test_an_access_out_of_bounds_fails_by_name_with_its_line(repository: pytest.Pytester) -> None:
    file = FOLDER / "scaled_rows.py"
    variant = next(each for each in variants_of(file) if each.name == "stores_far_behind")
    path = variant.write(Path("kernels"))
    (line,) = (n for n, text in enumerate(path.read_text().splitlines(), 1) if "2**40" in text)
    result = repository.runpytest_subprocess(
        "-p", "no:xdist", "-rf", "--ops", str(path), "kernels/double.py"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random(
        [f"*out of bounds: *{path}:{line}: *store*", "FAILED *scaled_rows-triton-N4D24-fp32*"]
    )
    assert "double-sum" not in result.stdout.str().partition("short test summary")[2]
