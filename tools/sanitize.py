"""The kernels under compute-sanitizer: accesses out of bounds, races, reads of unwritten memory.

    python -m tools.sanitize [--tool memcheck] [--only rope,silu_mul] [--timed]

Every provider with kernels runs on every case of its op, forward and backward, in fp32 and bf16
(with --timed on the timed cases instead, for which the chips' tables choose other kernels), in
memory that is not pooled, so that no buffer has a neighbour. First a kernel with a planted fault
shows that the tool sees one here. Exit status: 0 nothing found, 1 a fault, 2 no such tool, no GPU,
or a tool that misses the planted fault.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.machine.device import cannot, default_device, synchronize
from tinyllama.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
# Races are looked for in shared memory; Triton has no way to plant one there.
TOOLS = {"memcheck": "store", "racecheck": None, "initcheck": "load"}
FAULT = 86  # what the sanitizer is asked to exit with
SECONDS = 1800.0  # that a sanitized process may take
SHOWN = 8  # last lines of a tool that misses the planted fault
DTYPES = (torch.float32, torch.bfloat16)
aten = torch.ops.aten


class ToolError(RuntimeError):
    """Why the kernels cannot be sanitized here; exit status 2."""


@jit
def stray_kernel(x, y, n, FAULT: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = x, with a store one element beyond y, or with loads of an x that was never written."""
    at = tl.arange(0, 128)
    inside = at < n + 1 if FAULT == "store" else at < n
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=inside)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="OP,OP", help="only these ops")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--timed", action="store_true", help="the timed cases instead")
    parser.add_argument("--inside", choices=("store", "load", "ops"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = [name for name in args.only.split(",") if name] or list(OPS)
    sanitizer = shutil.which("compute-sanitizer")
    try:
        if unknown := [name for name in names if name not in OPS]:
            raise ToolError(f"--only {unknown[0]!r} is no op: use some of {', '.join(OPS)}")
        if args.inside:  # this process is the sanitized one
            if args.inside == "ops":
                _run(names, args.timed)
            else:
                _launch_stray(args.inside)
            return 0
        if sanitizer is None:
            raise ToolError("compute-sanitizer is not on the PATH: the CUDA toolkit brings it")
        if reason := cannot("gpu", default_device()):
            raise ToolError(reason)
        return max([_status(sanitizer, tool, names, args.timed) for tool in args.tool or TOOLS])
    except ToolError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2


def _status(sanitizer: str, tool: str, names: Sequence[str], timed: bool) -> int:
    """1 where a tool finds a fault in these ops, else 0.

    Raises ToolError for a tool that misses the planted fault.
    """
    planted = TOOLS[tool]
    if planted is not None:
        done = _sanitized(sanitizer, tool, "--inside", planted, stdout=subprocess.PIPE)
        if done.returncode != FAULT:
            last = "\n".join(done.stdout.splitlines()[-SHOWN:])
            raise ToolError(
                f"{tool} does not see the planted {planted} here (status {done.returncode}). "
                f"It said:\n{last}"
            )
    words = ["--inside", "ops", "--only", ",".join(names), *(["--timed"] if timed else [])]
    status = _sanitized(sanitizer, tool, *words).returncode
    if status == 0:
        print(f"{tool}: nothing found in {', '.join(names)}")
        return 0
    print(f"{tool}: {'faults, above' if status == FAULT else f'it ended with status {status}'}")
    return 1


def _sanitized(
    sanitizer: str, tool: str, *words: str, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A process of this program under a tool. Raises ToolError where it does not end."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FAULT), "--print-limit", "20"]
    try:
        return subprocess.run(
            [*command, sys.executable, "-m", "tools.sanitize", *words],
            cwd=ROOT,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=stdout,
            stderr=stdout and subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{tool}: no end after {SECONDS:.0f} s") from error


def _launch_stray(fault: str) -> None:
    x, y = (torch.empty(100, device="cuda") for _ in range(2))
    if fault == "store":
        x.zero_()
    stray_kernel[(1,)](x, y, 100, FAULT=fault)
    torch.cuda.synchronize()


class Written(TorchDispatchMode):
    """While active, products are written into memory that was set to zero before.

    On an H200 initcheck reported each read of a library's product whose rows were a multiple of 16
    bytes: presumably those are stored by descriptors (TMA), which it does not count as writes.
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


def _run(names: Sequence[str], timed: bool) -> None:
    """Each provider with kernels once on each of its cases; `test_ops` compares the results."""
    device = torch.device("cuda")
    for case in _timed_cases(names) if timed else op_cases(OPS[name] for name in names):
        provider = case.provider
        if "triton" not in provider.requires or case.varied or case.dtype not in DTYPES:
            continue
        if case.unsupported() is None:
            with Written():
                evaluate(case.op, provider.call, case.inputs(device), provider.overwrites)
            synchronize(device)
            print(case, flush=True)


def _timed_cases(names: Sequence[str]) -> Iterator[OpCase]:
    for op in (OPS[name] for name in names):
        for provider, case, dtype in itertools.product(op.providers.values(), op.timed, op.dtypes):
            yield OpCase(op, provider, case, dtype)


if __name__ == "__main__":
    sys.exit(main())
