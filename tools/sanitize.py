"""The kernels under compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m tools.sanitize [--only rope,silu_mul]

Every provider with kernels runs on every case of its op, forward and backward, in fp32 and bf16, in
memory that is not pooled, so that no buffer has a neighbour. First the sanitizer must see a store
that is planted beyond a buffer. Exit status: 0 nothing found, 1 a fault, 2 no sanitizer, no GPU, or
a sanitizer that misses the planted fault.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tinyllama.cli.argument_types import check_known
from tinyllama.harness.check.cases import op_cases
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.machine.device import cannot, default_device, synchronize
from tinyllama.harness.machine.errors import UsageError
from tinyllama.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
FAULT = 86  # what the sanitizer is asked to exit with
SECONDS = 1800.0  # that a sanitized process may take
SHOWN = 8  # last lines of a tool that misses the planted fault
DTYPES = (torch.float32, torch.bfloat16)


@jit
def stray_kernel(x, y, n):  # type: ignore[no-untyped-def]
    """y = x, with a store one element beyond y."""
    at = tl.arange(0, 128)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n + 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default=",".join(OPS), metavar="OP,OP", help="only these ops")
    parser.add_argument("--inside", choices=("stray", "ops"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = args.only.split(",")
    check_known("--only", names, OPS)
    if args.inside == "stray":  # this process is the sanitized one
        x, y = (torch.zeros(100, device="cuda") for _ in range(2))
        stray_kernel[(1,)](x, y, 100)
        torch.cuda.synchronize()
        return 0
    if args.inside == "ops":
        run_ops(names)
        return 0
    if shutil.which("compute-sanitizer") is None:
        raise UsageError("compute-sanitizer is not on the PATH: the CUDA toolkit brings it")
    if reason := cannot("gpu", default_device()):
        raise UsageError(reason)
    planted = sanitized("memcheck", "--inside", "stray", capture=True)
    if planted.returncode != FAULT:
        last = "\n".join(planted.stdout.splitlines()[-SHOWN:])
        status = f"status {planted.returncode}"
        raise UsageError(f"memcheck does not see the planted store here ({status}): {last}")
    statuses = {
        tool: sanitized(tool, "--inside", "ops", "--only", ",".join(names)).returncode
        for tool in TOOLS
    }
    for tool, ended in statuses.items():
        faults = "faults, above" if ended == FAULT else f"it ended with status {ended}"
        print(f"{tool}: {faults if ended else 'nothing found'}")
    return int(any(statuses.values()))


def sanitized(tool: str, *words: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """A process of this program under a tool. Raises UsageError where it does not end."""
    options = ["--tool", tool, "--error-exitcode", str(FAULT), "--print-limit", "20"]
    try:
        return subprocess.run(
            ["compute-sanitizer", *options, sys.executable, "-m", "tools.sanitize", *words],
            cwd=ROOT,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{tool}: no end after {SECONDS:.0f} s") from error


def run_ops(names: Sequence[str]) -> None:
    """Each provider with kernels once on each of its cases; `test_ops` compares the results."""
    device = torch.device("cuda")
    for case in op_cases(OPS[name] for name in names):
        provider = case.provider
        if "triton" not in provider.requires or case.varied or case.dtype not in DTYPES:
            continue
        if case.unsupported() is None:
            evaluate(case.op, provider.call, case.inputs(device), provider.overwrites)
            synchronize(device)
            print(case, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        sys.exit(2)
