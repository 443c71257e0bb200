"""The rates of a step's ops: what declarations say of a step, by hand, beside measured times."""

from typing import Any

import pytest

from tinyllama.harness.records.report import console
from tinyllama.model.config import PRESETS, TrainConfig
from tinyllama.model.tiers import TIERS
from tinyllama.profiling import flops, rates
from tinyllama.profiling.ranges import Work
from tinyllama.profiling.rates import Cost, costs
from tinyllama.profiling.step_tables import columns, show
from tinyllama.profiling.workload import Workload

MODEL = PRESETS["small"]
TOKENS = 8 * 128


def workload(tier: str, precision: str = "fp32") -> Workload:
    return Workload(MODEL, TrainConfig(batch_size=8, seq_len=128, precision=precision), tier=tier)


def test_the_costs_of_a_step_are_those_of_its_ops() -> None:
    found = costs(workload("v1"))
    layers, rows = MODEL.num_layers, TOKENS * MODEL.hidden_dim
    assert found["rms_norm"].bytes == pytest.approx(layers * 2 * 4 * rows, rel=0.01)
    assert found["final_norm"].bytes == pytest.approx(2 * 4 * rows, rel=0.01)
    wide = MODEL.hidden_dim**2 + MODEL.ffn_dim * MODEL.hidden_dim  # the products of a block's own
    assert found["block"].flops == layers * 2 * TOKENS * wide
    assert found["block backward"].flops == 2 * found["block"].flops
    assert found["adamw"].bytes == 7 * 4 * MODEL.parameters
    assert "adamw backward" not in found
    half = costs(workload("v1", "bf16"))
    assert half["rope"].bytes < 0.7 * found["rope"].bytes
    assert half["adamw"] == found["adamw"]


@pytest.mark.parametrize("tier", TIERS)
def test_operations_add_up_to_those_of_the_declarations(tier: str) -> None:
    """Also where one provider computes a whole block."""
    whole = sum(cost.flops for cost in costs(workload(tier)).values())
    assert whole == pytest.approx(sum(flops.declared(MODEL, 8, 128).values()), rel=0.01)


def test_rates_are_shares_of_the_measured_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    seconds = {"rope": 1e-3, "rope backward": 4e-3, "not mapped": 1.0}
    cost = {"rope": Cost(2e6, 3e6), "rope backward": Cost(4e6, 8e6), "loss": Cost(1.0, 1.0)}
    ceilings = {"bytes_per_second": 4e9, "flops_per_second": 1e10}
    out.print(rates.table(columns, seconds, cost, ceilings))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["rope", "backward", "4000.0", "1.0", "25%", "2.0", "20%"],
        ["rope", "1000.0", "2.0", "50%", "3.0", "30%"],
    ]


def test_kernels_that_overlap_and_gaps_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {
        "device": "cuda",
        "plan": "capture",
        "captured": True,
        "spans_us": [(0.0, 4.0, 7), (2.0, 5.0, 8), (9.0, 10.0, 7)],
        "costs": {},
        "ceilings": {"bytes_per_second": 1.0, "flops_per_second": 1.0},
    }
    show(facts, [Work("gemm", 4e-6, "qkv"), Work("norm", 3e-6, "rms_norm")], 9)
    printed = capsys.readouterr().out
    assert "a kernel runs in 6 of 10 us; 2 us are of kernels that overlap others" in printed
    assert ["no", "kernel", "4.0", "57.1%"] in [line.split() for line in printed.splitlines()]
    assert "without the profiler" not in printed
    show({**facts, "unprofiled_seconds": 11e-6}, [Work("gemm", 4e-6, "qkv")], 9)
    assert "without the profiler the host waits 11 us for a step" in capsys.readouterr().out
