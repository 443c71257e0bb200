"""Targets: what was claimed and what is held, where it is asserted, and when it is met."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.sample_records import bare_step
from correctness_tests.support.target_files import written
from tinyllama.bench.measure import SHORT, Measured, bars
from tinyllama.bench.measure_ops import DTYPES, PEERS
from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.bench.workloads import ALL, SHORT_OPS, SHORT_STEPS, Group, whole
from tinyllama.harness.measure.op_contender import passes_of
from tinyllama.harness.records.entries import Ratio, StepEntry
from tinyllama.harness.records.targets import OpTarget, Standing, Target, covered, judged, load
from tinyllama.model.config import PRESETS
from tinyllama.ops import OPS

H200, MI325X = "NVIDIA H200", "AMD Instinct MI325X"


def target(**changed: Any) -> Target:
    right: dict[str, Any] = {
        "tier": "v3",
        "workload": ("small",),
        "precision": (),
        "metric": "speed",
        "over": "v1",
        "at_least": 5.5,
        "device": (),
        "source": "project",
    }
    return Target(**{**right, **changed})


# -- the shipped file -------------------------------------------------------------------------

# Tier, metric, what it is over, bound. The claims that are not of a tier's step (kernels of one
# norm, a naive SwiGLU, strided inputs, bandwidth, occupancy) have no metric here.
DOCUMENTED = [
    ("v1", "samples_per_second", None, 372.9),
    ("v1", "held_bytes", None, 522.3 * 2**20),
    ("v3", "samples_per_second", None, 2065.0),
    ("v3", "speed", "v1", 5.5),
    ("v3", "held_bytes", None, 281.8 * 2**20),
    ("v3", "held_bytes", "v1", 0.54),
    ("v2", "speed", "v1", 1.6),
    ("v3", "speed", "v1", 2.2),
    ("v4", "speed", "v1", 2.8),
    ("v4-single", "kernels", "v1", 0.05),
    ("v4", "joules_per_sample", "v1", 0.68),
]

# Tier, workload, precision, metric, what it is over, bound: of the bars that no record of a GPU has
# a figure of. The others are rows of docs/BARS.md, which is stale where one of them is changed.
BARS = [
    ("v4", "small", "tf32", "speed", "fastest peer", 1.7),
    ("v4", "medium", "bf16", "speed", "fastest peer", 1.22),
    ("hf-ours", "small", "bf16", "speed", "hf", 1.0),
    ("hf-ours", "small", "bf16", "speed", "hf-liger", 1.1),
    ("v4", "medium", "tf32", "speed", "fastest peer", 1.35),
    *(("v4", w, "fp32", "speed", "floor", 1 / 1.12) for w in ("small", "medium")),
    *(("v4", "small", p, "speed", "v3", 0.99) for p in ("fp32", "tf32")),
    *(("v4", "medium", p, "speed", "v3", 0.99) for p in ("fp32", "tf32", "bf16")),
    ("v4", "medium", "bf16", "kernels", "v1", 0.08),
    ("v4-single", "small", "bf16", "kernels", "v1", 0.03),
    ("v4-single", "medium", "bf16", "kernels", "v1", 0.05),
    ("v4-small", "small", "fp32", "peak_bytes", "v1", 0.50),
    ("v4-small", "medium", "fp32", "peak_bytes", "v1", 0.22),
    ("v2", "tiny", "fp32", "held_peak_bytes", "v1", 1.05),
    ("v2", "tiny", "fp32", "copies", "v1", 1.0),
]
OP_CLAIMS = [target for target in OF_OPS if target.source.startswith("document")]


@pytest.mark.parametrize("claim", OP_CLAIMS, ids=str)
def test_a_documented_claim_about_an_op_is_judged_with_its_caveat(claim: OpTarget) -> None:
    assert claim.caveat
    assert claim.concerns(MI325X)
    better, worse = (1.01, 0.99) if claim.direction == ">=" else (0.99, 1.01)
    assert judged(claim, Ratio(*[claim.bound * better] * 3), MI325X).standing is Standing.MET
    missed = judged(claim, Ratio(*[claim.bound * worse] * 3), MI325X)
    assert missed.standing is Standing.MISSED
    assert missed.text.endswith(f" ({claim.caveat})")


def test_a_claim_about_an_op_of_another_device_has_its_bound() -> None:
    found = [str(claim) for claim in OP_CLAIMS if not claim.concerns(H200)]
    assert found == ["triton speed over naive >= 2.4"]


@pytest.mark.parametrize(("tier", "workload", "precision", "metric", "over", "bound"), BARS)
def test_a_bar_is_asserted_where_it_was_set(
    tier: str, workload: str, precision: str, metric: str, over: str, bound: float
) -> None:
    (found,) = (
        one
        for one in OF_STEPS
        if one.covers((workload, precision))
        and (one.tier, one.metric, one.over) == (tier, metric, over)
    )
    assert found.concerns(H200)
    assert found.bound == pytest.approx(bound, abs=5e-4)
    assert found.direction == (">=" if metric == "speed" else "<=")


def test_every_documented_figure_is_there_with_a_caveat_and_no_other() -> None:
    documented = [t for t in OF_STEPS if t.documented]
    found = sorted((t.tier, t.metric, str(t.over), t.bound) for t in documented)
    assert found == sorted((tier, metric, str(o), b) for tier, metric, o, b in DOCUMENTED)
    for one in documented:
        assert one.caveat, str(one)
        assert one.source.startswith("document"), str(one)
        assert (one.workload, one.precision, one.device) == (("small",), ("fp32",), ("MI325X",))


@pytest.mark.parametrize("target", OF_OPS, ids=str)
def test_a_bar_of_an_op_names_what_is_timed(target: OpTarget) -> None:
    """A name that is misspelt would be held by nothing."""
    named = [OPS[name] for name in target.op]
    assert named
    assert set(target.dtype) <= set(DTYPES)
    timed_cases = {str(case) for op in named for case in op.timed[1:]}
    assert set(target.case) <= timed_cases
    for op in named:
        assert target.provider in op.providers
        assert target.passes in passes_of(op)
        assert set(target.over or ()) <= {*op.providers, *PEERS}
        assert not target.case or any(str(case) in target.case for case in op.timed[1:])


def test_a_claim_is_asserted_on_its_own_device_alone() -> None:
    claims = [t for t in OF_STEPS if t.documented]
    assert not any(claim.concerns(H200) for claim in claims)
    assert all(claim.concerns(MI325X) for claim in claims)


@pytest.mark.parametrize(
    ("tier", "metric", "over", "bound"), [claim for claim in DOCUMENTED if claim[0] != "v4-single"]
)
def test_each_documented_figure_is_met_by_itself_and_missed_with_its_caveat(
    tier: str, metric: str, over: str | None, bound: float
) -> None:
    """A run on the device of the documents, made from the documented figures."""
    (claim,) = (
        t
        for t in OF_STEPS
        if t.documented and (t.tier, t.metric, t.over, t.bound) == (tier, metric, over, bound)
    )
    measured = Measured(Group("small", "fp32"))
    worse = 0.99 if claim.direction == ">=" else 1.01
    said = []
    for figure in (bound, bound * worse):
        if over is None:
            own = step(tier, "tier", 1.0, **{metric: figure})
        elif metric == "speed":
            own = step(tier, "tier", 1.0, over={over: Ratio(figure, figure, figure)})
        else:
            own = step(tier, "tier", 1.0, **{metric: figure * 1000})
        base = {} if over is None or metric == "speed" else {metric: 1000}
        entries = {"v1": step("v1", "tier", 5.0, **base), tier: own}
        said += bars([claim], measured, entries, MI325X)
    met, missed = said
    assert (met.standing, missed.standing) == (Standing.MET, Standing.MISSED)
    assert missed.text.endswith(f" ({claim.caveat})")


def test_a_claim_about_a_tier_that_does_not_exist_is_listed_and_not_met() -> None:
    claims = [replace(t, tier="v9") for t in OF_STEPS if t.documented and t.tier == "v4-single"]
    found = bars(claims, Measured(Group("small", "fp32")), ENTRIES, MI325X)
    assert {bar.standing for bar in found} == {Standing.NOT_APPLICABLE}
    assert len(found) == 1
    assert all(bar.text.endswith("there is no tier v9 yet") for bar in found)


# -- where a target is asserted ---------------------------------------------------------------


def test_a_device_is_named_in_part_and_in_any_case() -> None:
    assert target(device=()).concerns(H200)
    assert target(device=("h200",)).concerns(H200)
    assert not target(device=("MI325X",)).concerns(H200)
    assert target(device=("MI325X",)).concerns(MI325X)
    assert target(device=("MI325X", "h200")).concerns(H200)


def test_a_claim_of_a_device_says_so_until_there_is_a_record_of_it() -> None:
    claim = target(device=("MI325X",), documented=True)
    assert claim.never_run([H200]) == "never run on MI325X hardware"
    assert claim.never_run([H200, MI325X]) == ""
    assert target(device=()).never_run([H200]) == ""


def test_a_target_covers_the_groups_that_it_names(tmp_path: Path) -> None:
    some = {"workload": '["small", "medium"]', "precision": '"tf32"'}
    targets = load(written(tmp_path, some, {"workload": '"any"'}))
    assert [t.covers(("medium", "tf32")) for t in targets] == [True, True]
    assert [t.covers(("medium", "bf16")) for t in targets] == [False, True]
    assert [t for t in targets if t.covers(("large", "tf32"))] == targets[1:]


# -- when it is met ---------------------------------------------------------------------------


def test_a_bound_is_held_at_the_worse_end_of_the_interval() -> None:
    at_least = target(at_least=2.0)
    assert at_least.met(Ratio(2.5, 2.0, 3.0))
    assert not at_least.met(Ratio(2.5, 1.99, 3.0))
    at_most = target(metric="peak_bytes", at_least=None, at_most=0.5)
    assert at_most.met(Ratio(0.4, 0.3, 0.5))
    assert not at_most.met(Ratio(0.4, 0.3, 0.51))
    assert not at_least.met(Ratio(*[math.nan] * 3))
    assert not at_most.met(Ratio(*[math.nan] * 3))


def test_a_target_may_be_held_by_its_median() -> None:
    found = Ratio(2.5, 1.0, 4.0)
    assert target(at_least=2.5, judged_by="median").met(found)
    assert not target(at_least=2.6, judged_by="median").met(found)
    most = {"metric": "peak_bytes", "at_least": None}
    assert target(**most, at_most=2.5, judged_by="median").met(found)
    assert not target(**most, at_most=2.5).met(found)


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


def test_the_fastest_peer_is_the_fastest_that_ran() -> None:
    """Neither the floor, nor a tier, nor one that did not run; wherever it stands."""
    peer = target(over="fastest peer")
    for last in ENTRIES:
        entries = {**{n: e for n, e in ENTRIES.items() if n != last}, last: ENTRIES[last]}
        assert peer.measured(entries) == (1.9, 1.8, 2.1)
    swifter = {**ENTRIES, "slow": step("slow", "peer", 0.25)}
    assert peer.measured(swifter) == (0.25,) * 3
    assert peer.measured({n: e for n, e in ENTRIES.items() if e.role != "peer"}) is None


def test_the_fastest_of_those_that_are_named_counts() -> None:
    every = {n: seconds for seconds, n in enumerate("abcd", 1)}
    entries = {n: replace(bare_step("small-fp32", n), seconds=float(s)) for n, s in every.items()}
    for over, expected in (
        (("c", "b"), 2 / 4),
        (("c",), 3 / 4),
        (("a", "d"), 1 / 4),
        (("e",), None),
    ):
        found = target(tier="d", over=over).measured(entries)
        assert found == (None if expected is None else Ratio(*[expected] * 3))
    entries["b"] = replace(entries["b"], seconds=None)
    assert target(tier="d", over=("c", "b")).measured(entries) == Ratio(*[3 / 4] * 3)


def test_each_target_comes_with_each_call_that_it_covers() -> None:
    groups = ("small-fp32", "small-tf32", "large-fp32")
    entries = [bare_step(group, name) for group in groups for name in ("v1", "v3")]
    some = [target(), target(workload=(), precision=("fp32",))]
    found = [(one, call, sorted(own)) for one, call, own in covered(some, entries)]
    calls = [(some[0], "small", "fp32"), (some[0], "small", "tf32")]
    calls += [(some[1], "small", "fp32"), (some[1], "large", "fp32")]
    assert found == [(one, tuple(call), ["v1", "v3"]) for one, *call in calls]


MET, MISSED, NEITHER = Standing.MET, Standing.MISSED, Standing.NOT_APPLICABLE
NOTHING = ": measured nothing that tells"
FAR = {"at_least": 9.0}


@pytest.mark.parametrize(
    ("changed", "cannot", "standing", "said"),
    [
        ({"at_least": 5.7}, "", MET, ""),
        ({"at_least": 5.8}, "", MISSED, ">= 5.8: measured 5.900 [5.700, 6.100]"),
        # Its entry lacks the metric, there is no entry, or what it is over failed.
        ({"metric": "live_bytes"}, "", MISSED, NOTHING),
        ({"tier": "v2"}, "", MISSED, NOTHING),
        ({"over": "broken"}, "", MISSED, NOTHING),
        # What cannot run here excuses a target that is over it; what was measured is judged.
        ({"over": "broken"}, "broken", NEITHER, ": broken: not installed"),
        ({"over": "broken"}, "another", MISSED, NOTHING),
        ({"tier": "v2"}, "v2", NEITHER, ": v2: not installed"),
        ({"at_least": 5.8}, "v1", MISSED, ""),
        # A target of another group, device or tier is not missed.
        (FAR, "", MISSED, ""),
        ({**FAR, "workload": ("medium",)}, "", None, ""),
        ({**FAR, "precision": ("bf16",)}, "", None, ""),
        ({**FAR, "device": ("MI325X",)}, "", NEITHER, f": it is about MI325X, and this is {H200}"),
        ({"tier": "v9"}, "", NEITHER, ": there is no tier v9 yet"),
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


def test_the_ratios_of_any_device_are_asserted_on_a_device_without_bars_of_its_own() -> None:
    def about(workload: str) -> set[tuple[object, ...]]:
        return {
            (t.tier, t.metric, t.over)
            for t in OF_STEPS
            if t.covers((workload, "fp32")) and t.concerns("some other card")
        }

    learning = {(tier, "gradient_share", None) for tier in ("v1", "v2", "v3")}
    held = {(tier, "held_bytes", "v1") for tier in ("v2", "v3", "v4")}
    order = {("v2", "speed", "v1"), ("v3", "speed", "v2"), ("v4", "speed", "v3")}
    counts = {(tier, metric, "v1") for tier in ("v2", "v3") for metric in ("kernels", "copies")}
    peaks = {("v3", "peak_bytes", "v1"), ("v3-small", "peak_bytes", "v1")}
    assert about("small") == about("medium") == learning | held | order | counts | peaks
    on_cpu = {("v2", "copies", "v1"), ("v2", "held_peak_bytes", "v1")}
    assert about("tiny") == learning | held | on_cpu, "a CPU counts no kernels"


@pytest.mark.parametrize(
    ("ratio", "standing"),
    [
        (1.0, Standing.MET),
        (0.97, Standing.MISSED),
        (0.54, Standing.MISSED),
        (1.03, Standing.MISSED),
    ],
)
@pytest.mark.parametrize("device", [H200, MI325X, "some CPU"])
def test_tiers_hold_alike_on_every_device(ratio: float, standing: Standing, device: str) -> None:
    """0.54 is the documented ratio, of a step in which one parameter learns."""
    held = [t for t in OF_STEPS if t.metric == "held_bytes" and not t.documented]
    both = [(">=", 0.98), ("<=", 1.02)]
    for tier in ("v2", "v3", "v4"):
        assert [(t.direction, t.bound) for t in held if t.tier == tier] == both
    targets = [t for t in held if t.tier == "v3"]
    entries = {
        "v1": step("v1", "tier", 1.0, held_bytes=1000),
        "v3": step("v3", "tier", 1.0, held_bytes=round(1000 * ratio)),
    }
    found = bars(targets, Measured(Group("small", "fp32")), entries, device)
    missed = [bar for bar in found if bar.standing is Standing.MISSED]
    assert len(found) == 2
    assert bool(missed) is (standing is Standing.MISSED)
    assert all("the documented 0.54 leaves out" in bar.text for bar in missed)


def test_the_share_of_right_gradients_is_of_all_parameters() -> None:
    learns = target(tier="v1", metric="gradient_share", over=None, at_least=1.0)
    for right, met in ((74, True), (73, False), (1, False)):
        found = learns.measured({"v1": step("v1", "tier", 1.0, gradients=right, parameters=74)})
        assert found is not None
        assert learns.met(found) is met
    assert learns.measured({"v1": step("v1", "tier", 1.0)}) is None


def test_a_step_without_copies_meets_a_bar_on_copies() -> None:
    fewer = target(metric="copies", at_least=None, at_most=1.0)
    each = {"v1": step("v1", "tier", 1.0, copies=5), "v3": step("v3", "tier", 1.0, copies=0)}
    found = fewer.measured(each)
    assert found == (0.0, 0.0, 0.0)
    assert fewer.met(found)


def test_the_documented_memory_is_in_mebibytes() -> None:
    """The documented difference is the optimizer's state of the 73 tensors that got no gradient:
    two moments of all parameters but the embedding, in MiB and not in millions of bytes."""
    model = PRESETS["small"]
    states = 2 * 4 * (model.parameters - model.vocab_size * model.hidden_dim)
    claims = {t.tier: t.bound for t in OF_STEPS if t.metric == "held_bytes" and t.over is None}
    assert claims["v1"] - claims["v3"] == pytest.approx(states, rel=0.002)


def test_a_bar_over_the_fastest_peer_names_the_peers_that_were_not_timed() -> None:
    measured = Measured(Group("small", "fp32"), cannot={"hf-autotune": "not searched", "v4": "no"})
    (bar,) = bars([target(over="fastest peer")], measured, ENTRIES, H200)
    assert bar.text.startswith("without hf-autotune: v3 speed over fastest peer")
    for over, cannot in (("v1", measured.cannot), ("fastest peer", {})):
        (bar,) = bars([target(over=over)], replace(measured, cannot=cannot), ENTRIES, H200)
        assert bar.text.startswith("v3 speed")


def test_the_short_set_has_bars_and_is_timed_on_a_gpu() -> None:
    """And the contenders that these bars are about are timed, but for these."""
    hugging_face = {"hf-eager", "hf", "hf-liger", "hf-ours"}
    left_out = {"small": hugging_face, "medium": {"hf-eager", "v2", "v4-single"}}
    timed = {str(group): group for group in ALL}
    for name in map(whole, SHORT_STEPS):
        about = [t for t in OF_STEPS if t.covers((timed[name].workload, timed[name].precision))]
        assert any(t.concerns("some other card") for t in about)
        workload = timed[name].workload
        for one in (t for t in about if t.concerns(H200)):
            needed = {one.tier, one.over} - {"fastest peer", None} - left_out[workload]
            assert needed <= {*SHORT[workload]}, one
    assert {whole(name) for name in SHORT_OPS} <= {f"ops-{dtype}" for dtype in DTYPES}
