"""Numbers that were chosen for what is right, measured, refused or kept: whoever changes one states
it here too."""

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

MIB, GIB, HOUR = 1048576, 1073741824, 3600

EXPECTED: dict[str, dict[str, Any]] = {
    # What is right: bounds of errors, and how much is tried.
    "tinyllama.harness.correct.compare": {"SLACK": 3.0, "ACCUMULATION": 2.0**-21},
    "tinyllama.harness.correct.cases": {"PERTURBATIONS": 8, "SUBSETS": 3, "WIDER": 16.0},
    "tinyllama.harness.correct.layouts": {"FAINTNESS": {torch.float16: 2.0**-17}},
    "tinyllama.harness.correct.offsets": {"BEYOND": 2 * GIB, "APART": GIB + 64},
    "tinyllama.harness.correct.checks.accuracy": {"LITTLE": 256.0},
    "tinyllama.harness.correct.checks.blocks": {"LONG": (1025, 259), "MOST": 32768, "FLAT": 256},
    "tinyllama.harness.correct.checks.between": {
        **{"IN_FLIGHT": 9, "COUNTED": 3, "POINTS": 6, "ALIKE": 0.001},
    },
    "tinyllama.harness.correct.checks.calls": {
        **{"REPEATS": {"cpu": 3, "cuda": 50}, "LAST": 4, "LARGE": 1024.0, "MOST_APART": 0.001},
        "LOSS_SCALES": (8192, 512, 32),
    },
    "tinyllama.harness.correct.checks.configurations": {"SECONDS": 60.0},
    "tinyllama.harness.correct.checks.finding": {"SUBSETS": 5},
    "tinyllama.harness.correct.checks.first": {"BEYOND": 1},
    "tinyllama.harness.correct.checks.frameworks": {"DRAWS": 4},
    "tinyllama.harness.correct.checks.guards": {"WIDTH": 65536, "CANARY": 0xA5, "ALIGNED": 16},
    "tinyllama.harness.correct.checks.large": {"ENTRIES": 8, "GAP": 64, "APART": 3},
    "tinyllama.harness.correct.checks.last_entries": {
        **{"MANY": 2**24, "UNLIKE_MANY": 0.03, "ENDS": 64, "NOISE": 0.2},
    },
    "tinyllama.harness.correct.checks.remote": {
        **{"MOST_ENDED": 6, "SECONDS": 300, "GROUP": 24 * HOUR, "RESERVE": GIB},
    },
    "tinyllama.harness.correct.checks.sizes": {
        "SIZES": (
            *(1, 2, 3, 67, 72, 80, 96, 131, 192, 259, 384, 768, 770, 1024, 1025, 1536, 2051, 3072),
            *(4096, 4099, 8197, 16388, 65539),
        ),
        **{"BOTH": 131, "ALL": 67, "OF_EXTREMES": 259, "OF_LAYOUTS": 1025},
        **{"LOST": 8.0, "FEW": 3, "OF_SUMS": 2051},
        **{"OTHERS": 3, "WITH_NONE": (3, 0, 2), "LEADING": ((), (5,), (2, 3), (2, 1, 3))},
    },
    "tinyllama.harness.correct.checks.resizing": {
        **{"MOST_ELEMENTS": 2097152, "DRAWN": 4096, "SECONDS": 10.0, "UNLIKE": 0.1, "TRIES": 8},
    },
    "tinyllama.harness.correct.checks.settings": {
        **{"SEEN": 0.05, "FACTORS": (0.5, 3.0, 1e3, 1e6), "STEPS": (1, -1, 2)},
    },
    "tinyllama.harness.correct.checks.differing": {
        **{"MOST_ERROR": 0.001, "HALF_ERROR": 0.01, "NUDGE": 1e-7, "JUMP": 0.1},
    },
    "tinyllama.harness.correct.checks.state": {"THREADS": 3, "SUBNORMAL": 1e-40},
    "tinyllama.harness.correct.checks.thresholds": {"LEAST": 4, "MOST": 65536},
    "tinyllama.harness.correct.checks.unusual": {
        **{"FAR": 64, "SHIFT": 1000, "FAR_SHIFT": 32768, "HUGE": 8589934592, "CASES": 4},
        **{
            "TAIL": 16,
            "BEYOND": 97,
            "MOST_WHOLE": 1025,
            "WIDEST": 16,
            "CHANCE": 8,
            "RANGED": 3,
            "POWERS": 16,
            "LARGEST": 100.0,
        },
    },
    "tinyllama.harness.declare.calls": {"MOST_LAYOUTS": 64},
    "tinyllama.harness.declare.checked": {"MOST_ACCEPTED": 4096},
    "tinyllama.harness.declare.provider": {"MOST_SLACK": 100.0},
    # What is measured, and when a figure counts.
    "tinyllama.harness.measure.cache": {"LARGEST_UNREPORTED": 256 * MIB},
    "tinyllama.harness.measure.ceilings": {"CLEARANCE": 1.15},
    "tinyllama.harness.measure.clock": {
        **{"OVERHEAD_READINGS": 20, "OVERHEAD_SPIN": 1e-4, "LONGEST_SPIN": 0.25, "SHORTENED": 0.7},
    },
    "tinyllama.harness.measure.energy": {"SAMPLE_SECONDS": 0.02},
    "tinyllama.harness.measure.op_contender": {"KEPT_SHARE": 0.0625, "CHANGING_ROWS": 2.0},
    "tinyllama.harness.measure.calls_in_a_row": {"IN_A_ROW": 20, "QUEUED_KERNELS": 512},
    "tinyllama.harness.measure.rounds": {"FEWEST_ROUNDS": 8},
    "tinyllama.harness.plugins.gpu_benchmark": {"ROUNDS": 30, "MARGIN": 4.0},
    "tinyllama.harness.records.history": {
        **{"LEAST_RECORDS": 6, "LEAST_APART": 3, "LEVEL": 0.001, "LEAST_SPREAD": 0.001},
    },
    # What is refused, waited for or kept.
    "tinyllama.harness.plugins.gating": {"WAIT": 180.0},
    "tinyllama.harness.records.exchange": {"MOST_FILES": 10000, "MOST_BYTES_IN_ALL": GIB},
    "tinyllama.harness.records.numbers": {"MEBIBYTE": MIB},
    "tinyllama.harness.machine.facts": {"BUSY_SHARE": 0.1},
    "tinyllama.harness.machine.files": {
        **{"READABLE": 0o644, "LEAST_FREE": 65536, "MOST_BYTES": 64 * MIB},
    },
    "tinyllama.harness.kernels.interpreter": {"STEPS": 500000},
    "tinyllama.harness.kernels.interpreter_values": {"ADDRESS_BITS": 48},
    "tinyllama.harness.kernels.programs": {
        **{"TOGETHER": 64, "PATIENCE": 20, "ROUNDS": 4, "ENDLESS": 20000},
    },
    "tinyllama.harness.kernels.bounds": {"_LOWEST": 65536, "_USUAL": 4 * GIB, "_HIGHEST": 2**47},
    "tinyllama.harness.kernels.copying": {"DIGITS": 3, "TILE": 4096},
    "tinyllama.harness.kernels.instructions": {"TILE": 65536},
    "tinyllama.harness.kernels.known": {"MOST_KNOWN": 4096},
    "tinyllama.harness.kernels.layout": {"MOST_BETWEEN": 64},
    "tinyllama.harness.kernels.occupancy": {"ROWS": 512, "GRANULE": 8},
    "tinyllama.harness.kernels.promises": {"GARBAGE": 0x5A5A5A5A5A5A5A5A, "ADDRESS_BITS": 48},
    "tinyllama.harness.kernels.resources": {"THREADS": 1024},
    "tinyllama.harness.kernels.together": {"APART": 32},
    "tinyllama.harness.kernels.tf32": {"ROUNDED": 11},
    "tinyllama.model.llama": {"ALIGNMENT": 64},
    "tinyllama.training.answering": {"LOOKS": 20, "SILENT": 15, "LEFT": -1},
    "tinyllama.training.data": {"MOST_FILES": 100000, "MOST_BYTES": 4 * GIB},
    "tinyllama.training.peers": {"ALIGNMENT": 64},
    "tinyllama.training.ranks": {"TIMEOUT": 600.0},
}


@pytest.mark.parametrize("module", EXPECTED)
def test_numbers_that_decide_are_what_they_were_chosen_to_be(module: str) -> None:
    found = importlib.import_module(module)
    expected = EXPECTED[module]
    assert {name: getattr(found, name) for name in expected} == expected
