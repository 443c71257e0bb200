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
from tinyllama.harness.machine.device import synchronize
from tinyllama.ops import OPS
from tools import cuda_tools
from tools.cuda_tools import SECONDS, ToolError

ROOT = Path(__file__).resolve().parent.parent
# Races are looked for in shared memory; Triton has no way to plant one there.
TOOLS = {"memcheck": "store", "racecheck": None, "initcheck": "load"}
FOUND = 86  # what the sanitizer is asked to exit with
TIMED_OUT = 124  # the status of timeout(1)
SHOWN = 8  # last lines of a tool that misses the planted fault
DTYPES = (torch.float32, torch.bfloat16)


@jit
def stray_kernel(x, y, n, FAULT: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = x, with a store one element beyond y, or with loads of an x that was never written."""
    at = tl.arange(0, 128)
    inside = at < n + 1 if FAULT == "store" else at < n
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=inside)


def main(argv: Sequence[str] | None = None) -> int:
    parser = cuda_tools.parser(__doc__)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--timed", action="store_true", help="the timed cases instead")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # what a sanitized process runs
    args = parser.parse_args(argv)
    try:
        names = cuda_tools.op_names(args.only)
        if args.inside:
            _launch_stray(args.inside) if args.inside in ("store", "load") else _run(
                names, args.timed
            )
            return 0
        sanitizer = cuda_tools.program("compute-sanitizer")
        which = "timed" if args.timed else "ops"
        return max([_status(sanitizer, tool, names, which) for tool in args.tool or TOOLS])
    except ToolError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2


def _status(sanitizer: str, tool: str, names: Sequence[str], which: str = "ops") -> int:
    """1 where a tool finds a fault in these ops, else 0.

    Raises ToolError for a tool that misses the planted fault.
    """
    planted = TOOLS[tool]
    if planted is not None:
        status, said = _process(sanitizer, tool, planted, ())
        if status != FOUND:
            raise ToolError(
                f"{tool} does not see the planted {planted} here (status {status}). It said:\n"
                + "\n".join(said.splitlines()[-SHOWN:])
            )
    status, _ = _process(sanitizer, tool, which, names)
    if status == 0:
        print(f"{tool}: nothing found in {', '.join(names)}")
        return 0
    print(f"{tool}: {'faults, above' if status == FOUND else f'it ended with status {status}'}")
    return 1


def _process(sanitizer: str, tool: str, inside: str, names: Sequence[str]) -> tuple[int, str]:
    """The status of a sanitized process, and for a planted fault what it printed."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    command += [sys.executable, "-m", "tools.sanitize", "--inside", inside]
    command += ["--timed"] if inside == "timed" else []
    command += ["--only", ",".join(names)]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = None if inside in ("ops", "timed") else subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{tool}: no end after {SECONDS:.0f} s")
        return TIMED_OUT, ""
    return done.returncode, done.stdout or ""


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


aten = torch.ops.aten


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
