"""The ceilings of a device, measured: copy bandwidth and the rate of large products.

No program reaches a datasheet's figures, so shares of them say little about a kernel. Stock code
reaches these ceilings on the same device, minutes before or after.
"""

from collections.abc import Callable

import torch

from tinyllama.harness.measure.clock import Clock, queue_of

# A kernel may be this many times faster than a ceiling before its time counts as impossible: one
# that only reads, or a product at higher clocks, beats the ceilings a little.
CLEARANCE = 1.15

PRODUCT_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def copy_rate(device: torch.device, *, rounds: int = 10) -> float:
    """Bytes read plus bytes written per second by a copy far larger than the caches."""
    count = 2**30 if device.type != "cpu" else 2**26
    source = torch.randint(-128, 127, (count,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * count / least_seconds(lambda: target.copy_(source), device, rounds)


def product_rate(precision: str, device: torch.device, *, rounds: int = 8) -> float:
    """FLOP per second of a square product of random matrices, 8192 wide (1024 on a CPU)."""
    width = 8192 if device.type != "cpu" else 1024
    dtype = PRODUCT_DTYPES[precision]
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * width**3 / least_seconds(lambda: left @ right, device, rounds)
    finally:
        torch.set_float32_matmul_precision(before)


def least_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The minimum device seconds of a call: a ceiling needs to be reached only once."""
    clock = Clock(queue_of(device))
    for _ in range(3):
        call()
    return min(clock.read(call).device for _ in range(rounds))
