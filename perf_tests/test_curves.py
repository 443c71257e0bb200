"""Loss curves on real text: V3 and V4 follow V1 for a thousand steps, as far as rounding allows.

What rounding alone does is measured in the same run: V1 in this precision against V1 in float64,
from the same weights on the same batches.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.curves import GROUP, RUNS, curve, entry_of, losses_of, not_here
from tinyllama.model.tiers import V1

CLOSENESS = 2.0  # times the distance that rounding makes
Curves = dict[tuple[str, str], torch.Tensor]


@pytest.fixture(scope="module", params=[GROUP])
def group(recording: Any, device: torch.device) -> Iterator[Curves]:
    """The loss of every step of each run, float64 on the CPU."""
    reason = not_here(device)
    if reason:
        pytest.skip(reason)
    with recording.group(GROUP) as record:
        curves = {run: losses_of(*run, device) for run in RUNS}
        record.add(*(entry_of(*run, curve(losses)) for run, losses in curves.items()))
        yield curves


@pytest.mark.parametrize(("tier", "precision"), [run for run in RUNS if run[0] != "v1"])
def test_it_follows_v1(group: Curves, tier: str, precision: str) -> None:
    exact, of_v1, ours = (
        curve(group[run]) for run in (("v1", "fp64"), ("v1", precision), (tier, precision))
    )
    assert of_v1[0] - of_v1[-1] > 1, "V1 does not learn the text"
    rounding = (of_v1 - exact).abs().max().item()
    distance = (ours - of_v1).abs().max().item()
    assert distance <= CLOSENESS * rounding, (
        f"{tier} is {distance:.3g} from {V1.title} in {precision}; "
        f"rounding alone makes {rounding:.3g}"
    )
