"""Targets: what was claimed and what is held, where it is asserted, and when it is met."""

from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.sample_records import bare_step
from tinyllama.bench.measure import SHORT, StepGroup, bars
from tinyllama.bench.measure_ops import DTYPES, PEERS
from tinyllama.bench.targets import TARGETS
from tinyllama.bench.workloads import SHORT_STEPS, Group, full_group
from tinyllama.harness.measure.op_contender import passes_of
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry
from tinyllama.harness.records.targets import SPEED, Standing, Target, TargetError, covered, load
from tinyllama.ops import OPS
from tools.tables import newest

CPU = torch.device("cpu")
H200, MI325X = "NVIDIA H200", "AMD Instinct MI325X"
OF_STEPS = [target for target in TARGETS if target.kind is StepEntry]
OF_OPS = [target for target in TARGETS if target.kind is OpEntry]


def target(**changed: Any) -> Target:
    """A bar of V3 over V1, with other fields."""
    fields: dict[str, Any] = {"who": "v3", "metric": SPEED, "over": ("v1",), "direction": ">="}
    return Target(**{"kind": StepEntry, "bound": 5.5, **fields, **changed})


# -- the shipped file -------------------------------------------------------------------------


def test_the_newest_records_meet_every_bar() -> None:
    """Of those that are committed: a bar that is missed fails the run that measured it."""
    missed = [
        f"{record.device} {record.group} {' '.join(call)}: {bar}"
        for kind in (StepEntry, OpEntry)
        for records in newest(kind)
        for record in records
        for bar, call, entries in covered(TARGETS, record.of(kind))
        if bar.concerns(record.device) and (ratio := bar.measured(entries)) and not bar.met(ratio)
    ]
    assert missed == []


def test_a_claim_of_the_documents_has_a_caveat_and_is_asserted_on_its_own_device() -> None:
    claims = [target for target in OF_STEPS if target.device == ("MI325X",)]
    assert ("v3", SPEED, ("v1",), 5.5) in {(t.who, t.metric, t.over, t.bound) for t in claims}
    for claim in claims:
        assert claim.caveat, str(claim)
        assert claim.concerns(MI325X)
        assert not claim.concerns(H200)


@pytest.mark.parametrize("bar", OF_OPS, ids=str)
def test_a_bar_of_an_op_names_what_is_timed(bar: Target) -> None:
    """A name that is misspelt would be held by nothing."""
    ops = [OPS[name] for name in bar.about["op"]]
    cases = {str(case) for op in ops for case in op.timed[1:]}
    assert set(bar.about.get("case", ())) <= cases
    assert set(bar.about.get("dtype", ())) <= set(DTYPES)
    for op in ops:
        assert bar.who in op.providers
        assert set(bar.about["passes"]) <= set(passes_of(op))
        assert set(bar.over) <= {*op.providers, *PEERS}


def test_the_short_set_times_what_its_bars_are_about() -> None:
    """But for Hugging Face's eager steps, and what takes long on medium."""
    hugging_face = {"hf-eager", "hf", "hf-liger", "hf-ours"}
    left_out = {"small": hugging_face, "medium": {"hf-eager", "v2", "v4-single"}}
    for group in map(Group.parse, map(full_group, SHORT_STEPS)):
        step = bare_step(str(group), "v1")
        for bar in (bar for bar in OF_STEPS if bar.covers(step) and bar.concerns(H200)):
            needed = {bar.who, *bar.over} - {"fastest peer"} - left_out[group.workload]
            assert needed <= {*SHORT[group.workload]}, bar


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('bars = ["v3 speed over v1 > 5"]', "write WHO METRIC"),
        ('bars = ["v3 speed >= 5"]', "a speed is a ratio: say over what"),
        ('bars = ["v3 fun over v1 >= 5"]', "'fun' is no field of StepEntry"),
        ('bars = ["v3 kernels <= nan"]', "write WHO METRIC"),
        ("bars = []", "length >= 1 - at `$.step[0].bars`"),
        ('about = { colour = "red" }\nbars = ["v3 kernels <= 3"]', "'colour' is no field"),
        ('workload = "small"\nbars = ["v3 kernels <= 3"]', "unknown field `workload`"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(f"[[step]]\n{lines}\n")
    with pytest.raises(TargetError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}")
    assert message in str(error.value)


def test_a_line_may_be_about_several_and_a_table_about_all(tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    path.write_text(
        '[[step]]\nbars = ["v1, v3 held_bytes <= 522.5 MiB (why)"]\n'
        '[[op]]\nabout = { op = "rope" }\nbars = ["triton speed over torch / liger >= 1.0"]\n'
    )
    first, second, of_op = load(path)
    for bar, who in ((first, "v1"), (second, "v3")):
        assert (bar.who, bar.bound, bar.caveat) == (who, 547_880_960.0, "why")
        assert bar.covers(bare_step("large-tf32", "v9"))
        assert bar.concerns(H200)
    assert (of_op.over, of_op.about) == (("torch", "liger"), {"op": ("rope",)})


# -- when it is met ---------------------------------------------------------------------------


def step(name: str, role: str, seconds: float | None = None, **fields: Any) -> StepEntry:
    return bare_step("small-fp32", name, role, seconds=seconds, **fields)


OVER = {"v1": Ratio(5.9, 5.7, 6.1), "swift": Ratio(1.9, 1.8, 2.1)}
ENTRIES = {
    entry.contender: entry
    for entry in (
        step("v1", "tier", 6.0, kernels=2000, gradients=73, parameters=74),
        step("v3", "tier", 1.0, kernels=100, over=OVER),
        step("slow", "peer", 3.0),
        step("swift", "peer", 2.0),
        step("broken", "peer", cannot="it is not installed"),
        step("floor", "floor", 0.5),
    )
}
MET, MISSED, NEITHER = Standing.MET, Standing.MISSED, Standing.NOT_APPLICABLE
NOTHING = ": measured nothing that tells"


@pytest.mark.parametrize(
    ("changed", "cannot", "standing", "text"),
    [
        ({"bound": 5.9}, "", MET, "measured 5.900 [5.700, 6.100]"),
        ({"bound": 6.0, "caveat": "why"}, "", MISSED, "measured 5.900 [5.700, 6.100] (why)"),
        # Neither the floor nor a tier is a peer; a ratio of medians has no interval.
        ({"over": ("fastest peer",), "bound": 1.9}, "", MET, "measured 1.900 [1.800, 2.100]"),
        ({"over": ("floor",), "bound": 0.5}, "", MET, "measured 0.5"),
        ({"metric": "kernels", "bound": 0.05}, "", MET, "measured 0.05"),
        ({"metric": "kernels", "over": (), "bound": 101.0}, "", MISSED, "measured 100"),
        ({"who": "v1", "metric": "gradient_share", "over": ()}, "", MISSED, "measured 0.986"),
        # As many digits as it takes to see the miss.
        ({"bound": 5.9004}, "", MISSED, "measured 5.90000 [5.700, 6.100]"),
        # Its entry lacks the metric, there is no entry, or what it is over failed.
        ({"metric": "live_bytes"}, "", MISSED, NOTHING),
        ({"who": "v2"}, "", MISSED, NOTHING),
        ({"over": ("broken",)}, "", MISSED, NOTHING),
        # What cannot run here excuses a target that is over it.
        ({"over": ("broken",)}, "broken", NEITHER, ": broken: not installed"),
        ({"over": ("broken",)}, "another", MISSED, NOTHING),
        ({"who": "v2"}, "v2", NEITHER, ": v2: not installed"),
        # A target of another group or device is not missed.
        ({"bound": 9.0, "about": {"workload": ("medium",)}}, "", None, ""),
        ({"device": ("MI325X",)}, "", NEITHER, f": it is about MI325X, and this is {H200}"),
        ({"device": ("h200",)}, "", MET, ""),
    ],
)
def test_a_target_is_met_or_missed_or_does_not_apply(
    changed: dict[str, Any], cannot: str, standing: Standing | None, text: str
) -> None:
    """In a run of the group small-fp32 with `ENTRIES`."""
    measured = StepGroup(Group("small", "fp32"), CPU)
    measured.cannot[cannot] = "not installed"
    judged = bars([target(**changed)], measured, ENTRIES, H200)
    assert [bar.standing for bar in judged] == ([standing] if standing else [])
    assert all(bar.text.endswith(text) for bar in judged)


def test_a_bar_over_the_fastest_peer_names_the_peers_that_were_not_timed() -> None:
    measured = StepGroup(Group("small", "fp32"), CPU)
    measured.cannot["hf-autotune"] = "not searched"
    (bar,) = bars([target(over=("fastest peer",))], measured, ENTRIES, H200)
    assert bar.text.startswith("without hf-autotune: v3 speed over fastest peer")
