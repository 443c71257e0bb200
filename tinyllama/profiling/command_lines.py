"""Command lines of external profilers.

They follow the tools' sources and help, of ROCm 6.3 to 7.1, and differ from the published course
where that is wrong: ``--stats`` alone collects nothing, ``--kernel-trace`` collects no hardware
counters, and from ROCm 7.0 the default format is a database.
"""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError

OLDEST = (6, 3)  # of ROCm: rocprof-compute and rocprof-sys had other names before
EXECUTABLES = {  # by name, the program that is started; ncu alone is not of ROCm
    "rocprofv3": "rocprofv3",
    "rocprof-compute": "rocprof-compute",
    "rocprof-sys": "rocprof-sys-run",
    "ncu": "ncu",
}
HARDWARE = ("SQ_WAVES", "GRBM_COUNT", "GRBM_GUI_ACTIVE")
METRICS = (  # of Nsight Compute: operations, bytes of memory, occupancy
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
WORKLOAD = "tinyllama"
NSIGHT = "nsight.csv"


class MissingToolError(UsageError):
    """A profiler that is not there, or is of a version that cannot be used."""


@dataclass(frozen=True)
class Line:
    """One command. files: patterns of files that it must leave below the output folder; inside: it
    runs in the output folder."""

    argv: tuple[str, ...]
    files: tuple[str, ...] = ()
    inside: bool = False


def command_lines(tool: str, profiler: str, out: Path, program: Sequence[str]) -> list[Line]:
    """The commands by which a profiler does what ``tinyllama profile TOOL`` is to do.

    out: the folder of the output. program: the command that is profiled. Raises MissingToolError.
    """
    executable = shutil.which(EXECUTABLES[profiler])
    if executable is None:
        raise MissingToolError(f"{EXECUTABLES[profiler]} is not installed, or not in PATH")
    if profiler != "ncu":
        check_rocm(Path(executable))
    rocprofv3 = ("rocprofv3", "-d", str(out), "-o", tool, "--output-format")
    if profiler == "rocprof-compute":  # profiles inside the folder, since ``--path`` is going
        profile = ("rocprof-compute", "profile", "-n", WORKLOAD, "--no-roof", "--", *program)
        analyze = ("rocprof-compute", "analyze", "-p", f"workloads/{WORKLOAD}/*", "--list-stats")
        return [Line(profile, (f"workloads/{WORKLOAD}/*/*",), True), Line(analyze, inside=True)]
    if profiler == "rocprof-sys":
        argv = ("rocprof-sys-run", "--trace", "--profile", "-o", str(out), "--", *program)
        return [Line(argv, ("perfetto-trace*.proto",))]
    if profiler == "ncu":
        options = ("--csv", "--print-units", "base", "--metrics", ",".join(METRICS))
        more = ("--target-processes", "all", "--log-file", str(out / NSIGHT))
        return [Line(("ncu", *options, *more, *program), (NSIGHT,))]
    if tool == "trace":
        return [Line((*rocprofv3, "pftrace", "--sys-trace", "--", *program), ("*.pftrace",))]
    if tool == "counters":
        argv = (*rocprofv3, "csv", "--kernel-trace", "--pmc", *HARDWARE, "--", *program)
        return [Line(argv, ("*counter_collection.csv",))]
    argv = (*rocprofv3, "csv", "--kernel-trace", "--stats", "-T", "--", *program)
    return [Line(argv, ("*kernel_trace.csv",))]


def check_rocm(tool: Path) -> None:
    """Check the version of the ROCm that a program belongs to, by its ``.info/version``.

    Raises MissingToolError for one that is not there, or too old.
    """
    places = [*tool.resolve().parents, Path(os.environ.get("ROCM_PATH", "/opt/rocm"))]
    texts = [file.read_text() for place in places if (file := place / ".info/version").is_file()]
    match = re.match(r"(\d+)\.(\d+)", texts[0]) if texts else None
    if match is None:
        raise MissingToolError(
            f"{tool}: its ROCm has no version in .info/version: set ROCM_PATH to the folder of ROCm"
        )
    if (int(match[1]), int(match[2])) < OLDEST:
        raise MissingToolError(
            f"{tool} is of ROCm {match[0]}, whose profilers take other options: use ROCm "
            "6.3 or newer, or the tool torch"
        )
