"""What a report proves: a green is of this tree, this base, this device and this judge."""

import json
from typing import Any

import pytest

from correctness_tests.support.gated_suite import GatedSuite
from correctness_tests.support.timed_suite import lines
from tinyllama.harness.gate import judge
from tinyllama.harness.gate.proof import verify
from tinyllama.harness.machine.errors import UsageError

pytestmark = pytest.mark.long

pytest_plugins = ["pytester"]

SLOWER = {"device_seconds": 1.5}


# -- what proves a green ----------------------------------------------------------------------


def verified(gated: GatedSuite, *against: str) -> str:
    return verify(gated.path / "out.json", gated.path, against, judges=[str(judge.HARNESS)])


def test_one_op_alone_is_compared_and_proves_that_op_alone(gated: GatedSuite) -> None:
    gated.script.slower("b", **SLOWER)
    found = gated.run("--op", "a", "--gate-json", "out.json")
    assert found.ret == 0
    lines(found, "--op: no other ops than a were compared")
    assert [one["name"] for one in gated.report()["verdicts"]] == ["a"]
    with pytest.raises(UsageError, match=r"compares a alone \(--op\): gate all of it"):
        verified(gated, "main~1")
    report, judges = gated.path / "out.json", [str(judge.HARNESS)]
    said = verify(report, gated.path, ["main~1"], ["a"], judges=judges)
    assert said.startswith("1 verdicts against main~1, all green")
    with pytest.raises(UsageError, match="compares a alone"):
        verify(report, gated.path, ["main~1"], ["a", "b"], judges=judges)


def test_an_op_without_a_benchmark_is_an_error(gated: GatedSuite) -> None:
    status, cases = gated.cases("--op", "a", "--op", "c")
    assert status == 15
    assert "--op c: neither side has a benchmark of it" in str(cases["main~1 benchmarks"])


def test_a_green_report_is_of_this_tree_and_this_base(gated: GatedSuite) -> None:
    assert gated.run("--gate-json", "out.json").ret == 0
    said = "2 verdicts against main~1, all green, of this tree, on cpu ("
    assert verified(gated, "main~1").startswith(said)
    with pytest.raises(UsageError, match=r"compares with .*, not with main "):
        verified(gated, "main")
    gated.write("tinyllama/changed.py", "x = 4\n")
    with pytest.raises(UsageError, match="is of another tree"):
        verified(gated)


def test_a_report_that_is_not_green_or_not_whole_proves_nothing(gated: GatedSuite) -> None:
    gated.script.slower("a", **SLOWER)
    assert gated.run("--gate-json", "out.json").ret == 10
    with pytest.raises(UsageError, match="is not green: status 10, SLOWER"):
        verified(gated)
    report = gated.report()
    changes: list[dict[str, Any]] = [
        {"verdicts": []},
        {"comparisons": []},
        {"comparisons": [{"against": "main~1", "ended": False}]},
    ]
    for change in changes:
        green = {"status": 0, "verdicts": [{"outcome": "SAME"}]}
        gated.write("out.json", json.dumps({**report, **green, **change}))
        with pytest.raises(UsageError, match="is not green"):
            verified(gated)
    for text in ("", "[]", "{}", "no"):
        gated.write("out.json", text)
        with pytest.raises(UsageError, match="is no report of a gate that ended"):
            verified(gated)


def test_a_green_report_is_of_this_kind_of_device_and_by_a_judge_that_is_named(
    gated: GatedSuite,
) -> None:
    """On a CPU no kernel is timed; and whoever is judged could name a judge of its own."""
    assert gated.run("--gate-json", "out.json").ret == 0
    report, by = gated.path / "out.json", [str(judge.HARNESS)]
    verify(report, gated.path, device="cpu", judges=by)
    with pytest.raises(UsageError, match=r"is of cpu \(.*, not of cuda:1: gate there"):
        verify(report, gated.path, device="cuda:1", judges=by)
    for judges in ((), ("a judge",)):
        with pytest.raises(UsageError, match=r"is by another judge, .*: name it with --judge"):
            verify(report, gated.path, judges=judges)
    for missing in ("device", "judge"):
        gated.write(
            "out.json", json.dumps({k: v for k, v in gated.report().items() if k != missing})
        )
        with pytest.raises(UsageError, match="is no report of a gate that ended"):
            verified(gated)
        assert gated.run("--gate-json", "out.json").ret == 0


def test_a_report_in_the_place_of_a_file_of_the_tree_is_refused(gated: GatedSuite) -> None:
    """It would be removed first, and is left out of the digest."""
    found = gated.run("--gate-json", "tinyllama/changed.py")
    assert found.ret == 4
    found.stderr.fnmatch_lines(["*--gate-json tinyllama/changed.py: git tracks that file*"])
    assert (gated.path / "tinyllama/changed.py").read_text() == "x = 1\n"
    with pytest.raises(UsageError, match=r"--verify .*changed.py: git tracks that file"):
        verify(gated.path / "tinyllama/changed.py", gated.path)


@pytest.mark.parametrize("option", ["--fixtures", "--fixtures-per-test", "--markers"])
def test_an_option_that_compares_nothing_is_refused(gated: GatedSuite, option: str) -> None:
    assert gated.run("--gate-json", "out.json", option).ret == 4
    assert not (gated.path / "out.json").exists()
