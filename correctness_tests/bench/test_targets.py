"""Targets: what was claimed and what is held, where it is asserted, and when it is met."""

import math
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.sample_records import bare_step
from tinyllama.bench.measure import SHORT, Measured, bars
from tinyllama.bench.measure_ops import DTYPES, PEERS
from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.bench.workloads import SHORT_STEPS, Group, whole
from tinyllama.harness.measure.op_contender import passes_of
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import (
    Bounded,
    OpTarget,
    Standing,
    Target,
    TargetError,
    covered,
    load,
    load_ops,
)
from tinyllama.ops import OPS
from tools.result_tables import newest

H200, MI325X = "NVIDIA H200", "AMD Instinct MI325X"


def target(**changed: Any) -> Target:
    right: dict[str, Any] = {"tier": "v3", "metric": "speed", "over": "v1", "at_least": 5.5}
    return Target(**{**right, **changed})


# -- the shipped file -------------------------------------------------------------------------


def missed(record: Record) -> list[str]:
    """The bars that a record misses; one about what it has not is not among them."""
    of_steps = covered(OF_STEPS, record.of(StepEntry))
    of_ops = covered(OF_OPS, record.of(OpEntry))
    about: list[tuple[Bounded, Any, Any]] = [*of_steps, *of_ops]
    return [
        f"{'-'.join(call)}: {bar}"
        for bar, call, entries in about
        if bar.concerns(record.device) and (ratio := bar.measured(entries)) and not bar.met(ratio)
    ]


def test_the_newest_records_meet_every_bar() -> None:
    """Of those that are committed: a bar that is missed fails the run that measured it."""
    stored = [record for kind in (StepEntry, OpEntry) for each in newest(kind) for record in each]
    assert {record.group: missed(record) for record in stored if missed(record)} == {}


def test_a_claim_of_the_documents_has_a_caveat_and_is_asserted_on_its_own_device() -> None:
    claims = [bar for bar in OF_STEPS if bar.documented]
    assert ("v3", "speed", "v1", 5.5) in {(t.tier, t.metric, t.over, t.bound) for t in claims}
    for claim in claims:
        assert claim.caveat, str(claim)
        assert claim.concerns(MI325X)
        assert not claim.concerns(H200)
        assert claim.never_run([H200]) == "never run on MI325X hardware"
        assert claim.never_run([H200, MI325X]) == ""


@pytest.mark.parametrize("bar", OF_OPS, ids=str)
def test_a_bar_of_an_op_names_what_is_timed(bar: OpTarget) -> None:
    """A name that is misspelt would be held by nothing."""
    named = [OPS[name] for name in bar.op]
    assert named
    assert set(bar.dtype) <= set(DTYPES)
    assert set(bar.case) <= {str(case) for op in named for case in op.timed[1:]}
    for op in named:
        assert bar.provider in op.providers
        assert bar.passes in passes_of(op)
        assert set(bar.over or ()) <= {*op.providers, *PEERS}
        assert not bar.case or any(str(case) in bar.case for case in op.timed[1:])


def test_the_short_set_times_what_its_bars_are_about() -> None:
    """But for Hugging Face's eager steps, and what takes long on medium."""
    hugging_face = {"hf-eager", "hf", "hf-liger", "hf-ours"}
    left_out = {"small": hugging_face, "medium": {"hf-eager", "v2", "v4-single"}}
    for group in map(Group.parse, map(whole, SHORT_STEPS)):
        about = [bar for bar in OF_STEPS if bar.covers((group.workload, group.precision))]
        for bar in (bar for bar in about if bar.concerns(H200)):
            needed = {bar.tier, bar.over} - {"fastest peer", None} - left_out[group.workload]
            assert needed <= {*SHORT[group.workload]}, bar


RIGHT = 'tier = "v3"\nmetric = "speed"\nover = "v1"\nat_least = 5.5\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RIGHT + "speed = 5", "unknown key 'speed': use at_least"),
        (RIGHT.replace("tier", "# tier"), "it lacks 'tier': add it"),
        (RIGHT + "at_most = 6", "give at_least or at_most, and not both"),
        (RIGHT.replace("5.5", "nan"), "its bound is nan: use a number above 0"),
        (RIGHT.replace('"speed"', '"fun"'), "unknown metric 'fun': use speed"),
        (RIGHT.replace("over", "# over"), "a speed is a ratio: say over what"),
    ],
)
def test_a_target_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f"[[target]]\n{text}\n")
    with pytest.raises(TargetError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, target 1: {said}")


def test_a_table_may_name_several_tiers_and_leaves_out_what_it_does_not_restrict(
    tmp_path: Path,
) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(
        'target = [{ tier = ["v1", "v3"], metric = "held_bytes", at_most = "522.5 MiB" }]\n'
        'op = [{ provider = "triton", op = "rope", passes = "forward", metric = "speed", '
        'over = ["torch", "liger"], at_least = 1.0 }]\n'
    )
    assert [(bar.tier, bar.bound) for bar in load(path)] == [
        ("v1", 547_880_960.0),
        ("v3", 547_880_960.0),
    ]
    assert all(bar.covers(("large", "tf32")) and bar.concerns(H200) for bar in load(path))
    (bar,) = load_ops(path)
    assert (bar.op, bar.over, bar.case) == (("rope",), ("torch", "liger"), ())


# -- when it is met ---------------------------------------------------------------------------


def test_a_bar_is_judged_by_the_median() -> None:
    assert target(at_least=2.5).met(Ratio(2.5, 1.0, 4.0))
    assert not target(at_least=2.51).met(Ratio(2.5, 1.0, 4.0))
    at_most = target(metric="peak_bytes", at_least=None, at_most=0.5)
    assert at_most.met(Ratio(0.5, 0.3, 0.9))
    assert not at_most.met(Ratio(0.51, 0.3, 0.9))
    assert not target().met(Ratio(*[math.nan] * 3))
    assert not at_most.met(Ratio(*[math.nan] * 3))


def step(name: str, role: str, seconds: float | None = None, **fields: Any) -> StepEntry:
    return bare_step("small-fp32", name, role, seconds=seconds, **fields)


OVER = {"v1": Ratio(5.9, 5.7, 6.1), "swift": Ratio(1.9, 1.8, 2.1)}
ENTRIES = {
    entry.contender: entry
    for entry in (
        step("v1", "tier", 6.0, kernels=2000),
        step("v3", "tier", 1.0, kernels=100, over=OVER),
        step("slow", "peer", 3.0),
        step("swift", "peer", 2.0),
        step("broken", "peer", cannot="it is not installed"),
        step("floor", "floor", 0.5),
    )
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, OVER["v1"]),
        ({"over": "fastest peer"}, OVER["swift"]),  # neither the floor, nor a tier
        ({"over": "floor"}, (0.5,) * 3),  # the medians are all there is
        ({"metric": "kernels"}, (0.05,) * 3),
        ({"metric": "kernels", "over": None}, (100,) * 3),
        ({"tier": "v9"}, None),
        ({"over": "broken"}, None),
        ({"metric": "joules_per_sample"}, None),
    ],
)
def test_a_ratio_of_times_has_its_interval_and_others_are_figures(
    changed: dict[str, Any], expected: tuple[float, ...] | None
) -> None:
    assert target(**changed).measured(ENTRIES) == expected


MET, MISSED, NEITHER = Standing.MET, Standing.MISSED, Standing.NOT_APPLICABLE
NOTHING = ": measured nothing that tells"


@pytest.mark.parametrize(
    ("changed", "cannot", "standing", "said"),
    [
        ({"at_least": 5.9}, "", MET, ""),
        ({"at_least": 6.0, "caveat": "why"}, "", MISSED, "measured 5.900 [5.700, 6.100] (why)"),
        # Its entry lacks the metric, there is no entry, or what it is over failed.
        ({"metric": "live_bytes"}, "", MISSED, NOTHING),
        ({"tier": "v2"}, "", MISSED, NOTHING),
        ({"over": "broken"}, "", MISSED, NOTHING),
        # What cannot run here excuses a target that is over it.
        ({"over": "broken"}, "broken", NEITHER, ": broken: not installed"),
        ({"over": "broken"}, "another", MISSED, NOTHING),
        ({"tier": "v2"}, "v2", NEITHER, ": v2: not installed"),
        # A target of another group or device is not missed.
        ({"at_least": 9.0, "workload": ("medium",)}, "", None, ""),
        ({"at_least": 9.0, "precision": ("bf16",)}, "", None, ""),
        ({"device": ("MI325X",)}, "", NEITHER, f": it is about MI325X, and this is {H200}"),
        ({"device": ("h200",)}, "", MET, ""),
    ],
)
def test_a_target_is_met_or_missed_or_does_not_apply_and_says_why(
    changed: dict[str, Any], cannot: str, standing: Standing | None, said: str
) -> None:
    """In a run of the group small-fp32 with `ENTRIES`."""
    measured = Measured(Group("small", "fp32"), cannot={cannot: "not installed"})
    found = bars([target(**changed)], measured, ENTRIES, H200)
    assert [bar.standing for bar in found] == ([standing] if standing else [])
    assert all(bar.text.endswith(said) for bar in found)


@pytest.mark.parametrize(("right", "met"), [(74, True), (73, False)])
def test_the_share_of_right_gradients_is_of_all_parameters(right: int, met: bool) -> None:
    learns = target(metric="gradient_share", over=None, at_least=1.0)
    entries = {"v3": step("v3", "tier", 1.0, gradients=right, parameters=74)}
    ratio = learns.measured(entries)
    assert ratio is not None
    assert learns.met(ratio) is met


def test_a_bar_over_the_fastest_peer_names_the_peers_that_were_not_timed() -> None:
    measured = Measured(Group("small", "fp32"), cannot={"hf-autotune": "not searched"})
    (bar,) = bars([target(over="fastest peer")], measured, ENTRIES, H200)
    assert bar.text.startswith("without hf-autotune: v3 speed over fastest peer")
