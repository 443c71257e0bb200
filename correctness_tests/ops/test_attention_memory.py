"""Attention's memory is linear in the length of the sequence, forward and backward.

Counted on every device are the tensors that are made: at small sizes where the kernels run, and at
real ones on the meta device, where they are noted and not run. A GPU's allocator has the last word.
The materialised scores of eager grow with the square, so the same counting can fail.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.harness.measure.memory import Allocations, forget_peak, live_bytes, peak_bytes
from tinyllama.ops.attention import FEW_TOKENS, attention

pytest.importorskip("triton")

SHORT, LONG = [16, 32, 64], [1024 << i for i in range(6)]  # to 32k
WITHIN = 0.02


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads, and their width."""

    H: int
    G: int
    K: int


SMALL, MODEL = Heads(H=2, G=1, K=8), Heads(H=8, G=4, K=64)


def forward_and_backward(
    provider: str, heads: Heads, length: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call that returns the gradients, on inputs that are there before."""
    q, do = (torch.randn(1, length, heads.H, heads.K, dtype=dtype, device=device) for _ in "qo")
    k, v = (torch.randn(1, length, heads.G, heads.K, dtype=dtype, device=device) for _ in "kv")
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def call() -> tuple[torch.Tensor, ...]:
        o = attention[provider].call(*inputs)
        return torch.autograd.grad(o, inputs, do)

    return call


def made(provider: str, heads: Heads, lengths: list[int], device: torch.device) -> dict[str, list]:
    """Bytes by what is counted, for each length."""
    counted: dict[str, list] = {"total": [], "largest": [], "peak": []}
    for length in lengths:
        call = forward_and_backward(provider, heads, length, device, torch.bfloat16)
        with Allocations() as seen:
            call()
        for name, sizes in counted.items():
            sizes.append(getattr(seen, name))
    return counted


def linear(lengths: list[int], sizes: list[int]) -> bool:
    """Whether each size is the first one's times how much longer its length is."""
    return all(
        abs(size / sizes[0] * lengths[0] / length - 1) <= WITHIN
        for length, size in zip(lengths, sizes, strict=True)
    )


def assert_growth(by_kernels: dict[str, list], by_eager: dict[str, list], lengths: list) -> None:
    for name, sizes in by_kernels.items():
        assert linear(lengths, sizes), f"{name} bytes at {lengths} tokens: {sizes}"
    for name, sizes in by_eager.items():
        assert not linear(lengths, sizes), f"eager's {name} bytes at {lengths} tokens: {sizes}"
        assert sizes[-1] > 2 * sizes[-2] * (1 + WITHIN)
    squares = [length**2 for length in lengths]
    assert linear(squares, by_eager["largest"]), by_eager["largest"]


def test_what_is_made_grows_with_the_length(device: torch.device) -> None:
    assert SHORT[-1] <= FEW_TOKENS, "one launch backward, here; several below"
    kernels, eager = (made(provider, SMALL, SHORT, device) for provider in ("triton", "eager"))
    assert_growth(kernels, eager, SHORT)


def test_what_is_made_for_real_sequences_grows_with_the_length() -> None:
    assert LONG[0] > FEW_TOKENS
    with recorded("sm_90") as launches:
        kernels, eager = (
            made(provider, MODEL, LONG, torch.device("meta")) for provider in ("triton", "eager")
        )
    assert len(launches) == 3 * len(LONG), "the kernels were not asked for"
    assert_growth(kernels, eager, LONG)


def test_what_is_made_is_the_results_and_a_number_for_each_query() -> None:
    """o and the gradients in the inputs' dtype; lse and delta in float32."""
    with recorded("sm_90"):
        counted = made("triton", MODEL, LONG[:1], torch.device("meta"))
    H, G, K, T = MODEL.H, MODEL.G, MODEL.K, LONG[0]
    assert counted["total"] == [2 * T * K * (2 * H + 2 * G) + 2 * 4 * T * H]
    assert counted["largest"] == [2 * T * H * K]


@pytest.mark.gpu
def test_the_peak_of_a_gpu_grows_with_the_length(device: torch.device) -> None:
    reason = cannot("gpu", device)
    if reason:
        pytest.skip(f"the allocator's peak: {reason}")

    def peak(provider: str, length: int) -> int:
        call = forward_and_backward(provider, MODEL, length, device, torch.bfloat16)
        # Compiled, and libraries have the memory they keep. The gradients are held: autograd's
        # thread lets go of its own reference at some time after the call has returned.
        held = call()
        synchronize(device)
        gc.collect()  # what earlier tests left is not freed between the two readings
        torch.cuda.empty_cache()
        before = live_bytes(device)
        forget_peak(device)
        call()
        synchronize(device)
        peak = peak_bytes(device) - before
        del held
        return peak

    sizes = [peak("triton", length) for length in LONG]
    assert linear(LONG, sizes), f"peak bytes at {LONG} tokens: {sizes}"
    T, scores = 4 * LONG[0], 2 * MODEL.H * (4 * LONG[0]) ** 2
    assert sizes[LONG.index(T)] < scores < peak("eager", T)
