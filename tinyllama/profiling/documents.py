"""The documents' scripts, programs and commands, and what does their work here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """theirs: the name in the documents; ours: the command; leaves: what it prints or writes;
    note: what is different, and why."""

    theirs: str
    ours: str
    leaves: str
    note: str = ""


_PROFILE = "python -m tinyllama profile"
_TRAIN = "python -m tinyllama train"
FOLDER = "build/profiles/"

ROWS = (
    Row("tiny_llama_v1.py", f"{_TRAIN} --tier v1", "loss, speed, memory, gradients"),
    Row("tiny_llama_v2.py", f"{_TRAIN} --tier v2", "the same"),
    Row("tiny_llama_v3.py", f"{_TRAIN} --tier v3", "the same"),
    Row("tiny_llama_v4.py", f"{_TRAIN} --tier v4", "the same"),
    Row("get_trace.sh", f"{_PROFILE} trace", f"{FOLDER}trace_*/: a trace for Perfetto"),
    Row(
        "get_counters.sh",
        f"{_PROFILE} counters",
        f"{FOLDER}counters_*/: kernels, hardware counters",
        "the documents' line collects no counters: --pmc does",
    ),
    Row("get_hotspots.sh", f"{_PROFILE} hotspots", "the slowest kernels, with op and layer"),
    Row(
        "get_rocprof_compute.sh",
        f"{_PROFILE} rocprof-compute",
        f"{FOLDER}rocprof-compute_*/workloads/",
    ),
    Row("get_rocprof_sys.sh", f"{_PROFILE} rocprof-sys", f"{FOLDER}rocprof-sys_*/: a trace"),
    Row("run_rocprof_compute.sh", f"{_PROFILE} rocprof-compute", "as get_rocprof_compute.sh"),
    Row("run_rocprof_sys.sh", f"{_PROFILE} rocprof-sys", "as get_rocprof_sys.sh"),
    Row("run_rocprofv3.sh", f"{_PROFILE} hotspots", "as get_hotspots.sh"),
    Row("run_rocprof_triton.sh", f"{_PROFILE} hotspots --tier v3", "as get_hotspots.sh"),
    Row("run_pytorch_profiler.py", f"{_PROFILE} torch", f"{FOLDER}torch_*/: tables, a trace"),
    Row("run_deepspeed_flops.py", f"{_PROFILE} flops", "operations of a step, by each counter"),
    Row(
        "run_triton_profiling.py",
        f"{_PROFILE} triton",
        "per op: time, speed-up, maximum error, bandwidth",
        "block sizes: python -m tinyllama tune --op rms_norm --output DIR",
    ),
    Row(
        "run_ultra_profiling.py",
        f"{_PROFILE} all --tier v4",
        "every profiler that is here, and one page of what each found",
    ),
    Row(
        "run_all_stages.sh",
        "python -m tinyllama stages",
        "results/stages/: a log and a profile of each stage, and a comparison",
    ),
    Row(
        "launch_performance_study.sh",
        f"{_PROFILE} study",
        "time and memory over lengths and batches, from the records",
        "pytest perf_tests --record --groups sweep-small-bf16 measures them",
    ),
    Row(
        "run_all_profilers.sh",
        f"{_PROFILE} all",
        "every tool that is here; what is missing, and why",
    ),
    Row(
        "rocprof --stats",
        "rocprofv3 --kernel-trace --stats",
        "*_kernel_stats.csv",
        "--stats alone collects nothing; rocprof is deprecated since ROCm 6.4",
    ),
    Row(
        "rocprofv2 --kernel-trace",
        "rocprofv3 --kernel-trace",
        "*_kernel_trace.csv",
        "rocprofv2 is deprecated since ROCm 6.4",
    ),
    Row("rocprof --basenames", "rocprofv3 -T", "kernel names without arguments"),
    Row(
        "rocpd2csv",
        "rocpd convert -i FILE.db -f csv -o NAME",
        "a CSV file for each domain",
        "profile compare reads the database itself",
    ),
    Row("rocpd summary", "rocpd summary -i FILE.db --region-categories KERNEL", "kernels by time"),
    Row("omniperf", "rocprof-compute", "the same tool, renamed in ROCm 6.3"),
    Row("omnitrace", "rocprof-sys", "the same tool, renamed in ROCm 6.3"),
)


def find(name: str) -> list[Row]:
    """The rows about a name, with or without its folder; an exact one alone."""
    wanted = name.strip().rpartition("/")[2].lower()
    exact = [row for row in ROWS if row.theirs.lower() == wanted]
    return exact or [row for row in ROWS if wanted and wanted in row.theirs.lower()]


def table() -> str:
    """Markdown: every row."""
    lines = ["| in the documents | here | what it leaves | note |", "|---|---|---|---|"]
    lines += [f"| `{r.theirs}` | `{r.ours}` | {r.leaves} | {r.note} |" for r in ROWS]
    return "\n".join(lines)
