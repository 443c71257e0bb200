"""Bars that are missed as is known: of one device, no worse than recorded, and truly missed."""

from typing import Any

import pytest

from tinyllama.bench.targets import OF_OPS, OF_STEPS
from tinyllama.harness.records.entries import OpEntry, Ratio, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.records.targets import Bounded, Standing, Target, covered, judged
from tools.result_tables import newest

H200, OTHER = "NVIDIA H200", "NVIDIA H100"
MET, MISSED, KNOWN = Standing.MET, Standing.MISSED, Standing.KNOWN_MISS
FOUND = Ratio(5.9, 5.7, 6.1)


@pytest.mark.parametrize(
    ("bound", "held", "found", "device", "standing"),
    [
        ({"at_least": 5.8}, 5.7, FOUND, H200, KNOWN),
        ({"at_least": 5.8}, 5.71, FOUND, H200, MISSED),
        ({"at_least": 5.8}, 5.7, FOUND, OTHER, MISSED),
        ({"at_least": 5.8}, 5.7, None, H200, MISSED),
        ({"at_least": 5.7}, 5.6, FOUND, H200, MET),
        ({"at_most": 6.0}, 6.1, FOUND, H200, KNOWN),
        ({"at_most": 6.0}, 6.05, FOUND, H200, MISSED),
    ],
)
def test_a_known_miss_is_of_one_device_and_no_worse(
    bound: dict[str, Any], held: float, found: Ratio | None, device: str, standing: Standing
) -> None:
    every: dict[str, Any] = {"workload": (), "precision": (), "device": (), "source": "project"}
    about: dict[str, Any] = {"tier": "v3", "metric": "speed", "over": "v1", "caveat": "why"}
    one = Target(**every, **about, **bound, known_misses=(("h200", held),))
    bar = judged(one, found, device)
    assert bar.standing is standing
    said = f" (why); a known miss, held to {one.direction} {held:g}"
    assert bar.text.endswith(said) is (standing is not MET and device == H200)


def test_the_bars_that_the_newest_records_miss_are_the_known_misses() -> None:
    """A new miss is none of them, and a bar that is met has none."""
    missed, known = set(), set()
    each: list[tuple[Record, Bounded, tuple[str, ...], Ratio | None]] = []
    for record in (one for group in newest(StepEntry) for one in group):
        steps = covered(OF_STEPS, record.of(StepEntry))
        each += [(record, one, call, one.measured(entries)) for one, call, entries in steps]
    for record in (one for group in newest(OpEntry) for one in group):
        ops = covered(OF_OPS, record.of(OpEntry))
        each += [(record, one, call, one.measured(entries)) for one, call, entries in ops]
    for record, one, call, found in each:
        where = (str(one), *call, record.device)
        if found is not None and one.concerns(record.device) and not one.met(found):
            missed.add(where)
            assert judged(one, found, record.device).standing is KNOWN, where
        if one.held_to(record.device) is not None:
            known.add(where)
    assert missed
    assert missed == known
