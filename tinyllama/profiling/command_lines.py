"""Command lines of external profilers, by tool and version of ROCm.

What is right for which version was read in the tools' sources and help. The published documents'
lines differ where they are wrong: ``--stats`` alone collects nothing, ``--kernel-trace`` collects
no hardware counters, and from ROCm 7.0 the default format is a database.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllama.harness.machine.errors import UsageError

Version = tuple[int, int]
OLDEST: Version = (6, 2)  # rocprofv3's first release
HARDWARE = ("SQ_WAVES", "GRBM_COUNT", "GRBM_GUI_ACTIVE")
# What Nsight Compute measures by default: operations, bytes of memory, occupancy.
METRICS = (
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
    """One command. files: what it must leave below the output folder, as patterns; writes: a file
    to write before it, by name below the folder; inside: run it in the output folder."""

    argv: tuple[str, ...]
    files: tuple[str, ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    inside: bool = False


Program = Sequence[str]
Maker = Callable[[Version, Path, Program], list[Line]]


def _rocprofv3(out: Path, name: str, form: str, *options: str) -> tuple[str, ...]:
    return ("rocprofv3", *options, "--output-format", form, "-d", str(out), "-o", name, "--")


def _trace(version: Version, out: Path, program: Program) -> list[Line]:
    argv = _rocprofv3(out, "trace", "pftrace", "--sys-trace")
    return [Line((*argv, *program), ("*.pftrace",))]


def _hotspots(version: Version, out: Path, program: Program) -> list[Line]:
    argv = _rocprofv3(out, "kernels", "csv", "--kernel-trace", "--stats", "-T")
    return [Line((*argv, *program), ("*kernel_trace.csv",))]


def _counters(version: Version, out: Path, program: Program) -> list[Line]:
    """Before ROCm 6.3 counters are named in a file, and written below ``pmc_1``."""
    options: tuple[str, ...] = ("--pmc", *HARDWARE)
    writes: tuple[tuple[str, str], ...] = ()
    if version < (6, 3):
        options = ("-i", str(out / "counters.txt"))
        writes = (("counters.txt", f"pmc: {' '.join(HARDWARE)}\n"),)
    argv = _rocprofv3(out, "counters", "csv", "--kernel-trace", *options)
    return [Line((*argv, *program), ("*counter_collection.csv",), writes)]


def _compute(version: Version, out: Path, program: Program) -> list[Line]:
    """Profile inside the output folder, since ``--path`` is going; then analyse what is there."""
    tool = "rocprof-compute" if version >= (6, 3) else "omniperf"
    profile = (tool, "profile", "-n", WORKLOAD, "--no-roof", "--", *program)
    analyze = (tool, "analyze", "-p", f"workloads/{WORKLOAD}/*", "--list-stats")
    return [
        Line(profile, (f"workloads/{WORKLOAD}/*/*",), inside=True),
        Line(analyze, inside=True),
    ]


def _systems(version: Version, out: Path, program: Program) -> list[Line]:
    """Renamed from Omnitrace in ROCm 6.3."""
    tool = "rocprof-sys-run" if version >= (6, 3) else "omnitrace-run"
    argv = (tool, "--trace", "--profile", "-o", str(out), "--", *program)
    return [Line(argv, ("perfetto-trace*.proto",))]


def _nsight(version: Version, out: Path, program: Program) -> list[Line]:
    options = ("--csv", "--print-units", "base", "--metrics", ",".join(METRICS))
    more = ("--target-processes", "all", "--log-file", str(out / NSIGHT))
    return [Line(("ncu", *options, *more, *program), (NSIGHT,))]


@dataclass(frozen=True)
class External:
    """A profiler that is a program. executables: by any of which it is found."""

    executables: tuple[str, ...]
    make: Maker
    rocm: bool = True

    def lines(self, out: Path, program: Program) -> list[Line]:
        """The commands for the version that is installed. Raises MissingToolError."""
        paths = [path for name in self.executables if (path := shutil.which(name))]
        if not paths:
            raise MissingToolError(f"{self.executables[0]} is not installed, or not in PATH")
        return self.make(rocm_version(Path(paths[0])) if self.rocm else (0, 0), out, program)


EXTERNAL = {
    ("trace", "rocprofv3"): External(("rocprofv3",), _trace),
    ("counters", "rocprofv3"): External(("rocprofv3",), _counters),
    ("hotspots", "rocprofv3"): External(("rocprofv3",), _hotspots),
    ("counters", "ncu"): External(("ncu",), _nsight, rocm=False),
    ("rocprof-compute", "rocprof-compute"): External(("rocprof-compute", "omniperf"), _compute),
    ("rocprof-sys", "rocprof-sys"): External(("rocprof-sys-run", "omnitrace-run"), _systems),
}


def rocm_version(tool: Path) -> Version:
    """The version of the ROCm that a program belongs to, from its ``.info/version``.

    Raises MissingToolError for one that is not there, or older than rocprofv3.
    """
    places = [*tool.resolve().parents, Path(os.environ.get("ROCM_PATH", "/opt/rocm"))]
    texts = [file.read_text() for place in places if (file := place / ".info/version").is_file()]
    match = re.match(r"(\d+)\.(\d+)", texts[0]) if texts else None
    if match is None:
        raise MissingToolError(
            f"{tool}: its ROCm has no version in .info/version: set ROCM_PATH to the folder of ROCm"
        )
    version = int(match[1]), int(match[2])
    if version < OLDEST:
        raise MissingToolError(
            f"{tool} is of ROCm {version[0]}.{version[1]}, which has no rocprofv3 that works: "
            "use ROCm 6.2 or newer, or the tool torch"
        )
    return version
