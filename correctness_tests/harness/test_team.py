"""``[tool.tinyllama]``: what a team sets counts, is said, and is not loosened by what it judges."""

from pathlib import Path

import pytest

from correctness_tests.support.gated_suite import GatedSuite
from correctness_tests.support.timed_suite import COMPARE, Suite, ends, lines
from tinyllama.harness.gate.metric import DEVICE

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


@pytest.mark.long
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


@pytest.mark.long
def test_a_tolerance_counts_where_an_entry_states_none(suite: Suite) -> None:
    write("tolerances = { seconds = 1.01, peak_bytes = 1.5 }")
    assert suite.run("--record").ret == 0
    assert suite.records()[0]["entries"][0]["tolerances"] == {"seconds": 1.01, "peak_bytes": 1.5}
    suite.measure(1.03)
    ends(suite.run(COMPARE), 10, r"SLOWER one/a: seconds 1.030 times \(1.01 allowed\)")


@pytest.mark.long
def test_a_change_cannot_widen_the_tolerance_that_judges_it(suite: Suite) -> None:
    assert suite.run("--record").ret == 0
    write("tolerances = { seconds = 2.0 }")
    suite.measure(1.2)
    ends(suite.run(COMPARE), 10, r"\(the baseline allows 1.05: 2 counts once it is recorded\)")
    assert suite.run("--record").ret == 0
    suite.measure(1.5)
    assert suite.run(COMPARE).ret == 0


# -- the gate ---------------------------------------------------------------------------------


@pytest.mark.long
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
