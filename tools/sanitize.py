"""The kernels under compute-sanitizer: out of bounds, races, reads of what nobody wrote.

    python -m tools.sanitize [--tool memcheck] [--only rope,silu_mul]

Every provider with kernels runs on every case of its op, forward and backward, in fp32 and bf16,
in memory that no allocator pools: each buffer is a neighbour of nothing. First a kernel with a
planted fault shows that the tool sees one here. Exit status: 0 nothing found, 1 a fault, 2 no such
tool or no GPU, or a tool that misses what was planted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import evaluate
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.precision import SHORT
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
# Races are looked for in shared memory; Triton has no way to plant one there.
TOOLS = {"memcheck": "store", "racecheck": None, "initcheck": "load"}
FOUND = 86  # what the sanitizer is asked to exit with
SECONDS = 1800.0
TIMED_OUT = 124  # as timeout(1) says it
DTYPES = (torch.float32, torch.bfloat16)


@jit
def stray_kernel(x: Any, y: Any, n: Any, FAULT: tl.constexpr) -> None:
    """y = x, and one element beyond it (store), or without x ever having been written (load)."""
    at = tl.arange(0, 128)
    inside = at < n + 1 if FAULT == "store" else at < n
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=inside)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--only", default="", metavar="OP,OP", help="only these ops")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # what a sanitized process runs
    args = parser.parse_args(argv)
    names = [name for name in args.only.split(",") if name] or list(OPS)
    if unknown := [name for name in names if name not in OPS]:
        return _say(f"--only {unknown[0]!r} is no op: use some of {', '.join(OPS)}")
    if args.inside:
        _plant(args.inside) if args.inside in ("store", "load") else _run(names)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return _say("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    if reason := cannot("gpu", torch.device("cpu" if not torch.cuda.is_available() else "cuda")):
        return _say(reason)
    found = [_under(sanitizer, tool, names) for tool in args.tool or TOOLS]
    return max(found)


def _say(text: str) -> int:
    print(f"sanitize: {text}", file=sys.stderr)
    return 2


def _under(sanitizer: str, tool: str, names: Sequence[str]) -> int:
    """The status of one tool over these ops."""
    planted = TOOLS[tool]
    if planted is not None and (status := _process(sanitizer, tool, planted, ())) != FOUND:
        return _say(f"{tool} does not see the planted {planted} here (status {status})")
    status = _process(sanitizer, tool, "ops", names)
    if status == 0:
        print(f"{tool}: nothing found in {', '.join(names)}")
        return 0
    print(f"{tool}: {'faults, above' if status == FOUND else f'it ended with status {status}'}")
    return 1


def _process(sanitizer: str, tool: str, inside: str, names: Sequence[str]) -> int:
    # fmt: off
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
        sys.executable, "-m", "tools.sanitize", "--inside", inside, "--only", ",".join(names),
    ]
    # fmt: on
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    quiet = inside in ("store", "load")
    output = subprocess.DEVNULL if quiet else None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{tool}: no end after {SECONDS:.0f} s")
        return TIMED_OUT
    return done.returncode


def _plant(fault: str) -> None:
    x, y = (torch.empty(100, device="cuda") for _ in range(2))
    if fault == "store":
        x.zero_()
    stray_kernel[(1,)](x, y, 100, FAULT=fault)
    torch.cuda.synchronize()


class Written(TorchDispatchMode):
    """Products go into memory that was set to zero before.

    On an H200 initcheck called each read of a library's product a fault where its rows were a
    multiple of 16 bytes: presumably those are stored by descriptors (TMA), which it does not count.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.mm.default, aten.bmm.default):
            zeros = args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
            written = aten.mm.out if func is aten.mm.default else aten.bmm.out
            return written(*args, out=zeros)
        if func in (aten.mm.out, aten.bmm.out, aten.addmm.out, aten.baddbmm.out):
            kwargs["out"].zero_()
        return func(*args, **kwargs)


aten = torch.ops.aten


def _run(names: Sequence[str]) -> None:
    """Each provider with kernels once on each of its cases; `test_ops` holds the results."""
    with Written():
        _run_each(names)


def _run_each(names: Sequence[str]) -> None:
    device = torch.device("cuda")
    for op in (OPS[name] for name in names):
        for provider in op.providers.values():
            if "triton" not in provider.requires:
                continue
            for case in op.cases:
                for dtype in (d for d in DTYPES if d in provider.dtypes):
                    one = OpCase(op, provider, case, dtype)
                    if one.unsupported() is None:
                        evaluate(op, provider.call, one.inputs(device), provider.overwrites)
                        synchronize(device)
                        print(f"{op.name}-{provider.name}-{case}-{SHORT[dtype]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
