"""`tinyllama profile` and `how`, on a machine without a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch

from correctness_tests.support import rocm_files
from correctness_tests.support.commands import printed, refused, tinyllama
from tinyllama.model.config import PRESETS, ModelConfig
from tinyllama.profiling import documents, flops, observe
from tinyllama.profiling.ranges import UNKNOWN, Work, by_order, in_layers

TINY = ["--preset", "tiny", "--seq-len", "32", "--batch-size", "2", "--device", "cpu"]


def profile(tool: str, folder: Path, *options: str) -> tuple[Path, str]:
    """Run the command: the folder that it left, and what it printed."""
    text = printed("profile", tool, "--output", folder, *TINY, *options)
    (found,) = folder.iterdir()
    return found, text


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("tier", ["v1", "v2"])
def test_each_operator_is_mapped_to_its_op_and_layer(tier: str, tmp_path: Path) -> None:
    options = ("--tier", tier, "--num-steps", "2", "--top", "500")
    folder, text = profile("hotspots", tmp_path, *options)
    _, work = observe.load(folder / observe.KERNELS)
    whole = sum(one.seconds for one in work)
    assert sum(one.seconds for one in work if one.op == UNKNOWN) <= 0.01 * whole
    ops = {(one.op, one.backward) for one in work}
    for op in ("attention", "swiglu", "rope", "qkv", "rms_norm", "add_rms_norm"):
        for layer in range(PRESETS["tiny"].num_layers):
            assert {(f"layers.{layer}.{op}", False), (f"layers.{layer}.{op}", True)} <= ops
    assert {("loss", True), ("final_norm", True), ("adamw", False), ("embedding", True)} <= ops
    products = [one for one in work if one.name == "aten::mm" and "swiglu" in one.op]
    layers = PRESETS["tiny"].num_layers
    gates = 1 if tier == "v2" else 2  # stacked products
    assert len([one for one in products if not one.backward]) == gates * layers
    assert re.search(r"aten::mm +swiglu backward +0-1 ", text)
    # Its rates may round to 0.0 on a busy machine; `test_rates` holds the numbers.
    assert len(re.findall(r"adamw +[\d.]+ +[\d.]+ +\d+% +[\d.]+ +\d+%", text)) == 1
    assert "1. " in text
    assert "3. " in text
    assert (folder / observe.TRACE).is_file()
    recorded = json.loads((folder / "profile.json").read_text())
    assert recorded["versions"]["torch"] == torch.__version__
    assert "tinyllama.profiling.observe" in recorded["commands"][0]


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_the_peak_of_memory_is_split_by_category(tmp_path: Path) -> None:
    folder, text = profile("memory", tmp_path, "--tier", "v1")
    found = json.loads((folder / "memory.json").read_text())
    size = 4 * PRESETS["tiny"].parameters
    peak = found["at_peak_bytes"]
    assert size <= peak["parameters"] <= 1.01 * size
    assert 2 * size <= peak["optimizer states"] <= 2.01 * size
    assert peak["gradients"] <= 1.01 * size
    assert found["peak_bytes"] == sum(peak.values())
    assert re.search(r"activations +[\d.]+ +[\d.]+%", text)
    assert f"is in the {found['peak_phase']} pass" in text


@pytest.mark.long
def test_the_counts_of_operations_agree() -> None:
    """Three ways that share no code; PyTorch counts attention whole, and no elementwise work."""
    for name, samples, length in (("small", 8, 128), ("medium", 16, 512)):
        model: ModelConfig = PRESETS[name]
        formula = model.step_flops(samples, length)
        declared = sum(flops.declared(model, samples, length).values())
        assert declared == pytest.approx(formula, rel=0.03)
        assert flops.by_torch(model, samples, length) == pytest.approx(formula, rel=0.1)


@pytest.mark.usefixtures("forked")
def test_flops_says_what_it_could_not_count(tmp_path: Path) -> None:
    folder, text = profile("flops", tmp_path)
    assert "PyTorch's counter" in text
    assert "DeepSpeed: deepspeed is not installed" in text
    found = json.loads((folder / "flops.json").read_text())
    operations = found["flop"]["model formula"]
    share = operations / found["step_seconds"] / found["product_flops_per_second"]
    assert 0 < found["mfu"] < 1
    assert found["mfu"] == pytest.approx(share)
    assert f"model FLOP utilisation {share:.1%}" in text


@pytest.mark.usefixtures("forked")
def test_each_op_is_compared_with_pytorch(tmp_path: Path) -> None:
    """On a CPU its kernels are interpreted: the error counts, and no time is shown."""
    pytest.importorskip("triton")
    folder, text = profile("triton", tmp_path)
    found = {one["op"]: one for one in json.loads((folder / "triton.json").read_text())["ops"]}
    assert {"rms_norm", "swiglu", "attention", "block"} <= set(found)
    assert all(0 <= one["max_error"] < 1e-2 for one in found.values())
    assert any(one["max_error"] > 0 for one in found.values())
    assert "passes" not in found["rms_norm"]
    assert "not timed: on a CPU its kernels are interpreted" in text
    studied = [line.split()[0] for line in text.splitlines() if line.endswith("needs a GPU")]
    assert studied == ["64", "128", "256", "512", "1024"]


def test_energy_needs_a_sensor(tmp_path: Path) -> None:
    said = refused("profile", "energy", "--output", tmp_path, *TINY)
    assert "energy cannot be measured here: a CPU has no GPU sensor" in said


def test_two_profiles_are_compared(tmp_path: Path) -> None:
    rocm_files.trace(tmp_path / "a/x_kernel_trace.csv", "6.2")
    rocm_files.database(tmp_path / "b.db")
    text = printed("profile", "compare", tmp_path / "a", tmp_path / "b.db")
    assert "rms_norm_forward" in text
    assert "3 launches in 6.0 us before, 3 in 6.0 us after" in text
    assert "two profiles" in refused("profile", "compare", tmp_path / "a")


@pytest.mark.parametrize("tool", ["counters", "rocprof-compute", "rocprof-sys"])
def test_a_tool_that_is_not_here_says_what_to_use_instead(tool: str, tmp_path: Path) -> None:
    said = refused("profile", tool, "--output", tmp_path / "p", *TINY)
    assert f"{tool} cannot run here" in said
    assert "--with torch" in said
    assert not (tmp_path / "p").exists()


def test_the_command_is_printed_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU and a ROCm."""
    binaries = rocm_files.install(tmp_path / "rocm", "6.4")
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = ("--print-command", "--tier", "v3", "--output", tmp_path / "p")
    text = printed("profile", "trace", *asked)
    assert text.startswith("rocprofv3 --sys-trace --output-format pftrace -d FOLDER")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["trace", "--with", "ncu"], "--with 'ncu' cannot do trace: use rocprofv3 or torch"),
        (["all", "--with", "torch"], "remove it"),
        (["flops", "left-over"], "left-over is no option of flops"),
        (["hotspots", "--tier", "v9"], "tier 'v9' does not exist"),
    ],
)
def test_what_cannot_be_used_is_one_error(options: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused("profile", *options, "--output", tmp_path / "p", *TINY)
    assert not (tmp_path / "p").exists()


@pytest.mark.long
def test_a_profiled_program_that_fails_is_a_failure(tmp_path: Path) -> None:
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
    assert [one.op for one in in_layers(work, "stack", 2)] == [
        *("stack", "layers.0.stack", "layers.0.stack", "layers.0.stack"),
        *("layers.1.stack", "layers.1.stack", "layers.1.stack"),
        *("layers.1.stack", "layers.1.stack", "layers.0.stack", "layers.0.stack", "stack"),
        "loss",
    ]


def test_a_captured_step_is_mapped_by_order() -> None:
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


# -- the documents --------------------------------------------------------------------------------


@pytest.mark.long
def test_every_command_of_the_table_is_one_that_there_is() -> None:
    for row in documents.ROWS:
        if not row.ours.startswith("python -m tinyllama"):
            continue
        words = row.ours.split()[3:]
        if words[0] == "profile":
            assert tinyllama(*words, "--print-command", "--device", "cpu").status in (0, 2)
        else:
            with pytest.raises(SystemExit, match="0"):
                tinyllama(*words, "--help")


@pytest.mark.parametrize("name", ["get_trace.sh", "./get_trace.sh", "version3/get_trace.sh"])
def test_how_prints_the_row_of_a_name(name: str) -> None:
    text = printed("how", name)
    assert "python -m tinyllama profile trace" in text
    assert "get_counters" not in text


def test_how_says_which_names_there_are() -> None:
    assert "get_hotspots.sh" in refused("how", "nothing.sh")
