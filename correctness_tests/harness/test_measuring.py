"""What is measured besides time: kernels, their kinds and overlap, bytes, ceilings, cold caches."""

import statistics
import time
from typing import Any

import pytest
import torch

from tinyllama.harness.measure import memory
from tinyllama.harness.measure.cache import Flush, last_level_bytes
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.harness.measure.launches import kind_of, launches
from tinyllama.harness.measure.overlap import overlap_of

CPU = torch.device("cpu")
MIB = 2**20
AT = "void at::native::"


# -- where the time goes ----------------------------------------------------------------------

NAMES = {
    "products": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
        "Cijk_Alik_Bljk_SB_MT128x128x16_MI32x32x2x1_SN_1LDSB0",
        "triton_tem_fused_addmm_relu_3",
        "aten::mm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1",
        "bwd_kernel_dk_dv",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "optimizer": [
        f"{AT}(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMeta<4>, "
        "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
        "aten::_fused_adamw_",
    ],
    "elementwise": [
        f"{AT}vectorized_elementwise_kernel<4, {AT}FillFunctor<float>, std::array<char*, 1ul>>",
        f"{AT}reduce_kernel<512, 1, {AT}ReduceOp<float, {AT}MeanOps<float, float, float>>>",
        "triton_poi_fused_mul_silu_2",
    ],
    "copies": ["Memcpy DtoD (Device -> Device)", "Memset (Device)", "memcpy32_post"],
    "other": ["spin_kernel(long)"],
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in NAMES.items() for name in names]
)
def test_a_kernel_is_of_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("kernels", "collective", "hidden"),
    [
        ([], 0, 0),
        ([("gemm", 0, 5)], 0, 0),
        ([("ncclAllReduce", 0, 5)], 5, 0),
        ([("ncclAllReduce", 0, 5), ("gemm", 3, 9)], 5, 2),
        ([("rccl_sum", 0, 5), ("rccl_max", 4, 8), ("gemm", 1, 2), ("add", 7, 9)], 8, 2),
        ([("rcclGenericKernel", 1, 3), ("gemm", 0, 2), ("copy_kernel", 2, 4)], 2, 2),
    ],
)
def test_overlap_of_collectives_is_what_lies_under_computation(
    kernels: list[tuple[str, float, float]], collective: float, hidden: float
) -> None:
    overlap = overlap_of(kernels)
    assert (overlap.collective, overlap.hidden) == pytest.approx((collective * 1e-6, hidden * 1e-6))
    expected = hidden / collective if collective else None
    assert overlap.share == (None if expected is None else pytest.approx(expected))


def test_on_a_cpu_the_operators_are_timed_and_nothing_is_counted() -> None:
    x = torch.randn(256, 256)
    took = 0.0

    def call() -> None:
        nonlocal took
        start = time.perf_counter()
        (x @ x).exp()
        time.sleep(0.05)
        took = time.perf_counter() - start

    measured = launches(call, CPU)
    assert (measured.kernels, measured.copies, measured.host_syncs) == (None, None, None)
    assert measured.by_name["aten::mm"][0] == 1
    assert 0 < measured.busy_seconds < took - 0.04, "the host's own time is not an operator's"


@pytest.mark.gpu
@pytest.mark.parametrize("attached", [False, True], ids=["maybe", "surely"])
def test_kernels_of_a_captured_graph_are_counted_one_by_one(
    gpu: torch.device, attached: bool
) -> None:
    """Also where a profiler was attached before the capture: copies are other kernels then."""
    x, y = torch.ones(2, 2**20, device=gpu)
    if attached:
        launches(lambda: y.copy_(x), gpu)
    graph = torch.cuda.CUDAGraph()
    x.mul_(2)
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.mul_(2)
        for _ in range(2):
            y.copy_(x)
    graph.replay()
    measured = launches(graph.replay, gpu)
    assert (measured.kernels, measured.copies, measured.host_syncs) == (5, 2, 0), measured.by_name
    assert measured.busy_seconds > 0


@pytest.mark.gpu
def test_waits_of_the_host_are_counted(gpu: torch.device) -> None:
    x = torch.ones(2**20, device=gpu)
    x.sum().item()
    assert launches(lambda: x.mul_(2), gpu).host_syncs == 0
    once = launches(lambda: x.sum().item(), gpu).host_syncs
    assert once is not None
    assert once >= 1
    assert launches(lambda: [x.sum().item() for _ in range(3)], gpu).host_syncs == 3 * once


# -- bytes ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_what_a_captured_graph_allocates_is_live(gpu: torch.device) -> None:
    x = torch.ones(64 * MIB, dtype=torch.int8, device=gpu)
    x.amax()
    torch.cuda.synchronize(gpu)
    live, allocated = memory.live_bytes(gpu), torch.cuda.memory_allocated(gpu)
    graph = torch.cuda.CUDAGraph()

    def captured() -> torch.Tensor:
        return (x + 1).amax()  # the sum lies in the graph's pool, and nobody keeps it

    with torch.cuda.graph(graph):
        largest = captured()
    graph.replay()
    assert largest.item() == 2
    assert memory.pool_bytes([graph])[0] >= 64 * MIB
    assert torch.cuda.memory_allocated(gpu) - allocated < 64 * MIB
    assert memory.live_bytes(gpu) - live < 64 * MIB
    assert 64 * MIB <= memory.live_bytes(gpu, [graph]) - live < 96 * MIB
    assert memory.peak_bytes(gpu, [graph]) >= memory.live_bytes(gpu, [graph])


# -- caches and ceilings ----------------------------------------------------------------------


def test_a_flush_reads_twice_the_last_cache(device: torch.device) -> None:
    flush = Flush(device)
    assert flush.buffer.nbytes == 2 * last_level_bytes(device)
    flush.buffer[-1] = 3
    flush()
    assert flush.largest.item() == 3, "to its last byte"
    if device.type != "cpu":
        assert last_level_bytes(device) >= torch.cuda.get_device_properties(device).L2_cache_size


@pytest.mark.gpu
def test_after_a_flush_a_read_comes_from_memory(own_gpu: None, gpu: torch.device) -> None:
    x = torch.zeros(16 * MIB, dtype=torch.int8, device=gpu).view(torch.float32)
    largest = torch.empty((), device=gpu)
    clock, flush = Clock(queue_of(gpu)), Flush(gpu)

    def read() -> None:
        torch.amax(x, 0, out=largest)

    def seconds(before: Any) -> float:
        return statistics.median(clock.read(read, before).device for _ in range(21))

    seconds(flush)
    assert seconds(flush) > 1.1 * seconds(read)


@pytest.mark.long
def test_ceilings_are_rates(device: torch.device) -> None:
    assert copy_rate(device, rounds=2) > 1e8
    assert product_rate("fp32", device, rounds=2) > 1e8
