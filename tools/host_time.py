"""What forward and backward of each op's smallest timed case cost the host, in microseconds.

    python -m tools.host_time                       # on a GPU, or on a stand-in where there is none
    python -m tools.host_time --ops rms_norm --profile triton    # where a provider's time goes

The stand-in has everything but the device: kernels are compiled for sm_90 and launched by Triton's
own launcher, on a driver library that does nothing (``no_device.c``, compiled with ``cc``); tensors
of the CPU pass for those of a GPU. Missing are what a driver takes for a launch, CUDA's allocator,
and the thread that autograd has for a GPU; torch's own op computes on the CPU. Figures are medians
over calls, providers alternately. On a GPU each call begins on an idle device, and ends before the
device is waited for.
"""

import argparse
import cProfile
import functools
import importlib
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tinyllama.harness.machine.device import synchronize

CHIP = "sm_90"
OPS = (
    "rms_norm",
    "silu_mul",
    "cross_entropy",
    "linear_cross_entropy",
    "add_rms_norm",
    "rope",
    "attention",
)
TURN = 10  # calls of a provider after each other
PROVIDERS = ("torch", "triton", "liger")


def stand_in(folder: Path) -> None:
    """Start this process again with the driver library that does nothing, and an allocator that
    keeps the memory that it has."""
    if "TRITON_LIBCUDA_PATH" in os.environ:
        return
    source, library = Path(__file__).with_name("no_device.c"), folder / "libcuda.so.1"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    os.environ.update(
        TRITON_LIBCUDA_PATH=str(folder),
        TRITON_CACHE_DIR=str(folder / "cache"),
        LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        MALLOC_MMAP_THRESHOLD_=str(2**30),
        MALLOC_TRIM_THRESHOLD_=str(2**30),
        OMP_NUM_THREADS="1",
    )
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def pretend() -> None:
    """Make Triton's driver active on that library, and let tensors of the CPU pass for a GPU's."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.Tensor.get_device = lambda self: 0  # type: ignore[method-assign]
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from tinyllama.harness.kernels import launch, launch_cache

    driver.set_active(CudaDriver())
    launch_cache.knows = functools.cache(lambda index: True)
    launch._gpu_chip = functools.cache(lambda device: CHIP)
    launch._CHIPS.append(CHIP)


def step(call: Callable[..., Any], inputs: Any) -> Callable[[], None]:
    """One forward and one backward pass, as a user calls them."""
    args = {
        name: x.detach().requires_grad_(x.is_floating_point() and name not in ("cos", "sin"))
        for name, x in inputs.args.items()
    }
    leaves, upstream = [x for x in args.values() if x.requires_grad], [*inputs.upstream.values()]

    def once() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs = call(*args.values())
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else [outputs], upstream)

    return once


def steps_of(name: str, device: str) -> dict[str, Callable[[], None]]:
    """By provider, a step of an op's smallest timed case."""
    importlib.import_module("tinyllama.bench.peers.liger")  # registers providers
    from tinyllama.harness.check.evaluate import make_inputs
    from tinyllama.ops import OPS as ALL

    op = ALL[name]
    inputs = make_inputs(op, op.timed[0], torch.float32, device)
    found = {}
    for provider in PROVIDERS:
        if provider in op.providers:
            once = step(op[provider].call, inputs)
            try:
                once()
            except ModuleNotFoundError as error:
                print(f"{name:22} {provider} is left out: {error}", flush=True)
                continue
            found[provider] = once
    return found


def timed(
    steps: dict[str, Callable[[], None]], calls: int, wait: Callable[[], Any]
) -> dict[str, float]:
    """Microseconds of a step by name: the median of calls, in turns of `TURN`."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(20):
        for once in steps.values():
            once()
    for _ in range(calls // TURN):
        for name, once in steps.items():
            for _ in range(TURN):
                wait()
                start = time.perf_counter()
                once()
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * median(found) for name, found in seconds.items()}


def profiled(once: Callable[[], None], calls: int) -> None:
    for _ in range(20):
        once()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        once()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--ops", nargs="+", default=OPS)
    options.add_argument("--calls", type=int, default=400)
    options.add_argument("--profile", metavar="PROVIDER")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if "TRITON_LIBCUDA_PATH" not in os.environ:
            stand_in(Path(tempfile.mkdtemp()))
        pretend()
    for name in given.ops:
        steps = steps_of(name, device)
        if given.profile:
            profiled(steps[given.profile], given.calls)
            continue
        found = timed(steps, given.calls, functools.partial(synchronize, torch.device(device)))
        print(
            f"{name:22}",
            *(f"{provider} {micros:7.1f}" for provider, micros in found.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
