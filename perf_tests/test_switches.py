"""What each part of V2 is worth: the step with that part switched off, in turn with V2 as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.measure import Contender, Measured, measure
from tinyllama.bench.workloads import Group, not_here
from tinyllama.harness.measure.rounds import summary
from tinyllama.model.tiers import V2

FACTORY = "tinyllama.bench.steps:TierStep"
PARTS = (
    Contender("v2", V2.title, "tier", FACTORY, {"tier": "v2"}),
    *(
        Contender(f"without {part}", "", "tier", FACTORY, {"tier": "v2", "without": [part]})
        for part in ("capture", "compile", *V2.switches)
    ),
)
PREFIX = "parts-"
GROUPS = [f"{PREFIX}small-{precision}" for precision in ("fp32", "tf32", "bf16")]


@pytest.fixture(scope="module", params=GROUPS)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[Measured]:
    this = Group.parse(request.param.removeprefix(PREFIX))
    reason = not_here(this, device)
    if reason:
        pytest.skip(reason)
    with recording.group(request.param) as record:
        measured = measure(this, device, PARTS)
        for name, seconds in measured.seconds.items():
            over = {} if name == "v2" else {"over_v2": measured.over(name, "v2").as_list()}
            entry = {**vars(this), "contender": name, **summary("seconds", seconds), **over}
            record.add(f"parts/{this}/{name}", "part", rounds=len(seconds), **entry)
        yield measured


@pytest.mark.slow("compiles V2 once more for each of its parts")
def test_parts_of_v2(group: Measured) -> None:
    """Every part can be switched off, and the step is right without it."""
    assert not group.failed, {name: str(error) for name, error in group.failed.items()}
