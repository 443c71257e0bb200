"""The operations that kernels execute, by the GPU's counters, beside those that ops declare.

    python -m tools.count_flops [--only attention,rope] [--record] [--results-dir DIR]

Each Triton provider makes one call, forward and backward, on its op's largest timed case under
Nsight Compute. Operations beyond those declared are done twice, or for a result that is not used:
tiles above a causal diagonal, products recomputed in backward. First a product of known size shows
that the counters count. Exit status: 0 counted and no more than the last record of this device, 1
more than that, 2 no such tool, no GPU, or counters that this user may not read.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tinyllama.harness.machine.device import default_device, device_name
from tinyllama.harness.machine.files import check_results_dir
from tinyllama.harness.measure.op_contender import OpContender, Timed, timed_dtype
from tinyllama.harness.records.entries import FlopsEntry
from tinyllama.harness.records.results import Record, folder, load, new_record, save
from tinyllama.ops import OPS
from tinyllama.profiling import nsight
from tools import cuda_tools
from tools.cuda_tools import SECONDS, ToolError

ROOT = Path(__file__).resolve().parent.parent
GROUP = "flops"
# Operations of matrix units; multiply and add are two (Nsight Compute, `--query-metrics` of GH100).
MATRIX = tuple(
    f"sm__ops_path_tensor_src_{kind}.sum"
    for kind in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp64")
)
# Instructions of threads in float32, and how many operations each is.
SCALAR = {
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 2,
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": 1,
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": 1,
}
KNOWN = 2048  # rows and columns of the product of known size
CLOSE = 0.01  # how far its count may be from 2 n^3, and a provider's count above the record
SEPARATOR = "spin_kernel"  # of torch.cuda._sleep: it begins each call


@dataclass(frozen=True)
class Count:
    """What one call executed: operations of matrix units, and of threads in float32."""

    matrix: float = 0.0
    scalar: float = 0.0


class CountError(ToolError):
    """Counters that give no counts, or invalid ones."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = cuda_tools.parser(__doc__)
    parser.add_argument("--record", action="store_true", help="store the counts")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        names = cuda_tools.op_names(args.only)
        cases = [_case(name) for name in names if "triton" in OPS[name].providers]
        if not cases:
            raise ToolError(f"--only {args.only!r}: none of these has a Triton provider")
        if args.inside:
            _run(cases)
            return 0
        profiler, device = cuda_tools.program("ncu"), default_device()
        if args.record:
            check_results_dir(args.results_dir)
        last = _last(args.results_dir, device_name(device))
        counts = _counted(profiler, names, len(cases))
    except (ToolError, ValueError) as error:
        print(f"count_flops: {error}", file=sys.stderr)
        return 2
    record = new_record(device, GROUP)
    record.entries = [_entry(case, count) for case, count in zip(cases, counts, strict=True)]
    record.complete = len(names) == len(OPS)
    more = above(record, last)
    _show(record)
    for line in more:
        print(f"count_flops: {line}", file=sys.stderr)
    if args.record:
        print(f"recorded {save(record, args.results_dir)}")
    return 1 if more else 0


def _case(name: str) -> Timed:
    return Timed(name, "triton", len(OPS[name].timed) - 1, timed_dtype(OPS[name], "bf16"))


# -- the profiled process -----------------------------------------------------------------------


class _Once(OpContender):
    """A contender of which the profiler sees one call, and nothing else."""

    def counted(self) -> None:
        self.run_once()
        self._prepare(self.passes[-1])
        with _profiled():
            self._run()


@contextmanager
def _profiled() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _run(cases: Sequence[Timed]) -> None:
    one = torch.randn(KNOWN, KNOWN, device="cuda", dtype=torch.bfloat16)
    one @ one
    with _profiled():
        one @ one
    for case in cases:
        _Once(case, "cuda", "tinyllama.ops").counted()


# -- its counts ---------------------------------------------------------------------------------


def _counted(profiler: str, names: Sequence[str], number: int) -> list[Count]:
    """A count of each case. Raises CountError."""
    command = [profiler, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--metrics", ",".join([*MATRIX, *SCALAR])]
    command += [sys.executable, "-m", "tools.count_flops", "--inside", "--only", ",".join(names)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CountError(f"no end after {SECONDS:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise CountError(f"ncu ended with status {done.returncode}: {last}")
    known, *counts = parsed(done.stdout)
    if abs(known.matrix / (2.0 * KNOWN**3) - 1) > CLOSE:
        raise CountError(f"a product of 2 x {KNOWN}^3 operations was counted as {known.matrix:.4g}")
    if len(counts) != number:
        raise CountError(f"{len(counts)} calls were counted, not {number}")
    return counts


def parsed(output: str) -> list[Count]:
    """The counts of the profiled calls, in order; a spin kernel begins each.

    Raises ProfileError where ncu printed a value that is no number, or no value at all, and
    CountError for a kernel before the first call.
    """
    found: list[list[float]] = []
    seen = None
    for launch, kernel, metric, _, value in nsight.readings("ncu's output", output):
        if SEPARATOR in kernel:
            if launch != seen:
                found.append([0.0, 0.0])
            seen = launch
        elif not found:
            raise CountError(f"{kernel} was counted before the first call")
        else:
            found[-1][0] += value if metric in MATRIX else 0.0
            found[-1][1] += value * SCALAR.get(metric, 0)
    return [Count(*each) for each in found]


def _entry(timed: Timed, count: Count) -> FlopsEntry:
    op = OPS[timed.op]
    case = op.timed[timed.case]
    return FlopsEntry(
        name=f"flops/{timed.op}-{timed.provider}-{case}-{timed.dtype}",
        op=timed.op,
        case=str(case),
        dtype=timed.dtype,
        declared_flops=float(sum(flops(**case.dims) for flops in op.flops.values())),
        matrix_flops=count.matrix,
        scalar_flops=count.scalar,
    )


def _last(results: Path, device: str) -> Record | None:
    """The last record of this device that has every op."""
    found = [load(path) for path in sorted(folder(results, device).glob(f"*-{GROUP}*.json"))]
    whole = [record for record in found if record.group == GROUP and record.complete]
    return max(whole, key=lambda record: record.date, default=None)


def above(record: Record, last: Record | None) -> list[str]:
    """The counts that are above those of the last record by more than a hundredth."""
    before = {entry.name: entry for entry in last.of(FlopsEntry)} if last else {}
    return [
        f"{now.name}: {field} {getattr(now, field):.4g}, recorded {getattr(old, field):.4g}"
        for now in record.of(FlopsEntry)
        if (old := before.get(now.name))
        for field in ("matrix_flops", "scalar_flops")
        if getattr(now, field) > getattr(old, field) * (1 + CLOSE)
    ]


def _show(record: Record) -> None:
    table = Table("op", "case", "dtype", "declared", "matrix units", "threads, fp32", "share")
    for row in rows(record):
        table.add_row(*row)
    Console().print(table)


def rows(record: Record) -> list[tuple[str, ...]]:
    """The cells of a table. The share is executed / declared, of matrix units if they are used."""
    found = []
    for entry in record.of(FlopsEntry):
        counts = entry.declared_flops, entry.matrix_flops, entry.scalar_flops
        declared, matrix, scalar = counts
        share = f"{(matrix or scalar) / declared:.3f}" if declared else ""
        numbers = (f"{count:.4g}" for count in counts)
        found.append((entry.op, entry.case, entry.dtype, *numbers, share))
    return found


if __name__ == "__main__":
    sys.exit(main())
