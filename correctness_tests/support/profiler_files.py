"""Files as profilers write them (AMD's, version by version, and Nsight Compute), and programs that
stand for these profilers: they accept what the real ones accept, and refuse the rest. All files are
synthetic. AMD's are made from the documented formats: no AMD machine wrote any. Nsight Compute's
have the form that they had on an H200.
"""

import csv
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from tinyllama.profiling.command_lines import EXECUTABLES

GRID = [f"{what}_Size_{axis}" for what in ("Workgroup", "Grid") for axis in "XYZ"]
REGISTERS = ["LDS_Block_Size", "Scratch_Size", "VGPR_Count", "Accum_VGPR_Count", "SGPR_Count"]
TRACE = [
    *("Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id"),
    *("Kernel_Name", "Correlation_Id", "Start_Timestamp", "End_Timestamp", *REGISTERS, *GRID),
]
STATS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]
COUNTERS = [
    *("Correlation_Id", "Dispatch_Id", "Agent_Id", "Queue_Id", "Process_Id", "Thread_Id"),
    *("Grid_Size", "Kernel_Id", "Kernel_Name", "Workgroup_Size", *REGISTERS),
    *("Counter_Name", "Counter_Value", "Start_Timestamp", "End_Timestamp"),
]
NSIGHT_HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
# Kernels of a synthetic program: name, start and end in nanoseconds. The first has commas.
LAUNCHES = [
    ("void addition_kernel<float>(float*, float const*, int, int)", 1000, 4000),
    ("rms_norm_forward", 5000, 6000),
    ("rms_norm_forward", 7000, 9000),
]


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> Path:
    """A file with text in quotes, as rocprofv3 writes it; what a row lacks is 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval=0, quoting=csv.QUOTE_NONNUMERIC)
        writer.writeheader()
        writer.writerows(rows)
    return path


def trace(path: Path, *before: str) -> Path:
    """A kernel trace of rocprofv3; rocpd2csv writes a column before the others."""
    rows: list[dict[str, object]] = [
        {"Kind": "KERNEL_DISPATCH", "Kernel_Name": name, "Start_Timestamp": a, "End_Timestamp": b}
        for name, a, b in LAUNCHES
    ]
    return write_csv(path, [*before, *TRACE], rows)


def old_trace(path: Path) -> Path:
    """A trace of rocprof, before rocprofv3."""
    columns = ["Index", "KernelName", "gpu-id", "queue-id", "BeginNs", "EndNs", "DurationNs"]
    rows = [{"KernelName": name, "BeginNs": a, "EndNs": b} for name, a, b in LAUNCHES]
    return write_csv(path, columns, rows)


def stats(path: Path) -> Path:
    """Numbers may have exponents."""
    first, *rest = LAUNCHES
    rows: list[dict[str, object]] = [
        {"Name": first[0], "Calls": 1, "TotalDurationNs": 3000, "Percentage": "5.0e+01"},
        {"Name": rest[0][0], "Calls": 2, "TotalDurationNs": "3.000e+03", "Percentage": 50.0},
    ]
    return write_csv(path, STATS, rows)


def counters(path: Path) -> Path:
    """A row for each launch and counter."""
    rows: list[dict[str, object]] = [
        {"Kernel_Name": name, "Counter_Name": "SQ_WAVES", "Counter_Value": 16}
        for name, *_ in LAUNCHES
    ]
    return write_csv(path, COUNTERS, rows)


def database(path: Path) -> Path:
    """A rocpd database: tables whose names end in an identifier, and views on them."""
    with sqlite3.connect(path) as db:
        db.executescript(
            """
            CREATE TABLE rocpd_kernel_ab12 (id INTEGER PRIMARY KEY, name TEXT, stream_id INTEGER,
                queue_id INTEGER, start BIGINT, "end" BIGINT, vgpr_count INTEGER);
            CREATE VIEW kernels AS SELECT *, "end" - start AS duration FROM rocpd_kernel_ab12;
            CREATE TABLE rocpd_counter_ab12 (kernel_name TEXT, counter_name TEXT, value DOUBLE);
            CREATE VIEW counters_collection AS SELECT * FROM rocpd_counter_ab12;
            """
        )
        db.executemany("INSERT INTO rocpd_kernel_ab12 VALUES (NULL, ?, 3, 1, ?, ?, 8)", LAUNCHES)
        names = [(name,) for name, *_ in LAUNCHES]
        db.executemany("INSERT INTO rocpd_counter_ab12 VALUES (?, 'SQ_WAVES', 16)", names)
    db.close()
    return path


def nsight(path: Path, metrics: Sequence[str], *, base: bool = True) -> Path:
    """The launches of `LAUNCHES`: each moves 4 KiB, and half of its warps are active, and in the
    last launch all. Without ``base`` bytes and times have units of their size."""
    rows = []
    for number, (kernel, start, end) in enumerate(LAUNCHES):
        figures = {
            "gpu__time_duration.sum": ("nsecond", f"{end - start:,}"),
            "dram__bytes.sum": ("byte", "4,096") if base else ("Kbyte", "4.10"),
            WARPS: ("%", "100" if number == len(LAUNCHES) - 1 else "50"),
        }
        for metric in metrics:
            unit, value = figures[metric]
            rows.append(f'"{number}","7","{kernel}","{metric}","{unit}","{value}"')
    before = ("==PROF== Connected to process 7", "what the program prints", NSIGHT_HEAD)
    path.write_text("\n".join([*before, *rows, "==PROF== Disconnected"]) + "\n")
    return path


# -- programs -------------------------------------------------------------------------------------

_HEAD = """#!{python}
import argparse, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from correctness_tests.support import profiler_files

before, _, program = " ".join(sys.argv[1:]).partition(" -- ")
words = before.split()
parser = argparse.ArgumentParser(prog={name!r}, allow_abbrev=False)
"""
_ROCPROFV3 = """
for flag in ("--sys-trace", "--kernel-trace", "--runtime-trace", "--stats", "-T"):
    parser.add_argument(flag, action="store_true")
formats = ["csv", "json", "pftrace"] + (["rocpd"] if {version} >= (7, 0) else ["otf2"])
parser.add_argument("--output-format", choices=formats, default=formats[-1])
parser.add_argument("--pmc", nargs="+")
parser.add_argument("-d", type=Path, required=True)
parser.add_argument("-o", required=True)
args = parser.parse_args(words)
if not program:
    sys.exit("rocprofv3: error: no application")
traced = args.sys_trace or args.kernel_trace or args.runtime_trace
if args.stats and not traced:
    sys.exit("No tracing options were enabled for --stats option")
args.d.mkdir(parents=True, exist_ok=True)
if args.output_format == "pftrace":
    (args.d / f"{args.o}_results.pftrace").write_bytes(b"synthetic")
elif args.output_format == "csv":
    if traced:
        profiler_files.trace(args.d / f"{args.o}_kernel_trace.csv")
    if args.stats:
        profiler_files.stats(args.d / f"{args.o}_kernel_stats.csv")
    if args.pmc:
        profiler_files.counters(args.d / f"{args.o}_counter_collection.csv")
"""
_COMPUTE = """
modes = parser.add_subparsers(dest="mode", required=True)
profile, analyze = (modes.add_parser(name, allow_abbrev=False) for name in ("profile", "analyze"))
profile.add_argument("-n", required=True)
profile.add_argument("--no-roof", action="store_true")
analyze.add_argument("-p", type=Path, required=True)
analyze.add_argument("-n", choices=("per_wave", "per_cycle", "per_second"))
analyze.add_argument("--list-stats", action="store_true")
args = parser.parse_args(words)
if args.mode == "profile":
    folder = Path("workloads") / args.n / "MI300X_A1"
    folder.mkdir(parents=True)
    (folder / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name\\n")
elif not (args.p / "pmc_perf.csv").is_file():
    sys.exit(f"analyze: error: {args.p} has no pmc_perf.csv")
else:
    print("Detected Kernels (sorted descending by duration)")
"""
_SYSTEMS = """
for flag in ("--trace", "--profile", "-S", "-H", "-D"):
    parser.add_argument(flag, action="store_true")
parser.add_argument("-o", type=Path, required=True)
out = parser.parse_args(words).o / "2026-01-01_00.00"
out.mkdir(parents=True)
(out / "perfetto-trace-17.proto").write_bytes(b"synthetic")
"""
_NSIGHT = """
parser.add_argument("--csv", action="store_true", required=True)
parser.add_argument("--print-units", choices=["auto", "base"], default="auto")
parser.add_argument("--metrics", required=True)
parser.add_argument("--target-processes", choices=["all", "application-only"], default="all")
parser.add_argument("--log-file", type=Path, required=True)
parser.add_argument("program", nargs=argparse.REMAINDER)
args = parser.parse_args()
assert args.program and not args.program[0].startswith("-")
base = args.print_units == "base"
profiler_files.nsight(args.log_file, args.metrics.split(","), base=base)
"""
PROGRAMS = {
    "rocprofv3": _ROCPROFV3,
    "rocprof-compute": _COMPUTE,
    "rocprof-sys": _SYSTEMS,
    "ncu": _NSIGHT,
}


def install(root: Path, version: str) -> Path:
    """A folder as ROCm's of a version, with all profilers; its ``bin`` is returned."""
    (root / ".info").mkdir(parents=True)
    (root / ".info/version").write_text(f"{version}.1-66\n")
    binaries = root / "bin"
    binaries.mkdir()
    support = str(Path(__file__).resolve().parents[2])
    for name, body in PROGRAMS.items():
        program = binaries / EXECUTABLES[name]
        body = body.replace("{version}", str(tuple(map(int, version.split(".")))))
        program.write_text(_HEAD.format(python=sys.executable, root=support, name=name) + body)
        program.chmod(0o755)
    return binaries
