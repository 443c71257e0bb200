"""Each verdict of the gate is a test case, the worst is the exit status, and however a run ends
there is no green that was not measured."""

import argparse
import re
import signal
import time
from typing import Any

import pytest

from correctness_tests.support.gate_fakes import CPU, Script, died
from correctness_tests.support.gated_suite import GatedSuite, git
from correctness_tests.support.timed_suite import lines
from tinyllama.harness.gate.device_guard import device_lock
from tinyllama.harness.gate.interrupted import time_limit
from tinyllama.harness.gate.metric import DEVICE
from tinyllama.harness.gate.pair import BASE, CANDIDATE
from tinyllama.harness.gate.proof import verify
from tinyllama.harness.gate.session import Session
from tinyllama.harness.machine import worker
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.plugins import gating as plugin
from tinyllama.harness.records.verdict import Outcome, Verdict

pytest_plugins = ["pytester"]

SLOWER = {"device_seconds": 1.5}


# -- verdicts ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_summary_names_what_is_not_identical_and_the_status(gated: GatedSuite) -> None:
    gated.script.slower("a", **SLOWER)
    gated.script.alike("b")
    gated.script.names[CANDIDATE].append("c")
    found = gated.run()
    lines(
        found,
        r"= gate =+\n1 IDENTICAL, 1 NEW, 1 SLOWER; the worst verdict is SLOWER \(10\)\n",
        "^against main~1: SLOWER a: device_seconds",
        "^against main~1: NEW c: device_seconds",
    )
    assert "IDENTICAL b" not in found.stdout.str()


@pytest.mark.long
@pytest.mark.parametrize("outcome", list(Outcome), ids=lambda outcome: outcome.name)
def test_every_outcome_is_a_case_that_passes_where_it_is_green(
    gated: GatedSuite, outcome: Outcome
) -> None:
    said = [Verdict("a", outcome, "so it is"), Verdict("b", Outcome.IDENTICAL, "the same")]
    gated.monkeypatch.setattr(Session, "run", lambda self: said)
    status, cases = gated.cases()
    assert status == outcome.status
    assert (cases["main~1 a"] is None) is (outcome.status == 0) is outcome.green
    assert cases["main~1 b"] is None


@pytest.mark.long
def test_no_test_is_run_and_all_are_said_to_be_left_out(gated: GatedSuite) -> None:
    found = gated.run()
    lines(found, "2  the gate times both sides itself")


@pytest.mark.long
@pytest.mark.parametrize("bad", ["main~1", "other"])
def test_of_two_bases_the_worse_is_the_status_whichever_comes_first(
    gated: GatedSuite, bad: str
) -> None:
    git("branch", "other", "main~1")
    gated.scripts[bad] = Script("a", device=CPU)
    gated.scripts[bad].slower("a", **SLOWER)
    status, cases = gated.cases("--against=other")
    assert status == 10
    assert len(cases) == 2 + 1
    assert "SLOWER a" in str(cases[f"{bad} a"])
    assert [name for name, message in cases.items() if message] == [f"{bad} a"]


@pytest.mark.long
def test_verdicts_go_on_after_the_first_that_fails(gated: GatedSuite) -> None:
    gated.script.slower("a", **SLOWER)
    gated.script.slower("b", **SLOWER)
    for args in (["-x"], ["--maxfail=1"]):
        status, cases = gated.cases(*args)
        assert status == 10
        assert len([message for message in cases.values() if message]) == 2


# -- ends -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_session_without_verdicts_is_15(gated: GatedSuite) -> None:
    gated.monkeypatch.setattr(Session, "run", lambda self: [])
    status, cases = gated.cases()
    assert status == 15
    assert "nothing was compared" in str(cases["gate gate"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 2), (KeyError("a bug of the gate"), 3)]
)
def test_a_run_that_does_not_come_to_its_end_is_not_green(
    gated: GatedSuite, error: BaseException, status: int
) -> None:
    gated.script.on(CANDIDATE, "turn", error, launch=3)
    found, cases = gated.cases("--gate-json", "out.json")
    assert found == status
    assert all(cases.values()), "no benchmark passed"
    assert "the run did not end" in str(cases["gate gate"])
    assert gated.report()["status"] == status
    (comparison,) = gated.report()["comparisons"]
    assert not comparison["ended"]
    assert comparison["benchmarks"]["a"]["blocks"][DEVICE], "what was measured is there"


@pytest.mark.long
def test_an_interrupt_in_the_second_comparison_keeps_what_the_first_found(
    gated: GatedSuite,
) -> None:
    git("branch", "other", "main~1")
    gated.scripts["other"] = Script("a", device=CPU)
    gated.scripts["other"].on(BASE, "turn", KeyboardInterrupt())
    status, cases = gated.cases("--against=other", "--gate-json", "out.json")
    assert status == 2
    assert "the run did not end" in str(cases.pop("gate gate"))
    assert "NOT DECIDED" in str(cases.pop("other a"))
    assert cases == {"main~1 a": None, "main~1 b": None}
    assert gated.report()["status"] == 2


@pytest.mark.parametrize("text", ["0", "0.99", "-1", "nan", "inf", "1000001", "soon"])
def test_a_time_limit_is_seconds_within_limits(text: str) -> None:
    message = f"'{text}' is no time limit: use seconds from 1 to 1000000"
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        time_limit(text)
    assert [time_limit(one) for one in ("1", "187.5", "1e6")] == [1.0, 187.5, 1e6]


@pytest.mark.long
@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM", "the time limit of 600 s"])
def test_what_was_settled_before_an_interruption_is_in_the_report(
    gated: GatedSuite, way: str
) -> None:
    def interrupted(name: str) -> None:
        if way == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        if way == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # the time is over
        time.sleep(30)

    before = signal.getsignal(signal.SIGTERM)
    gated.script.alike("b")
    gated.script.on(CANDIDATE, "turn", interrupted, "a", launch=4)
    limit = ["--time-limit=600"] if "limit" in way else []
    status, cases = gated.cases("--gate-json", "out.json", *limit)
    assert status == 2
    assert cases.pop("main~1 b") is None
    assert f"NOT DECIDED a: {way} ended the gate; so far device_seconds" in str(cases["main~1 a"])
    assert f"the run did not end: {way}" in str(cases["gate gate"])
    report = gated.report()
    (comparison,) = report["comparisons"]
    assert (report["status"], comparison["ended"]) == (2, False)
    assert comparison["benchmarks"]["b"]["outcome"] == "IDENTICAL"
    with pytest.raises(UsageError, match="not green: status 2"):
        verify(gated.path / "out.json", gated.path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert gated.run().ret in (0, 2), "the next gate starts processes again"


@pytest.mark.long
def test_a_signal_while_an_interrupted_gate_reports_is_ignored(gated: GatedSuite) -> None:
    gated.script.on(CANDIDATE, "turn", lambda name: signal.raise_signal(signal.SIGINT), "a")
    plain = plugin.Gating._write

    def write(self: plugin.Gating, status: int | None) -> None:
        signal.raise_signal(signal.SIGINT)
        plain(self, status)

    gated.monkeypatch.setattr(plugin.Gating, "_write", write)
    assert gated.cases("--gate-json", "out.json")[0] == 2
    assert gated.report()["status"] == 2


@pytest.mark.long
def test_a_slowdown_that_was_not_confirmed_before_an_interruption_is_not_decided(
    gated: GatedSuite,
) -> None:
    gated.script.slower("a", **SLOWER)
    confirming = lambda: bool(gated.script.session.found["a"].verdict)  # noqa: E731
    gated.script.on(CANDIDATE, "turn", KeyboardInterrupt(), "a", when=confirming)
    status, cases = gated.cases()
    assert status == 2
    assert "which was not confirmed" in str(cases["main~1 a"])


@pytest.mark.long
@pytest.mark.parametrize("args", [[], ["--continue-on-collection-errors"]], ids=" ".join)
def test_tests_that_cannot_be_collected_are_no_0(gated: GatedSuite, args: list[str]) -> None:
    gated.write("test_broken.py", "import nothing_of_that_name")
    found = gated.run("test_broken.py", *args)
    assert found.ret in (1, 2)
    lines(found, "the run did not end")


# -- sides and the device ---------------------------------------------------------------------


@pytest.mark.long
def test_a_device_that_is_held_is_busy(gated: GatedSuite) -> None:
    with device_lock(CPU, 0):
        status, cases = gated.cases()
    assert status == 14
    assert "cpu was held by process" in str(cases["device device"])
    assert gated.run().ret == 0


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_device_that_is_disturbed_is_14(gated: GatedSuite, when: str) -> None:
    gated.monkeypatch.setattr(plugin.DeviceGuard, f"{when}_reason", "other processes compute")
    status, cases = gated.cases()
    assert status == 14
    assert "other processes compute" in str(cases["main~1 device"])
    assert (gated.script.launches > 0) is (when == "after")


@pytest.mark.long
def test_a_gpu_that_nobody_watches_is_gated_only_where_that_is_asked_for(gated: GatedSuite) -> None:
    gated.monkeypatch.setattr(plugin.DeviceGuard, "unseen", "no sensor (pip install it)")
    status, cases = gated.cases()
    assert status == 14
    assert "no sensor (pip install it); fix that, or add --unwatched" in str(cases["main~1 device"])
    assert gated.script.launches == 0
    found = gated.run("--unwatched")
    assert found.ret == 0
    lines(
        found, r"unwatched, since load and throttling cannot be read: no sensor \(pip install it\)"
    )


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["py", "json", "toml"])
def test_a_candidate_that_is_edited_meanwhile_is_none(gated: GatedSuite, suffix: str) -> None:
    """Code, tables of configurations, and lists such as that of what is accepted."""

    def edit(benchmark: str) -> int:
        gated.write(f"tinyllama/changed.{suffix}", "x = 2\n")
        return 7

    gated.script.on(CANDIDATE, "inputs", edit)
    status, cases = gated.cases()
    assert status == 15
    assert list(cases) == ["main~1 main~1"]
    assert "was edited while it was compared" in str(cases["main~1 main~1"])


# -- what a file accepts ----------------------------------------------------------------------

ENTRY = '[[accepted]]\nbenchmark = "{}"\namount = 0.9\nreason = "so"\nrelease = "{}"\n'


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (ENTRY.format("a", "99.0"), 0, None),
        (ENTRY.format("b", "99.0"), 10, "SLOWER a"),
        (ENTRY.format("gone", "99.0"), 15, "there is no such benchmark"),
        (ENTRY.format("a", "0.0.1"), 15, "it was accepted until 0.0.1"),
        ("[[accepted]", 15, "cannot be read as TOML"),
        ('[[accepted]]\nbenchmark = "a"\n', 15, "it lacks 'reason'"),
    ],
)
def test_what_is_accepted_is_read_from_the_candidates_file(
    gated: GatedSuite, content: str, status: int, text: str | None
) -> None:
    gated.script.slower("a", **SLOWER)
    gated.write("accepted_slowdowns.toml", content)
    found, cases = gated.cases()
    assert found == status
    assert text is None or text in " ".join(filter(None, cases.values()))


@pytest.mark.long
def test_what_the_base_accepts_already_is_not_accepted_again(gated: GatedSuite) -> None:
    gated.script.slower("a", **SLOWER)
    gated.write("accepted_slowdowns.toml", ENTRY.format("a", "99.0"))
    gated.commit("accepted")
    gated.write("tinyllama/changed.py", "x = 3\n")
    assert gated.run(against="main").ret == 10
    assert gated.run(against="main~1").ret == 0


# -- the report -------------------------------------------------------------------------------


@pytest.mark.long
def test_the_report_has_the_status_the_verdicts_and_all_figures(gated: GatedSuite) -> None:
    gated.script.slower("a", **SLOWER)
    assert gated.run("--gate-json", "out.json").ret == 10
    report = gated.report()
    assert report["status"] == 10
    assert [(v["against"], v["name"], v["outcome"]) for v in report["verdicts"]] == [
        ("main~1", "a", "SLOWER"),
        ("main~1", "b", "SAME"),
    ]
    (compared,) = report["comparisons"]
    assert compared["against"] == "main~1"
    assert compared["benchmarks"].keys() == {"a", "b"}


@pytest.mark.long
def test_the_summary_says_what_was_not_timed_and_where_the_time_went(gated: GatedSuite) -> None:
    gated.script.on(CANDIDATE, "left_out", {"triton is not installed": 14})
    said = gated.run("--gate-json", "out.json")
    (compared,) = gated.report()["comparisons"]
    assert compared["blocks"] > 0
    stages = {name: took for name, took in compared["seconds"].items() if ": " not in name}
    assert list(stages)[:3] == ["start", "wait", "trees"]
    took = ", ".join(f"{name} {took:.0f} s" for name, took in stages.items())
    out = "14 providers not timed: triton is not installed"
    lines(said, f"against main~1: {out}; {took}; {compared['blocks']} blocks, 0 of them discarded")
    assert compared["left_out"] == {"triton is not installed": 14}


@pytest.mark.long
def test_a_log_says_how_far_it_is(gated: GatedSuite) -> None:
    lines(gated.run(), r"^\d\d:\d\d:\d\d 2 undecided: blocks up to 4 of 20$")


@pytest.mark.long
def test_a_report_that_cannot_be_written_is_15(gated: GatedSuite) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    gated.monkeypatch.setattr(plugin, "replace_text", full)
    found = gated.run("--gate-json", "out.json")
    assert found.ret == 15
    lines(found, "out.json could not be written: no space left")


@pytest.mark.long
def test_a_report_of_an_earlier_run_does_not_stay(gated: GatedSuite) -> None:
    assert gated.run("--gate-json", "out.json").ret == 0
    gated.script.on(BASE, "make", died())
    assert gated.run("--gate-json", "out.json").ret == 18
    report = gated.report()
    assert report["status"] == 18
    assert not any(one["outcome"] in ("SAME", "IDENTICAL") for one in report["verdicts"])
    assert gated.run("--gate-json", "out.json", against="nobody").ret == 4
    assert not (gated.path / "out.json").exists()


@pytest.mark.long
def test_an_interruption_in_pinned_turns_is_not_hidden_by_processes_that_were_ended(
    gated: GatedSuite,
) -> None:
    gated.script.on(CANDIDATE, "turn", lambda name: signal.raise_signal(signal.SIGTERM), "a")
    for side in (BASE, CANDIDATE):
        gated.script.on(side, "pin", died(), when=worker.all_ended)
        gated.script.on(side, "end", died(), when=worker.all_ended)
    status, cases = gated.cases("--gate-json", "out.json")
    assert status == 2
    assert "NOT DECIDED a: SIGTERM ended the gate" in str(cases["main~1 a"])
    assert not gated.report()["comparisons"][0]["ended"]
