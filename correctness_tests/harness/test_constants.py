"""Numbers that verdicts, limits and runs depend on: whoever changes one changes what it decides.

A behaviour that a number bounds is tested where it is; that its bound is this one, here.
"""

import importlib
from dataclasses import astuple, is_dataclass
from operator import attrgetter
from typing import Any

import pytest

pytest.importorskip("triton")

_REST = (1000, 10000.0, 1e-05, 0.02)  # vocabulary, rope's base, eps, the deviation of weights
_MODELS = {
    "tiny": (128, 2, 4, 2, 256, *_REST),
    "small": (512, 8, 8, 4, 2048, *_REST),
    "medium": (1024, 12, 16, 8, 4096, *_REST),
    "large": (2048, 22, 32, 8, 5632, *_REST),
}
_SHAPES = {"tiny": (4, 64), "small": (8, 128), "medium": (16, 512), "large": (4, 4096)}
_AMD = {"gfx908": 2**16, "gfx90a": 2**16, "gfx942": 2**16, "gfx950": 163840}
_NVIDIA = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
EXPECTED: dict[str, dict[str, Any]] = {
    "tinyllama.harness.correct.cases": {"PERTURBATIONS": 8, "SUBSETS": 3},
    "tinyllama.harness.correct.checks.calls": {
        "REPEATS": {"cpu": 3, "cuda": 50},
        "LAST": 4,
        "LARGE": 1024.0,
        "MOST_APART": 0.001,
    },
    "tinyllama.harness.correct.checks.configurations": {"SECONDS": 60.0},
    "tinyllama.harness.correct.checks.finding": {"SUBSETS": 5, "Candidate.seed": 0},
    "tinyllama.harness.correct.checks.frameworks": {"DRAWS": 4},
    "tinyllama.harness.correct.checks.guards": {"WIDTH": 2**16, "CANARY": 165, "ALIGNED": 16},
    "tinyllama.harness.correct.checks.large": {"ENTRIES": 8, "GAP": 64, "APART": 3},
    "tinyllama.harness.correct.checks.memory": {"SEED": 20111117},
    "tinyllama.harness.correct.checks.remote": {
        "MOST_ENDED": 6,
        "SECONDS": 300,
        "GROUP": 86400.0,
        "RESERVE": 2**30,
    },
    "tinyllama.harness.correct.checks.sizes": {
        "SIZES": (1, 67, 259, 384, 1024, 1026, 4099, 16388, 65539),
        "BOTH": 131,
        "MOST_ELEMENTS": 2**21,
        "OF_EXTREMES": 259,
        "OF_LAYOUTS": 1026,
        "SECONDS": 10.0,
        "WIDER": 16.0,
        "TRIES": 8,
    },
    "tinyllama.harness.correct.checks.special": {
        "FAR": 64,
        "SHIFT": 1000,
        "SENSITIVE": ("shifted",),
        "MOST_ERROR": 0.001,
        "FACTORS": (0.5, 3.0, 1000.0, 1000000.0),
        "SEEN": 0.05,
        "CASES": 4,
        "DRAWN": 2**12,
    },
    "tinyllama.harness.correct.compare": {"SLACK": 3.0, "ACCUMULATION": 4.76837158203125e-07},
    "tinyllama.harness.correct.offsets": {"BEYOND": 2**31, "APART": 1073741888},
    "tinyllama.harness.declare.calls": {"MOST_LAYOUTS": 64},
    "tinyllama.harness.declare.checked": {"MOST_ACCEPTED": 2**12},
    "tinyllama.harness.declare.op": {"Op.calls": 1},
    "tinyllama.harness.declare.provider": {"MOST_SLACK": 100.0},
    "tinyllama.harness.declare.specs": {"Tensor.off_by": 0},
    "tinyllama.harness.gate.accepted": {
        "Entry.metric": "device_seconds",
        "Entry.amount": 0.0,
        "Entry.number": 0,
    },
    "tinyllama.harness.gate.attribution": {"SHARE": 0.1, "MOST": 5, "PROFILES": 9, "ALPHA": 0.01},
    "tinyllama.harness.gate.certify": {
        "LEAST_BLOCKS": 20,
        "MERGES": 100000,
        "CHUNK": 20000,
        "CONFIDENCE": 0.95,
        "SLOWDOWNS": (0.01, 0.02, 0.05, 0.1),
        "ENOUGH": 0.99,
        "LEANING": 0.001,
        "LEAST_LEANING": 0.2,
    },
    "tinyllama.harness.gate.decision": {
        "LOOKS": (4, 8, 12, 16, 20),
        "LEAST_SPREAD": 0.0002,
        "UNLIKE_HISTORY": 0.001,
        "CONFIRM_BLOCKS": 8,
        "CONFIRM_ALPHA": 0.05,
        "Spread.deviation": 0.0,
        "Spread.freedom": 0,
        "Rule.margin": 0.005,
        "Rule.tolerance": 0.02,
        "Rule.alpha": 0.001,
        "Rule.miss": 0.0025,
    },
    "tinyllama.harness.gate.digests": {
        "PROJECTIONS": 8,
        "_PART": 2**24,
        "_SOME": 2**20,
        "_FEW": 2**18,
    },
    "tinyllama.harness.gate.exact": {"COMPILE_RATIO": 1.5, "COMPILE_SECONDS": 2.0},
    "tinyllama.harness.gate.figures": {"Series.accepted": 0.0},
    "tinyllama.harness.gate.identity": {"SHOWN": 3},
    "tinyllama.harness.gate.interrupted": {"LONGEST": 1000000},
    "tinyllama.harness.gate.judge": {"REPORTED": 60.0, "INTERRUPTED": 2, "UNPROVEN": 15},
    "tinyllama.harness.gate.judged": {"SHOWN": 12},
    "tinyllama.harness.gate.memory": {
        "READY": 4.0,
        "LAID_OUT": 2.0,
        "EXACT": 10.0,
        "SCORES": 2**34,
        "MOST_EXACT": 100.0,
        "UNKNOWN": 2**28,
        "READY_SHARE": 0.6,
        "EXACT_SHARE": 0.5,
    },
    "tinyllama.harness.gate.noise": {"SCHEMA": 4},
    "tinyllama.harness.gate.once": {"LET_FIRST": 0.02},
    "tinyllama.harness.gate.opened": {"SECONDS": 120.0},
    "tinyllama.harness.gate.pair": {
        "WARM_UP": 0.02,
        "MOST": 4,
        "FEWEST": 8,
        "LONGEST": 2.0,
        "READY": 600.0,
        "TURN": 60.0,
        "PACES": 6,
        "PACED": 0.2,
        "PACED_CALLS": 8,
        "PACE_MORE": 1.25,
        "CLOCK_RATIO": 1.25,
        "CLOCK_SECONDS": 0.05,
    },
    "tinyllama.harness.gate.pool": {"PROCESSORS": 8, "AHEAD": 4, "MEMORY": 2**34},
    "tinyllama.harness.gate.proven": {"SEEDS": 2, "PLACES": 16, "FACTORS": 1024, "WIDTH": 0.125},
    "tinyllama.harness.gate.setting": {
        "MARGINS": {"device_seconds": 0.005, "host_seconds": 0.02},
        "MARGIN_ON_CPU": 0.02,
        "Setting.at_once": 1,
        "BenchmarkState.exact": 0,
    },
    "tinyllama.harness.gate.side": {
        "ON_GPU": {"device_seconds": 0.02, "host_seconds": 0.1},
        "ON_CPU": {"device_seconds": 0.1},
        "FURTHER": 0.1,
        "Benchmark.moved": 0.0,
    },
    "tinyllama.harness.gate.subject": {"SPIN": 1.4, "CALLS": 6},
    "tinyllama.harness.gate.turns": {
        "MOST": 2.0,
        "ALPHA": 0.0005,
        "MARGIN": 0.01,
        "LEAST_SPREAD": 0.005,
        "SUSPECT": 0.04,
        "ERRORS": 2.0,
        "MOST_HELD": 2,
        "TURN_RATIO": 4.0,
    },
    "tinyllama.harness.gate.verified": {"SLACK": 4.0},
    "tinyllama.harness.gate.waves": {"LOOKED": 10.0, "MAX_DISCARDED": 2},
    "tinyllama.harness.kernels.addresses": {"Tables.KEPT": 64},
    "tinyllama.harness.kernels.bounds": {"_LOWEST": 2**16, "_USUAL": 2**32, "_HIGHEST": 2**47},
    "tinyllama.harness.kernels.copying": {"DIGITS": 3, "TILE": 2**12},
    "tinyllama.harness.kernels.instructions": {
        "TILE": 2**16,
        "BYTES": {"dword": 4, "short": 2, "byte": 1},
    },
    "tinyllama.harness.kernels.interpreter": {"ADDRESS_BITS": 48, "STEPS": 500000},
    "tinyllama.harness.kernels.known": {"MOST_KNOWN": 2**12},
    "tinyllama.harness.kernels.layout": {"MOST_BETWEEN": 64},
    "tinyllama.harness.kernels.occupancy": {
        "PARTITIONS": 4,
        "ROWS": 512,
        "GRANULE": 8,
        "Unit.reserved": 0,
        "UNITS": {
            "gfx90a": (8, 65536, None, 0),
            "gfx942": (8, 65536, None, 0),
            "gfx950": (8, 163840, None, 0),
            "sm_80": (16, 167936, 32, 1024),
            "sm_90": (16, 233472, 32, 1024),
            "sm_100": (16, 233472, 32, 1024),
        },
    },
    "tinyllama.harness.kernels.operators": {"MOST": 2**12},
    "tinyllama.harness.kernels.programs": {
        "TOGETHER": 64,
        "PATIENCE": 20,
        "ROUNDS": 4,
        "ENDLESS": 20000,
    },
    "tinyllama.harness.kernels.promises": {"ADDRESS_BITS": 48},
    "tinyllama.harness.kernels.resources": {
        "THREADS": 1024,
        "CHIPS": {
            **{name: (name, 64, shared) for name, shared in _AMD.items()},
            **{name: (name, 32, shared) for name, shared in _NVIDIA.items()},
        },
    },
    "tinyllama.harness.kernels.shared_types": {"MOST": 2**12},
    "tinyllama.harness.kernels.tf32": {"ROUNDED": 11},
    "tinyllama.harness.kernels.together": {"EVERY": -1, "APART": 32},
    "tinyllama.harness.machine.facts": {"BUSY_SHARE": 0.1},
    "tinyllama.harness.machine.files": {"READABLE": 420, "LEAST_FREE": 2**16, "MOST_BYTES": 2**26},
    "tinyllama.harness.machine.progress": {"EVERY": 60.0, "REDRAWN": 1.0, "WIDEST": 100},
    "tinyllama.harness.machine.worker": {
        "GRACE": 5.0,
        "TIMEOUT": 900.0,
        "LONGEST_ANSWER": 2**28,
        "TOKEN": 16,
        "KEEPS_FREED_MEMORY": {
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "1073741824",
            "MALLOC_TOP_PAD_": "67108864",
        },
    },
    "tinyllama.harness.measure.cache": {
        "_UNITS": {"": 1, "K": 1024, "M": 2**20, "G": 2**30},
        "LARGEST_UNREPORTED": 2**28,
    },
    "tinyllama.harness.measure.ceilings": {"CLEARANCE": 1.15},
    "tinyllama.harness.measure.clock": {
        "OVERHEAD_READINGS": 20,
        "OVERHEAD_SPIN": 0.0001,
        "LONGEST_SPIN": 0.25,
        "SHORTENED": 0.7,
    },
    "tinyllama.harness.measure.energy": {"SAMPLE_SECONDS": 0.02},
    "tinyllama.harness.measure.op_contender": {"KEPT_SHARE": 0.0625, "CHANGING_ROWS": 2.0},
    "tinyllama.harness.measure.rounds": {"FEWEST_ROUNDS": 8},
    "tinyllama.harness.measure.tuning": {"SIEVE": 8, "MARGIN": 0.01, "ROUNDS": 10, "SURVIVORS": 6},
    "tinyllama.harness.plugins.card": {"WAIT": 180.0},
    "tinyllama.harness.plugins.gating": {"WAIT": 180.0},
    "tinyllama.harness.plugins.gpu_benchmark": {"ROUNDS": 30, "WARM_UP": 5, "MARGIN": 4.0},
    "tinyllama.harness.records.exchange": {
        "FORMAT": 1,
        "MOST_FILES": 10000,
        "MOST_BYTES_IN_ALL": 2**30,
    },
    "tinyllama.harness.records.history": {
        "LEAST_RECORDS": 6,
        "LEAST_APART": 3,
        "LEVEL": 0.001,
        "LEAST_SPREAD": 0.001,
    },
    "tinyllama.harness.records.numbers": {"MEBIBYTE": 2**20},
    "tinyllama.harness.records.report": {"_PIPED_WIDTH": 120},
    "tinyllama.harness.records.results": {"SCHEMA": 2},
    "tinyllama.harness.records.targets": {
        "OpTarget.LISTS": {
            "op": 'a name, a list of names, or "any"',
            "case": 'a name, a list of names, or "any"',
            "dtype": 'a name, a list of names, or "any"',
            "over": "a name, or a list of names",
        }
    },
    "tinyllama.harness.records.verdict": {
        "TOLERANCES": {
            "seconds": 1.05,
            "device_seconds": 1.05,
            "host_seconds": 1.25,
            "peak_bytes": 1.02,
            "live_bytes": 1.02,
            "kernels": 1.0,
            "copies": 1.0,
            "host_syncs": 1.0,
            "layouts": 1.1,
        }
    },
    "tinyllama.model.config": {
        "LARGEST": 2147483647,
        "LARGEST_NUMBER": 1e20,
        "PRESETS": _MODELS,
        "WORKLOADS": {name: (_MODELS[name], *shape) for name, shape in _SHAPES.items()},
        "ModelConfig.hidden_dim": 512,
        "ModelConfig.num_layers": 8,
        "ModelConfig.num_heads": 8,
        "ModelConfig.num_kv_heads": 4,
        "ModelConfig.ffn_dim": 2048,
        "ModelConfig.vocab_size": 1000,
        "ModelConfig.rope_theta": 10000.0,
        "ModelConfig.norm_eps": 1e-05,
        "ModelConfig.init_std": 0.02,
        "TrainConfig.batch_size": 8,
        "TrainConfig.accumulate": 1,
        "TrainConfig.seq_len": 256,
        "TrainConfig.num_steps": 50,
        "TrainConfig.learning_rate": 0.0003,
        "TrainConfig.beta1": 0.9,
        "TrainConfig.beta2": 0.999,
        "TrainConfig.eps": 1e-08,
        "TrainConfig.weight_decay": 0.01,
        "TrainConfig.seed": 0,
    },
    "tinyllama.model.llama": {"ALIGNMENT": 64},
    "tinyllama.training.answering": {"LOOKS": 20, "SILENT": 15, "LEFT": -1},
    "tinyllama.training.checkpoint": {"_VERSION": 2},
    "tinyllama.training.data": {"MOST_FILES": 100000, "MOST_BYTES": 2**32},
    "tinyllama.training.peers": {"ALIGNMENT": 64},
    "tinyllama.training.ranks": {
        "TIMEOUT": 600.0,
        "Ranks.rank": 0,
        "Ranks.count": 1,
        "Ranks.local": 0,
    },
    "tinyllama.training.reduction": {
        "LAST": 2,
        "Reduction.share": 1.0,
        "Reduction.warm_up": 0,
        "Parallel.warm_up": 11,
    },
    "tinyllama.training.result": {"Result.ranks": 1},
}


def plain(value: Any) -> Any:
    """A value as literals write it: enumerations by what they hold, dataclasses as tuples."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return astuple(value) if is_dataclass(value) and not isinstance(value, type) else value


@pytest.mark.parametrize("module", EXPECTED)
def test_numbers_are_what_they_were_chosen_to_be(module: str) -> None:
    space = importlib.import_module(module)
    numbers = EXPECTED[module]
    assert {name: plain(attrgetter(name)(space)) for name in numbers} == numbers
