"""Numbers on which verdicts depend: whoever changes one changes what a gate calls slower."""

from typing import Any

import pytest

pytest.importorskip("triton")

from tinyllama.harness.gate import certify, pair, pool, side
from tinyllama.harness.machine import worker
from tinyllama.harness.measure import tuning

EXPECTED: list[tuple[Any, dict[str, Any]]] = [
    (side, {"ON_GPU": {"device": 0.02, "host": 0.12}, "ON_CPU": {"device": 0.10}, "FURTHER": 0.10}),
    (pair, {"CLOCK_RATIO": 1.25, "CLOCK_SECONDS": 0.05, "PACE_MORE": 1.25}),
    (pair, {"PACES": 6, "PACED": 0.2, "PACED_CALLS": 8}),
    (pool, {"PROCESSORS": 8, "AHEAD": 4, "MEMORY": 16 * 2**30}),
    (certify, {"CONFIDENCE": 0.95, "SLOWDOWNS": (0.01, 0.02, 0.05, 0.1), "ENOUGH": 0.99}),
    (tuning, {"MARGIN": 0.01, "ROUNDS": 10, "SURVIVORS": 6}),
    # glibc takes no larger threshold: 4 MiB times the bytes of a long.
    (
        worker,
        {
            "KEEPS_FREED_MEMORY": {
                "MALLOC_MMAP_THRESHOLD_": "33554432",
                "MALLOC_TRIM_THRESHOLD_": "1073741824",
                "MALLOC_TOP_PAD_": "67108864",
            }
        },
    ),
]


@pytest.mark.parametrize(
    ("module", "numbers"), EXPECTED, ids=lambda one: getattr(one, "__name__", "")
)
def test_numbers_that_decide_are_what_they_were_chosen_to_be(
    module: Any, numbers: dict[str, Any]
) -> None:
    found = {name: getattr(module, name) for name in numbers}
    if module is side:
        names = {side.DEVICE: "device", side.HOST: "host"}
        for name in ("ON_GPU", "ON_CPU"):
            found[name] = {names[metric]: value for metric, value in found[name].items()}
    assert found == numbers
