"""Loss curves on real text: V3 follows V1 for a thousand steps, as closely as rounding allows.

What rounding alone does is measured in the same run: V1 in this precision against V1 in float64,
from the same weights on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.curves import GROUP, RUNS, curve, entry_of, not_here
from tinyllama.model.tiers import V1

CLOSENESS = 2.0  # times the distance that rounding makes
Curves = dict[tuple[str, str], torch.Tensor]


@pytest.fixture(scope="module", params=[GROUP])
def group(recording: Any, device: torch.device) -> Iterator[Curves]:
    """The smoothed loss of each run, float64 on the CPU."""
    reason = not_here(device)
    if reason:
        pytest.skip(reason)
    with recording.group(GROUP) as record:
        found = {run: curve(*run, device) for run in RUNS}
        record.add(*(entry_of(*run, losses) for run, losses in found.items()))
        yield found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_v3_follows_v1(group: Curves, precision: str) -> None:
    exact, own, ours = (
        group[run] for run in (("v1", "fp64"), ("v1", precision), ("v3", precision))
    )
    assert own[0] - own[-1] > 1, "V1 does not learn the text"
    rounding = (own - exact).abs().max().item()
    distance = (ours - own).abs().max().item()
    assert distance <= CLOSENESS * rounding, (
        f"V3 is {distance:.3g} from {V1.title} in {precision}; rounding alone makes {rounding:.3g}"
    )
