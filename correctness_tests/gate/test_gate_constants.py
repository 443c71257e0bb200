"""Numbers on which verdicts depend: whoever changes one changes what a gate calls slower."""

import importlib
from typing import Any

import pytest

pytest.importorskip("triton")

MIB, GIB = 1048576, 1073741824

EXPECTED: dict[str, dict[str, Any]] = {
    "tinyllama.harness.gate.attribution": {"SHARE": 0.1, "MOST": 5, "PROFILES": 9, "ALPHA": 0.01},
    "tinyllama.harness.gate.certify": {
        "GRID": (*(n * 5 / 1000 for n in range(1, 21)), 0.12, 0.15, 0.2, 0.3, 0.5, 1.0),
        **{"CONFIDENCE": 0.95, "SLOWDOWNS": (0.01, 0.02, 0.05, 0.1), "ENOUGH": 0.99},
        **{"LEAST_BLOCKS": 20, "MERGES": 100000, "LEANING": 0.001, "LEAST_LEANING": 0.2},
    },
    "tinyllama.harness.gate.decision": {
        **{"LOOKS": (4, 8, 12, 16, 20), "LEAST_SPREAD": 2e-4, "UNLIKE_HISTORY": 1e-3},
        **{"CONFIRM_BLOCKS": 8, "CONFIRM_ALPHA": 0.05},
    },
    "tinyllama.harness.gate.exact": {"COMPILE_RATIO": 1.5, "COMPILE_SECONDS": 2.0},
    "tinyllama.harness.gate.judge": {"INTERRUPTED": 2, "UNPROVEN": 15, "REPORTED": 60.0},
    "tinyllama.harness.gate.memory": {
        **{"READY": 4.0, "LAID_OUT": 2.0, "EXACT": 10.0, "SCORES": 16 * GIB, "MOST_EXACT": 100.0},
        **{"UNKNOWN": 256 * MIB, "READY_SHARE": 0.6, "EXACT_SHARE": 0.5},
    },
    "tinyllama.harness.gate.opened": {"SECONDS": 120.0},
    "tinyllama.harness.gate.pair": {
        **{"CLOCK_RATIO": 1.25, "CLOCK_SECONDS": 0.05, "PACE_MORE": 1.25, "PACES": 6},
        **{"PACED": 0.2, "PACED_CALLS": 8, "WARM_UP": 0.02, "MOST": 4, "FEWEST": 8},
        **{"READY": 600.0, "TURN": 60.0},
    },
    "tinyllama.harness.gate.pool": {"PROCESSORS": 8, "AHEAD": 4, "MEMORY": 16 * GIB},
    "tinyllama.harness.gate.proven": {"SEEDS": 2, "PLACES": 16, "SINGLE": 15, "FACTORS": 1024},
    "tinyllama.harness.gate.setting": {
        "MARGINS": {"device_seconds": 0.005, "host_seconds": 0.02},
        "MARGIN_ON_CPU": 0.02,
    },
    "tinyllama.harness.gate.side": {
        "ON_GPU": {"device_seconds": 0.02, "host_seconds": 0.12},
        **{"ON_CPU": {"device_seconds": 0.10}, "FURTHER": 0.10},
    },
    "tinyllama.harness.gate.subject": {"SPIN": 1.4, "CALLS": 6},
    "tinyllama.harness.gate.turns": {
        **{"MOST": 2.0, "ALPHA": 5e-4, "MARGIN": 0.01, "LEAST_SPREAD": 0.005, "SUSPECT": 0.04},
        **{"ERRORS": 2.0, "MOST_HELD": 2, "TURN_RATIO": 4.0},
    },
    "tinyllama.harness.gate.verified": {"SLACK": 4.0},
    "tinyllama.harness.gate.waves": {"LOOKED": 10.0, "MAX_DISCARDED": 2},
    "tinyllama.harness.measure.tuning": {"SIEVE": 8, "MARGIN": 0.01, "ROUNDS": 10, "SURVIVORS": 6},
    "tinyllama.harness.machine.worker": {
        **{"GRACE": 5.0, "TIMEOUT": 900.0, "LONGEST_ANSWER": 256 * MIB, "TOKEN": 16},
        # glibc takes no larger threshold: 4 MiB times the bytes of a long.
        "KEEPS_FREED_MEMORY": {
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "1073741824",
            "MALLOC_TOP_PAD_": "67108864",
        },
    },
}


@pytest.mark.parametrize("module", EXPECTED)
def test_numbers_that_decide_are_what_they_were_chosen_to_be(module: str) -> None:
    found = importlib.import_module(module)
    expected = EXPECTED[module]
    assert {name: getattr(found, name) for name in expected} == expected
