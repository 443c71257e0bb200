"""Attention's memory is linear in the length of the sequence, forward and backward.

Counted are the tensors that are made on the meta device, where kernels are noted and not run. A
GPU's allocator has the last word.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.harness.measure.memory import Allocations, forget_peak, live_bytes, peak_bytes
from tinyllama.ops.attention import attention

pytest.importorskip("triton")

LONG = [1024 << i for i in range(6)]  # tokens, to 32k
WITHIN = 0.02
H, G, K = 8, 4, 64  # heads, heads of keys and values, and their width


def forward_and_backward(
    provider: str, length: int, device: torch.device
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call that returns the gradients, on inputs that are there before."""
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    q, do = (torch.randn(1, length, H, K, **how) for _ in "qo")
    k, v = (torch.randn(1, length, G, K, **how) for _ in "kv")
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def call() -> tuple[torch.Tensor, ...]:
        o = attention[provider].call(*inputs)
        return torch.autograd.grad(o, inputs, do)

    return call


def allocated(provider: str) -> dict[str, list[int]]:
    """Bytes by what is counted, for each length; nothing runs."""
    counted: dict[str, list[int]] = {"total": [], "largest": [], "peak": []}
    for length in LONG:
        call = forward_and_backward(provider, length, torch.device("meta"))
        with Allocations() as allocations:
            call()
        for name, sizes in counted.items():
            sizes.append(getattr(allocations, name))
    return counted


def linear(lengths: list[int], sizes: list[int]) -> bool:
    """Whether each size is the first one's times how much longer its length is."""
    return all(
        abs(size / sizes[0] * lengths[0] / length - 1) <= WITHIN
        for length, size in zip(lengths, sizes, strict=True)
    )


def test_what_is_allocated_grows_with_the_length() -> None:
    """And eager's, which holds the scores, with its square."""
    with recorded("sm_90"):
        kernels, eager = allocated("triton"), allocated("eager")
    for name, sizes in kernels.items():
        assert linear(LONG, sizes), f"{name} bytes at {LONG} tokens: {sizes}"
    for name, sizes in eager.items():
        assert sizes[-1] > 2 * sizes[-2] * (1 + WITHIN), f"eager's {name} bytes: {sizes}"
    assert linear([length**2 for length in LONG], eager["largest"])


@pytest.mark.gpu
def test_the_peak_of_a_gpu_grows_with_the_length(device: torch.device) -> None:
    reason = cannot("gpu", device)
    if reason:
        pytest.skip(f"the allocator's peak: {reason}")

    def peak(provider: str, length: int) -> int:
        call = forward_and_backward(provider, length, device)
        # Compiled, and libraries have the memory they keep. The gradients are held: autograd's
        # thread lets go of its own reference at some time after the call has returned.
        results = call()
        synchronize(device)
        gc.collect()  # what earlier tests left is not freed between the two readings
        torch.cuda.empty_cache()
        before = live_bytes(device)
        forget_peak(device)
        call()
        synchronize(device)
        peak = peak_bytes(device) - before
        del results
        return peak

    sizes = [peak("triton", length) for length in LONG]
    assert linear(LONG, sizes), f"peak bytes at {LONG} tokens: {sizes}"
    T, scores = 4 * LONG[0], 2 * H * (4 * LONG[0]) ** 2
    assert sizes[LONG.index(T)] < scores < peak("eager", T)
