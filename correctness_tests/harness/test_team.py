"""``[tool.tinyllama]``: what a team sets counts, is said, and is not loosened by what it judges."""

import os
from pathlib import Path

import pytest

from correctness_tests.support.gate_fakes import CPU
from correctness_tests.support.gated_suite import GatedSuite, git
from correctness_tests.support.timed_suite import COMPARE, Suite, ends, lines
from tinyllama.harness.gate import accepted, team
from tinyllama.harness.gate.proof import verify
from tinyllama.harness.gate.side import ON_GPU, Side, declared, usual_slowdowns
from tinyllama.harness.gate.subject import DEVICE, HOST
from tinyllama.harness.machine.errors import UsageError

pytest_plugins = ["pytester"]


def write(text: str, folder: Path = Path()) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.other]\nx = 1\n[tool.tinyllama]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group = ['one']", "unknown key 'group': use groups, lanes, tolerances, slowdowns, ops"),
        ("groups = 'one'", "groups is 'one': use a list of different names"),
        ("groups = []", "groups is []: use a list"),
        ("groups = ['one', 'one']", "use a list of different names"),
        ("groups = [1]", "use a list of different names"),
        ("lanes = ['one']", "lanes is ['one']: use a table"),
        ("lanes = { 'a,b' = ['one'] }", "lanes: 'a,b' cannot be asked for by --groups: rename it"),
        ("lanes = { short = ['one'] }", "lanes: 'short' cannot be asked for"),
        ("lanes = { a = [] }", "lanes.a is []: use a list"),
        ("tolerances = { second = 1.1 }", "tolerances: second = 1.1: give one of seconds, "),
        ("tolerances = { seconds = 0.9 }", "seconds = 0.9: give one of "),
        ("tolerances = { seconds = nan }", "seconds = nan: give one of "),
        ("tolerances = { seconds = true }", "seconds = True: give one of "),
        ("slowdowns = { seconds = 0.1 }", "slowdowns: seconds = 0.1: give device_seconds or host"),
        ("slowdowns = { device_seconds = 0 }", "device_seconds = 0: give "),
        ("slowdowns = { device_seconds = 5 }", "device_seconds = 5: give "),
        ("slowdowns = 0.1", "slowdowns is 0.1: use a table"),
    ],
)
def test_a_table_that_is_wrong_is_refused_before_anything_runs(
    suite: Suite, text: str, message: str
) -> None:
    write(text)
    found = suite.run()
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    said = found.stdout.str() + found.stderr.str()
    assert "pyproject.toml" in said
    assert message in said


def test_groups_and_lanes_are_what_is_measured_and_expected(suite: Suite) -> None:
    suite.expect("one", "two")
    write("groups = ['two', 'on-a-gpu']\nlanes = { nightly = ['one', 'two'], gpu = ['on-a-gpu'] }")
    found = suite.run("--record")
    assert found.ret == 0
    assert [record["group"] for record in suite.records()] == ["two"]
    lines(
        found,
        r"^\[tool.tinyllama\] of pyproject.toml: groups two, on-a-gpu; lane nightly one, two",
        "^of pyproject.toml, not measured on this device: on-a-gpu$",
        "2  not in groups of pyproject.toml",
    )
    assert suite.run("--record", "--groups", "one").ret == 0
    assert suite.run("--record", "--groups", "nightly").ret == 0
    assert sorted(record["group"] for record in suite.records()) == ["one", "one", "two", "two"]
    none = suite.run("--record", "--groups", "gpu")
    assert none.ret == pytest.ExitCode.USAGE_ERROR
    lines(none, "pyproject.toml names on-a-gpu, and none is measured on this device")


def test_a_tolerance_counts_where_an_entry_states_none(suite: Suite) -> None:
    write("tolerances = { seconds = 1.01, peak_bytes = 1.5 }")
    assert suite.run("--record").ret == 0
    assert suite.records()[0]["entries"][0]["tolerances"] == {"seconds": 1.01, "peak_bytes": 1.5}
    suite.measure(1.03)
    ends(suite.run(COMPARE), 10, r"SLOWER one/a: seconds 1.030 times \(1.01 allowed\)")


def test_a_change_cannot_widen_the_tolerance_that_judges_it(suite: Suite) -> None:
    assert suite.run("--record").ret == 0
    write("tolerances = { seconds = 2.0 }")
    suite.measure(1.2)
    ends(suite.run(COMPARE), 10, r"\(the baseline allows 1.05: 2 counts once it is recorded\)")
    assert suite.run("--record").ret == 0
    suite.measure(1.5)
    assert suite.run(COMPARE).ret == 0


# -- the gate ---------------------------------------------------------------------------------


def test_slowdowns_are_those_of_what_states_none() -> None:
    gpu = type(CPU)("cuda")
    assert usual_slowdowns(gpu, {DEVICE: 0.05}) == {**ON_GPU, DEVICE: 0.05}
    assert usual_slowdowns(CPU, {DEVICE: 0.01}) == {DEVICE: 0.10}, "its noise is above that"
    found = {
        (one.timed.op, one.timed.provider): one.slowdowns
        for one in declared(CPU, "tinyllama.ops", usual={DEVICE: 0.3, HOST: 0.4})
    }
    assert found["rms_norm", "eager"] == {DEVICE: 0.3}
    assert found["transpose", "eager"] == {DEVICE: 0.10}, "it states its own"


@pytest.mark.parametrize(("base", "candidate"), [(0.2, 0.5), (0.5, 0.2), (None, 0.05)])
def test_the_gate_takes_the_stricter_of_both_sides(
    gated: GatedSuite, base: float | None, candidate: float
) -> None:
    for share in (base, candidate):
        if share is not None:
            write(f"slowdowns = {{ {DEVICE} = {share} }}", gated.path)
            gated.commit(f"{share}")
    found = gated.run()
    assert gated.script.session is not None
    stricter = min(share for share in (base, candidate) if share is not None)
    assert gated.script.session.found["a"].benchmark.slowdowns == {DEVICE: stricter}
    lines(found, rf"^\[tool.tinyllama\] of pyproject.toml: {DEVICE} {candidate:.2%} in the gate")


def test_further_benchmarks_that_state_none_have_the_usual_slowdowns() -> None:
    side = Side(
        "cpu", "tinyllama.ops", more="tinyllama.bench.gated:benchmarks", usual={DEVICE: 0.3}
    )
    (step,) = (one for one in side.benchmarks() if one.name.startswith("step-"))
    assert step.slowdowns == {DEVICE: 0.3}


def test_a_base_of_another_version_may_have_other_keys(tmp_path: Path) -> None:
    write("of_another_version = 1\nslowdowns = { device_seconds = 0.01 }", tmp_path)
    assert team.load(tmp_path, of_base=True).slowdowns == {DEVICE: 0.01}
    assert team.load(tmp_path / "none") == team.Team()
    write("groups = ['one'", tmp_path)
    with pytest.raises(ValueError, match=r"pyproject.toml cannot be read as TOML"):
        team.load(tmp_path, of_base=True)


@pytest.mark.timeout(30)  # a pipe that is read waits for its writer
def test_what_the_gate_reads_is_a_file(tmp_path: Path) -> None:
    for name in (team.FILE, accepted.FILE, "report"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="is a pipe or a device, not a file"):
        team.load(tmp_path)
    with pytest.raises(ValueError, match="is a pipe or a device, not a file"):
        accepted.load(tmp_path / accepted.FILE, "1", device="cpu")
    git("init", "--quiet", str(tmp_path))
    with pytest.raises(UsageError, match="is a pipe or a device, not a file"):
        verify(tmp_path / "report", tmp_path)


def test_what_is_asked_of_a_team_is_its_lanes_or_what_every_run_has() -> None:
    lanes = {"nightly": ("a", "b"), "gpu": ("c",)}
    for groups in (("one", "two"), None):
        made = team.Team(groups=groups, lanes=lanes)
        assert made.asked(None) == groups
        assert [made.asked(name) for name in (*lanes, "none")] == [*lanes.values(), None]


def test_what_a_team_sets_is_said_and_nothing_else() -> None:
    every = {
        "ops": (("a.py", "b/*.py"), ["ops a.py, b/*.py"]),
        "groups": (("one", "two"), ["groups one, two"]),
        "lanes": ({"l": ("a", "b"), "m": ("c",)}, ["lane l a, b", "lane m c"]),
        "tolerances": (
            {"seconds": 1.5, "kernels": 2.0},
            ["seconds 1.5 times a baseline", "kernels 2 times a baseline"],
        ),
        "slowdowns": (
            {DEVICE: 0.01, HOST: 0.125},
            [f"{DEVICE} 1.00% in the gate", f"{HOST} 12.50% in the gate"],
        ),
    }
    assert team.Team().lines() == []
    for name, (given, texts) in every.items():
        made = team.Team(**{name: given})  # type: ignore[arg-type]
        assert made.lines() == [f"[tool.tinyllama] of pyproject.toml: {'; '.join(texts)}"]
    whole = team.Team(**{name: given for name, (given, _) in every.items()})  # type: ignore[arg-type]
    said = "; ".join(text for _, texts in every.values() for text in texts)
    assert whole.lines() == [f"[tool.tinyllama] of pyproject.toml: {said}"]
