"""What each part of V2 is worth: every part can be switched off, and is timed so."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllama.bench.measure import Measured, measure
from tinyllama.bench.switches import GROUPS, PARTS, entries_of, group_of
from tinyllama.bench.workloads import not_here


@pytest.fixture(scope="module", params=GROUPS)
def group(
    request: pytest.FixtureRequest, recording: Any, device: torch.device
) -> Iterator[Measured]:
    this = group_of(request.param)
    reason = not_here(this, device)
    if reason:
        pytest.skip(reason)
    with recording.group(request.param) as record:
        measured = measure(this, device, PARTS)
        record.add(*entries_of(measured))
        yield measured


@pytest.mark.slow("compiles V2 once more for each of its parts")
def test_parts_of_v2(group: Measured) -> None:
    """Every part can be switched off, and the step is right without it."""
    assert not group.failed, {name: str(error) for name, error in group.failed.items()}
