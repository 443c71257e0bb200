"""``tinyllama profile TOOL``: profile a training step with the profilers of this machine."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import file_path, whole_within
from tinyllama.cli.train import settings, workload_options
from tinyllama.harness.machine.errors import UsageError

if TYPE_CHECKING:
    from tinyllama.profiling.command_lines import Line
    from tinyllama.profiling.workload import Workload

TOOLS = {
    "trace": "a timeline for ui.perfetto.dev (rocprofv3, else PyTorch's profiler)",
    "counters": "hardware counters of each kernel (rocprofv3 or Nsight Compute)",
    "hotspots": "the slowest kernels, with op and layer (PyTorch's profiler, or rocprofv3)",
    "rocprof-compute": "AMD's analysis of each kernel",
    "rocprof-sys": "AMD's trace of the whole system",
    "flops": "operations of a step, counted in several ways",
    "memory": "the bytes of a step by category",
    "study": "time and memory over lengths and batches, from the records",
    "all": "every tool that can run here; what cannot, and why",
    "compare": "the kernels of two profiles",
}
# By tool, its profilers: the first that can run is used, unless --with names one. torch stands for
# all that a process of ours observes by itself.
WAYS = {
    "trace": ("rocprofv3", "torch"),
    "counters": ("rocprofv3", "ncu"),
    "hotspots": ("torch", "rocprofv3"),
    "rocprof-compute": ("rocprof-compute",),
    "rocprof-sys": ("rocprof-sys",),
    "flops": ("torch",),
    "memory": ("torch",),
}
FAILED = 1  # exit status when a profiled program failed


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("profile", help="profile a training step; compare two profiles")
    tools = "; ".join(f"{name}: {what}" for name, what in TOOLS.items())
    parser.description = f"Profile a training step. {tools}"
    option = parser.add_argument
    option("tool", choices=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    option(
        "profiles", nargs="*", type=file_path, metavar="PROFILE", help="for compare: two profiles"
    )
    option("--with", dest="way", metavar="PROFILER", help="rocprofv3, ncu or torch")
    option("--print-command", action="store_true", help="print what would be run, and stop")
    option("--no-capture", action="store_true", help="profile the step uncaptured")
    option("--results-dir", type=file_path, default=Path("results"), metavar="DIR")
    option("--output", type=file_path, default=Path("build/profiles"), metavar="DIR")
    limit = {"type": whole_within(1, 10**6), "default": 600, "metavar": "SECONDS"}
    option("--time-limit", **limit, help="of a profiled program (default %(default)s)")
    top = {"type": whole_within(1, 10**6), "default": 20, "metavar": "N"}
    option("--top", **top, help="kernels shown (default %(default)s)")
    workload_options(parser, num_steps=5)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile and print; the exit status: 0, 1 the profiled program failed, 2 a missing tool."""
    if args.tool == "compare":
        return _compare(args)
    settings(args, None)  # refuses what cannot be used before torch is imported
    if args.profiles:
        raise UsageError(f"{args.profiles[0]} is no option of {args.tool}: remove it")
    if args.tool == "study":
        return _study(args)
    if args.tool == "all":
        return _all(args)
    return _profile(args, args.tool)


def _compare(args: argparse.Namespace) -> int:
    from tinyllama.profiling.readers import read
    from tinyllama.profiling.tables import show_changes

    if len(args.profiles) != 2:
        raise UsageError(f"compare takes two profiles, and {len(args.profiles)} are given")
    before, after = map(read, args.profiles)
    show_changes(before, after, args.top)
    return 0


def _study(args: argparse.Namespace) -> int:
    from tinyllama.profiling import study

    if args.print_command:
        print(shlex.join(study.command()))
    else:
        study.show(study.recorded(args.results_dir))
    return 0


def _all(args: argparse.Namespace) -> int:
    """Run every tool, each in its own subfolder; the last lines say how each ended."""
    from tinyllama.profiling.command_lines import MissingToolError
    from tinyllama.profiling.profiles import ProfileError
    from tinyllama.profiling.running import new_folder

    if args.way:
        raise UsageError("--with names the profiler of one tool, and all has several: remove it")
    if not args.print_command:
        args.output = new_folder(args.output, "all").resolve()
    outcomes = {}
    for tool in WAYS:
        print(f"== {tool}", flush=True)
        try:
            failed = _profile(args, tool)
            outcomes[tool] = "failed: its folder has a log" if failed else "done"
        except MissingToolError as error:
            outcomes[tool] = f"not here: {error}"
        except ProfileError as error:
            outcomes[tool] = f"failed: {error}"
    print("\n" + "\n".join(f"{tool:16} {outcome}" for tool, outcome in outcomes.items()))
    return FAILED if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def _profile(args: argparse.Namespace, tool: str) -> int:
    from tinyllama.profiling import running
    from tinyllama.profiling.workload import Workload

    options = {name: getattr(args, name) for name in ("tier", "without", "memory", "plan")}
    config = settings(args, None)
    workload = Workload(*config, **options, capture=not args.no_capture, device=args.device)
    workload.chosen_tier()  # raises where the options do not fit
    workload.on()  # and where there is no such device
    way, lines = _lines(args, tool, workload, Path("FOLDER"))
    if args.print_command:
        print("\n".join(shlex.join(line.argv) for line in lines))
        return 0
    folder = running.new_folder(args.output, tool).resolve()
    _, lines = _lines(args, tool, workload, folder)
    running.note(folder, tool, lines, way=way, workload=workload.dump())
    try:
        for line in lines:
            running.run(line, folder, args.time_limit)
    except running.ProfiledError as error:
        print(f"tinyllama: error: {error}", file=sys.stderr)
        return FAILED
    print(f"{tool} with {way}: {folder}")
    _show(tool, way, folder, args.top)
    return 0


def _show(tool: str, way: str, folder: Path, top: int) -> None:
    """Print what a tool wrote into its folder."""
    from tinyllama.profiling import observe, readers, tables
    from tinyllama.profiling.hotspots import show_step

    if way == "torch" and tool in ("hotspots", "trace"):
        show_step(*observe.load(folder / readers.KERNELS), top)
        files = f"{folder / observe.TRACE}; operators: {folder / observe.TABLE}"
        print(f"timeline for ui.perfetto.dev: {files}")
    elif way == "torch":
        facts = json.loads((folder / f"{tool}.json").read_text(encoding="utf-8"))
        getattr(tables, f"show_{tool}")(facts)
    elif tool in ("hotspots", "counters"):
        tables.show_profile(readers.read(folder), top)
    else:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)


def _lines(
    args: argparse.Namespace, tool: str, workload: "Workload", folder: Path
) -> "tuple[str, list[Line]]":
    """The profiler that a tool uses here, and its commands. Raises MissingToolError."""
    from tinyllama.profiling.command_lines import EXTERNAL, Line, MissingToolError
    from tinyllama.profiling.observe import program

    ways = WAYS[tool]
    if args.way and args.way not in ways:
        raise UsageError(f"--with {args.way!r} cannot do {tool}: use {' or '.join(ways)}")
    reasons = []
    for way in [args.way] if args.way else ways:
        if way == "torch":
            observed = "kernels" if tool in ("hotspots", "trace") else tool
            return way, [Line(tuple(program(observed, folder, workload)), ("*.json",))]
        try:
            if reason := _no_gpu(workload):
                raise MissingToolError(reason)
            return way, EXTERNAL[tool, way].lines(folder, program("steps", folder, workload))
        except MissingToolError as error:
            reasons.append(f"{way}: {error}")
    instead = "hotspots" if tool == "counters" else "trace"
    raise MissingToolError(
        f"{tool} cannot run here: {'; '.join(reasons)}; use profile {instead} --with torch"
    )


def _no_gpu(workload: "Workload") -> str | None:
    """Why no external profiler would see a kernel; None if it would."""
    import torch

    if workload.device == "cpu":
        return "it profiles a GPU, and --device is cpu"
    return None if torch.cuda.is_available() else "there is no GPU that torch can use"
