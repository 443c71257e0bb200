"""`tinyllama profile` on a machine without a GPU."""

import json
import re
from pathlib import Path

import pytest

from correctness_tests.support.commands import ROOT, printed, refused, tinyllama
from tinyllama.model.config import PRESETS, TrainConfig
from tinyllama.model.tiers import TIERS
from tinyllama.profiling import flops, observe
from tinyllama.profiling.ranges import UNKNOWN, Work, by_order, in_layers
from tinyllama.profiling.readers import KERNELS
from tinyllama.profiling.workload import Workload

TINY = ["--preset", "tiny", "--seq-len", "32", "--batch-size", "2", "--device", "cpu"]


def profile(tool: str, folder: Path, *options: str) -> tuple[Path, str]:
    """Run the command: the folder that it left, and what it printed."""
    text = printed("profile", tool, "--output", folder, *TINY, *options)
    (left,) = folder.iterdir()
    return left, text


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_hotspots_maps_each_operator_to_its_op_and_layer(tier: str, tmp_path: Path) -> None:
    folder, text = profile("hotspots", tmp_path, "--tier", tier, "--num-steps", "2", "--top", "500")
    _, work = observe.load(folder / KERNELS)
    unmapped = sum(kernel.seconds for kernel in work if kernel.op == UNKNOWN)
    assert unmapped <= 0.01 * sum(kernel.seconds for kernel in work)
    ops = {(kernel.op, kernel.backward) for kernel in work}
    for op in ("attention", "swiglu", "rope", "qkv", "rms_norm", "add_rms_norm"):
        for layer in range(PRESETS["tiny"].num_layers):
            assert {(f"layers.{layer}.{op}", False), (f"layers.{layer}.{op}", True)} <= ops
    assert {("loss", True), ("final_norm", True), ("adamw", False), ("embedding", True)} <= ops
    assert re.search(r"aten::mm +swiglu backward +0-1 ", text)
    assert len(re.findall(r"adamw +[\d.]+ +[\d.]+ +\d+% +[\d.]+ +\d+%", text)) == 1
    assert (folder / observe.TRACE).is_file()
    facts = json.loads((folder / "profile.json").read_text())
    assert "tinyllama.profiling.observe" in facts["commands"][0]
    printed("profile", "compare", folder, folder / observe.TRACE)


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_memory_splits_the_peak_by_category(tmp_path: Path) -> None:
    folder, text = profile("memory", tmp_path, "--tier", "v1")
    facts = json.loads((folder / "memory.json").read_text())
    size, peak = 4 * PRESETS["tiny"].parameters, facts["at_peak_bytes"]
    assert size <= peak["parameters"] <= 1.01 * size
    assert 2 * size <= peak["optimizer states"] <= 2.01 * size
    assert facts["peak_bytes"] == sum(peak.values())
    assert re.search(r"activations +[\d.]+ +[\d.]+%", text)
    assert f"is in the {facts['peak_phase']} pass" in text


@pytest.mark.usefixtures("forked")
def test_flops_prints_the_counts_and_the_utilisation(tmp_path: Path) -> None:
    folder, text = profile("flops", tmp_path)
    facts = json.loads((folder / "flops.json").read_text())
    share = facts["flop"]["model formula"] / facts["step_seconds"]
    share /= facts["product_flops_per_second"]
    assert 0 < share < 1
    assert f"model FLOP utilisation {share:.1%}" in text


@pytest.mark.long
@pytest.mark.parametrize(("preset", "batch", "length"), [("small", 8, 128), ("medium", 16, 512)])
def test_counts_that_share_no_code_agree(preset: str, batch: int, length: int) -> None:
    """V1 computes T² scores a head, of which the formula counts T (T + 1) / 2."""
    model = PRESETS[preset]
    formula = model.step_flops(batch, length)
    masked = model.num_layers * batch * model.num_heads * length * (length - 1) // 2
    per_score = 6 * 2 * model.head_dim  # 2 products forward, 4 backward
    assert flops.by_torch(model, batch, length) == formula + masked * per_score
    train = TrainConfig(batch_size=batch, seq_len=length)
    for tier in TIERS:  # also where one provider computes a whole block
        costs = flops.costs(Workload(model, train, tier=tier)).values()
        assert sum(cost.flops for cost in costs) == pytest.approx(formula, rel=0.03)


def test_bytes_of_step_are_those_of_its_ops() -> None:
    model, train = PRESETS["small"], TrainConfig(batch_size=8, seq_len=128)
    costs = flops.costs(Workload(model, train))
    rows = 8 * 128 * model.hidden_dim
    assert costs["rms_norm"].bytes == pytest.approx(8 * 2 * 4 * rows, rel=0.01)  # of 8 layers
    assert costs["adamw"].bytes == 7 * 4 * model.parameters
    half = flops.costs(Workload(model, TrainConfig(batch_size=8, seq_len=128, precision="bf16")))
    assert half["rope"].bytes < 0.7 * costs["rope"].bytes
    assert half["adamw"] == costs["adamw"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["trace", "--with", "ncu"], "--with 'ncu' cannot do trace: use rocprofv3 or torch"),
        (["all", "--with", "torch"], "use it with a single tool"),
        (["flops", "left-over"], "left-over is no option of flops"),
        (["hotspots", "--tier", "v9"], "invalid choice: 'v9'"),
        (["hotspots", "--device", "cuda:99"], "cuda:99"),
        *(([tool], "--with torch") for tool in ("counters", "rocprof-compute", "rocprof-sys")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_tool_that_cannot_run_is_one_error(options: list[str], reason: str, tmp_path: Path) -> None:
    assert reason in refused("profile", *TINY, *options, "--output", tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.long
def test_program_that_exceeds_time_limit_fails(tmp_path: Path) -> None:
    done = tinyllama("profile", "flops", "--output", tmp_path, *TINY, "--time-limit", "1")
    assert done.status == 1
    assert "took more than 1 s" in done.err


# -- mapping --------------------------------------------------------------------------------------


def test_kernels_of_all_layers_as_one_op_have_their_layer() -> None:
    """Forward from the first layer on, backward from the last; what is launched once has none."""
    names = ["fold", "qkv", "out", "down", "qkv", "out", "down"]
    work = [Work(name, 1.0, "stack") for name in names]
    work += [Work(name, 1.0, "stack", backward=True) for name in ("dx", "dx", "dx", "dx", "sum")]
    work.append(Work("qkv", 1.0, "loss"))
    assert [kernel.op for kernel in in_layers(work, "stack", 2)] == [
        *("stack", "layers.0.stack", "layers.0.stack", "layers.0.stack"),
        *("layers.1.stack", "layers.1.stack", "layers.1.stack"),
        *("layers.1.stack", "layers.1.stack", "layers.0.stack", "layers.0.stack", "stack"),
        "loss",
    ]


def test_captured_step_is_mapped_by_order() -> None:
    eager = [
        Work("gemm", 1.0, "layers.0.qkv"),
        Work("norm", 1.0, "layers.0.rms_norm"),
        Work("gemm", 1.0, "layers.1.qkv", backward=True),
    ]
    captured = [("gemm", 2.0), ("gemm", 3.0), ("norm", 4.0), ("gemm", 5.0), ("new", 6.0)]
    captured.append(("adamw_update", 7.0))  # on a branch, where no operator launched it
    assert by_order(eager, captured) == [
        Work("gemm", 2.0, "layers.0.qkv"),
        Work("gemm", 3.0, "layers.1.qkv", backward=True),
        Work("norm", 4.0, "layers.0.rms_norm"),
        Work("gemm", 5.0, UNKNOWN),
        Work("new", 6.0, UNKNOWN),
        Work("adamw_update", 7.0, "adamw"),
    ]


def test_report_shows_recorded_sweep_over_lengths_and_batches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
    page = tmp_path / "page.html"
    text = printed("report", "--all", "--results-dir", ROOT / "results", "--html", page)
    assert re.search(r"^8 x 512 +v2 +[\d.]+ +\d+ +\d+$", text, re.M)
