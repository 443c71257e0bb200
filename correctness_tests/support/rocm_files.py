"""Files as AMD's profilers write them, version by version, and programs that stand for these
profilers: they accept what the real ones accept, and refuse the rest. No AMD machine wrote any of
it: every file is synthetic, made from the documented formats.
"""

import csv
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

GRID = [f"{what}_Size_{axis}" for what in ("Workgroup", "Grid") for axis in "XYZ"]
SEGMENTS = ["Private_Segment_Size", "Group_Segment_Size"]
REGISTERS = ["LDS_Block_Size", "Scratch_Size", "VGPR_Count", "Accum_VGPR_Count", "SGPR_Count"]
TIMES = ["Kernel_Id", "Kernel_Name", "Correlation_Id", "Start_Timestamp", "End_Timestamp"]
# The columns of a kernel trace, by the version of ROCm that writes them.
TRACES = {
    "6.2": ["Kind", "Agent_Id", "Queue_Id", *TIMES, *SEGMENTS, *GRID],
    "6.4": ["Kind", "Agent_Id", "Queue_Id", "Thread_Id", "Dispatch_Id", *TIMES, *SEGMENTS, *GRID],
    "7.0": [
        *("Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id"),
        *(*TIMES, *REGISTERS, *GRID),
    ],
    "rocpd2csv": [
        *("Guid", "Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", *TIMES),
        *(name.title() for name in REGISTERS),
        *GRID,
    ],
}
STATS = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]
COUNTERS = [
    *("Correlation_Id", "Dispatch_Id", "Agent_Id", "Queue_Id", "Process_Id", "Thread_Id"),
    *("Grid_Size", "Kernel_Id", "Kernel_Name", "Workgroup_Size", *REGISTERS),
    *("Counter_Name", "Counter_Value", "Start_Timestamp", "End_Timestamp"),
]
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
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(columns)
        writer.writerows([[row.get(name, 0) for name in columns] for row in rows])
    return path


def trace(path: Path, version: str) -> Path:
    rows = [
        {"Kind": "KERNEL_DISPATCH", "Kernel_Name": name, "Start_Timestamp": start}
        | {"End_Timestamp": end, "Queue_Id": 1, "Stream_Id": 3}
        for name, start, end in LAUNCHES
    ]
    return write_csv(path, TRACES[version], rows)


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


def counters(path: Path, *, old: bool = False) -> Path:
    """A row for each launch and counter. old: without accumulation registers and times."""
    columns = COUNTERS[:-2] if old else COUNTERS
    columns = [name for name in columns if not (old and name == "Accum_VGPR_Count")]
    rows: list[dict[str, object]] = [
        {"Kernel_Name": name, "Counter_Name": "SQ_WAVES", "Counter_Value": 16}
        for name, *_ in LAUNCHES
    ]
    return write_csv(path, columns, rows)


def database(path: Path) -> Path:
    """A rocpd database: tables whose names end in an identifier, and views on them."""
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE rocpd_kernel_ab12 (id INTEGER PRIMARY KEY, name TEXT, stream_id INTEGER, "
            'queue_id INTEGER, start BIGINT, "end" BIGINT, vgpr_count INTEGER)'
        )
        db.execute(
            'CREATE VIEW kernels AS SELECT *, "end" - start AS duration FROM rocpd_kernel_ab12'
        )
        db.execute(
            "CREATE TABLE rocpd_counter_ab12 (kernel_name TEXT, counter_name TEXT, value DOUBLE)"
        )
        db.execute("CREATE VIEW counters_collection AS SELECT * FROM rocpd_counter_ab12")
        for name, start, end in LAUNCHES:
            db.execute(
                "INSERT INTO rocpd_kernel_ab12 VALUES (NULL, ?, 3, 1, ?, ?, 8)", (name, start, end)
            )
            db.execute("INSERT INTO rocpd_counter_ab12 VALUES (?, 'SQ_WAVES', 16)", (name,))
    db.close()
    return path


# -- programs -------------------------------------------------------------------------------------

_ROCPROFV3 = """
tracing = ("--sys-trace", "--kernel-trace") + (("--runtime-trace",) if version >= (6, 3) else ())
values = ["--output-format", "-d", "-o", "-i"] + (["--pmc"] if version >= (6, 3) else [])
given, program = {}, None
words = sys.argv[1:]
while words:
    word = words.pop(0)
    if word == "--":
        program = words
        break
    if word in values:
        given[word] = []
        while words and not words[0].startswith("-"):
            given[word].append(words.pop(0))
            if word != "--pmc":
                break
    elif word in (*tracing, "--stats", "-T"):
        given[word] = True
    elif version < (7, 0) and not word.startswith("-"):
        program = [word, *words]
        break
    else:
        sys.exit(f"rocprofv3: error: unrecognized arguments: {word}")
if not program:
    sys.exit("rocprofv3: error: no application")
traced = any(one in given for one in tracing)
if "--stats" in given and not traced:
    sys.exit("No tracing options were enabled for --stats option")
known = ["csv", "json", "pftrace"] + (["otf2"] if (6, 3) <= version < (7, 0) else [])
known += ["rocpd"] if version >= (7, 0) else []
form = given.get("--output-format", ["rocpd" if version >= (7, 0) else "csv"])[0]
if form not in known:
    sys.exit(f"rocprofv3: error: argument --output-format: invalid choice: {form}")
out, name = Path(given["-d"][0]), given["-o"][0]
counted = given.get("--pmc")
if "-i" in given:
    text = Path(given["-i"][0]).read_text()
    if not text.startswith("pmc:"):
        sys.exit("rocprofv3: error: bad input")
    counted, out = text.split()[1:], out / "pmc_1"
out.mkdir(parents=True, exist_ok=True)
short = "6.2" if version < (6, 3) else "6.4" if version < (7, 0) else "7.0"
if form == "pftrace":
    (out / f"{name}_results.pftrace").write_bytes(b"synthetic")
elif form == "rocpd":
    rocm_files.database(out / f"{name}_results.db")
else:
    if traced:
        rocm_files.trace(out / f"{name}_kernel_trace.csv", short)
    if "--stats" in given:
        rocm_files.stats(out / f"{name}_kernel_stats.csv")
    if counted:
        rocm_files.counters(out / f"{name}_counter_collection.csv", old=version < (6, 3))
"""
_COMPUTE = """
mode, *words = sys.argv[1:]
if mode == "profile":
    place = words.index("--")
    options, program = words[:place], words[place + 1 :]
    left = [word for word in options if word.startswith("-")]
    if not set(left) <= {"-n", "--no-roof", "--roof-only", "-b", "-k"} or "-n" not in left:
        sys.exit(f"rocprof-compute: error: unrecognized arguments: {left}")
    folder = Path("workloads") / options[options.index("-n") + 1] / "MI300X_A1"
    folder.mkdir(parents=True)
    (folder / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name\\n")
elif mode == "analyze":
    units = ("per_wave", "per_cycle", "per_second")
    if "-n" in words and words[words.index("-n") + 1] not in units:
        sys.exit("analyze: error: argument -n/--normal-unit: invalid choice")
    folder = Path(words[words.index("-p") + 1])
    if not (folder / "pmc_perf.csv").is_file():
        sys.exit(f"analyze: error: {folder} has no pmc_perf.csv")
    print("Detected Kernels (sorted descending by duration)")
else:
    sys.exit(f"rocprof-compute: error: invalid choice: {mode}")
"""
_SYSTEMS = """
words = sys.argv[1:]
place = words.index("--")
options = words[:place]
known = {"--trace", "--profile", "-o", "-S", "-H", "-D"}
if not {word for word in options if word.startswith("-")} <= known:
    sys.exit("rocprof-sys-run: error: unknown option")
out = Path(options[options.index("-o") + 1]) / "2026-01-01_00.00"
out.mkdir(parents=True)
(out / "perfetto-trace-17.proto").write_bytes(b"synthetic")
"""
PROGRAMS = {
    "rocprofv3": _ROCPROFV3,
    "rocprof-compute": _COMPUTE,
    "omniperf": _COMPUTE,
    "rocprof-sys-run": _SYSTEMS,
    "omnitrace-run": _SYSTEMS,
}
RENAMED = {"6.2": ("rocprofv3", "omniperf", "omnitrace-run")}
TODAY = ("rocprofv3", "rocprof-compute", "rocprof-sys-run")


def install(root: Path, version: str) -> Path:
    """A folder as ROCm's of a version, with its profilers; its ``bin`` is returned."""
    (root / ".info").mkdir(parents=True)
    (root / ".info/version").write_text(f"{version}.1-66\n")
    binaries = root / "bin"
    binaries.mkdir()
    support = Path(__file__).resolve().parents[2]
    for name in RENAMED.get(version, TODAY):
        program = binaries / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
            f"sys.path.insert(0, {str(support)!r})\n"
            "from correctness_tests.support import rocm_files\n"
            f"version = {tuple(map(int, version.split('.')))}\n{PROGRAMS[name]}"
        )
        program.chmod(0o755)
    return binaries
