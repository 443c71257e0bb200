"""``tinyllama profile TOOL``: profile a training step with the profilers of this machine."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import file_path, whole_within
from tinyllama.cli.train import settings, workload_options
from tinyllama.harness.machine.errors import UsageError

if TYPE_CHECKING:
    from tinyllama.profiling.command_lines import Line
    from tinyllama.profiling.workload import Workload

# By tool, its profilers: the first that can run is used, unless --with names one. torch stands for
# all that a process of ours observes by itself.
PROFILERS = {
    "trace": ("rocprofv3", "torch"),
    "counters": ("rocprofv3", "ncu"),
    "hotspots": ("torch", "rocprofv3"),
    "rocprof-compute": ("rocprof-compute",),
    "rocprof-sys": ("rocprof-sys",),
    "flops": ("torch",),
    "memory": ("torch",),
}
DESCRIPTION = (
    "Profile a training step. hotspots: the slowest kernels, with op and layer; trace: a timeline "
    "for ui.perfetto.dev; counters: hardware counters of each kernel (AMD, NVIDIA); "
    "rocprof-compute: AMD's analysis of each kernel; rocprof-sys: AMD's trace of the whole system; "
    "flops: operations of a step, counted in several ways; memory: the bytes of a step by "
    "category; all: every tool that can run here, and why the others cannot; compare: the kernels "
    "of two profiles."
)


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("profile", help="profile a training step; compare two profiles")
    parser.description = DESCRIPTION
    option = parser.add_argument
    tools = (*PROFILERS, "all", "compare")
    option("tool", choices=tools, metavar="TOOL", help=", ".join(tools))
    text = "for compare: two profiles"
    option("profiles", nargs="*", type=file_path, metavar="PROFILE", help=text)
    option("--with", dest="profiler", metavar="PROFILER", help="rocprofv3, ncu or torch")
    option("--print-command", action="store_true", help="print what would be run, and stop")
    option("--no-capture", action="store_true", help="profile the step uncaptured")
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
    config = settings(args, None)  # refuses what cannot be used before torch is imported
    if args.profiles:
        raise UsageError(f"{args.profiles[0]} is no option of {args.tool}: remove it")
    if args.profiler and args.profiler not in PROFILERS.get(args.tool, ()):
        names = " or ".join(PROFILERS.get(args.tool, ("it with a single tool",)))
        raise UsageError(f"--with {args.profiler!r} cannot do {args.tool}: use {names}")
    from tinyllama.profiling.workload import Workload

    options = {name: getattr(args, name) for name in ("tier", "without", "memory", "plan")}
    workload = Workload(*config, **options, capture=not args.no_capture, device=args.device)
    workload.chosen_tier()  # raises where the options do not fit
    workload.on()  # and where there is no such device
    if args.tool == "all":
        return _all(args, workload)
    _profile(args, args.tool, workload)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from tinyllama.profiling.readers import read
    from tinyllama.profiling.tables import show_changes

    if len(args.profiles) != 2:
        raise UsageError(f"compare takes two profiles, and {len(args.profiles)} are given")
    before, after = map(read, args.profiles)
    show_changes(before, after, args.top)
    return 0


def _all(args: argparse.Namespace, workload: "Workload") -> int:
    """Run every tool, each in its own subfolder; the last lines say how each ended."""
    from tinyllama.profiling.command_lines import MissingToolError
    from tinyllama.profiling.readers import ProfileError
    from tinyllama.profiling.running import ProfiledError, new_folder

    if not args.print_command:
        args.output = new_folder(args.output, "all").resolve()
    outcomes = {}
    for tool in PROFILERS:
        print(f"== {tool}", flush=True)
        try:
            _profile(args, tool, workload)
            outcomes[tool] = "done"
        except MissingToolError as error:
            outcomes[tool] = f"not here: {error}"
        except (ProfileError, ProfiledError) as error:
            outcomes[tool] = f"failed: {error}"
    print("\n" + "\n".join(f"{tool:16} {outcome}" for tool, outcome in outcomes.items()))
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def _profile(args: argparse.Namespace, tool: str, workload: "Workload") -> None:
    """Run a tool and print what it found, or its command. Raises ProfiledError, ProfileError and
    MissingToolError."""
    from tinyllama.profiling import running

    profiler, lines = _lines(tool, args.profiler, workload, Path("FOLDER"))
    if args.print_command:
        print("\n".join(shlex.join(line.argv) for line in lines))
        return
    folder = running.new_folder(args.output, tool).resolve()
    _, lines = _lines(tool, profiler, workload, folder)
    running.note(folder, tool, lines, profiler=profiler, workload=workload.dump())
    for line in lines:
        running.run(line, folder, args.time_limit)
    print(f"{tool} with {profiler}: {folder}")
    _show(tool, profiler, folder, args.top)


def _show(tool: str, profiler: str, folder: Path, top: int) -> None:
    """Print what a tool wrote into its folder."""
    from tinyllama.profiling import observe, readers, tables
    from tinyllama.profiling.hotspots import show_step

    if profiler == "torch" and tool in ("hotspots", "trace"):
        show_step(*observe.load(folder / readers.KERNELS), top)
        files = f"{folder / observe.TRACE}; operators: {folder / observe.TABLE}"
        print(f"timeline for ui.perfetto.dev: {files}")
    elif profiler == "torch":
        facts = json.loads((folder / f"{tool}.json").read_text(encoding="utf-8"))
        (tables.show_flops if tool == "flops" else tables.show_memory)(facts)
    elif tool in ("hotspots", "counters"):
        tables.show_profile(readers.read(folder), top)
    else:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)


def _lines(
    tool: str, profiler: str | None, workload: "Workload", folder: Path
) -> "tuple[str, list[Line]]":
    """The profiler of a tool, by default the first that can run here, and its commands. Raises
    MissingToolError."""
    import torch

    from tinyllama.profiling.command_lines import Line, MissingToolError, command_lines
    from tinyllama.profiling.observe import program

    reasons = []
    for name in [profiler] if profiler else PROFILERS[tool]:
        if name == "torch":
            observed = "kernels" if tool in ("hotspots", "trace") else tool
            return name, [Line(tuple(program(observed, folder, workload)), ("*.json",))]
        try:
            if workload.device == "cpu":
                raise MissingToolError("it profiles a GPU, and --device is cpu")
            if not torch.cuda.is_available():
                raise MissingToolError("there is no GPU that torch can use")
            return name, command_lines(tool, name, folder, program("steps", folder, workload))
        except MissingToolError as error:
            reasons.append(f"{name}: {error}")
    instead = "hotspots" if tool == "counters" else "trace"
    raise MissingToolError(
        f"{tool} cannot run here: {'; '.join(reasons)}; use profile {instead} --with torch"
    )
