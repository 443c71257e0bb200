"""What PyTorch sees of a training step: the program that ``tinyllama profile`` runs.

    python -m tinyllama.profiling.observe WAY FOLDER WORKLOAD

WAY is a function of this file; what it finds is written into the folder.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from tinyllama.harness.machine.files import replace_text, write_json
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.measure.clock import queue_of, wall_seconds
from tinyllama.harness.measure.launches import activities, on_device
from tinyllama.profiling.flops import FORMULA, costs, count
from tinyllama.profiling.ranges import PREFIX, STEP, Work, attributed, by_order, in_layers, named
from tinyllama.profiling.readers import KERNELS
from tinyllama.profiling.workload import Workload
from tinyllama.training.step import TrainStep
from tinyllama.training.wrapped_ops import STACK

MODULE = "tinyllama.profiling.observe"
TRACE = "trace.json"
TABLE = "operators.txt"
RUNS = 9  # of a step whose median time is read


def kernels(folder: Path, workload: Workload) -> None:
    """Write every kernel of one step with the op that it belongs to (`KERNELS`), the trace of
    the steps (`TRACE`), and PyTorch's own table of operators (`TABLE`).

    A captured step is profiled as it runs; its ops are those of an uncaptured step of the same
    tier, whose kernels come in the same order.
    """
    with workload.step(capture=False) as (step, run_step):
        gpu = step.device.type != "cpu"
        run_step()  # the first step also rounds again the weights restored after the warm-up
        with (
            named(step),
            profile(activities=activities(step.device), acc_events=True) as profiler,
            record_function(PREFIX + STEP),
        ):
            run_step()
        work = attributed(list(profiler.events()), gpu)
        if gpu:
            work = in_layers(work, STACK, workload.model.num_layers)
    with workload.step() as (step, run_step):
        unprofiled = _median_seconds(step, run_step)
        options: dict[str, Any] = {"record_shapes": True, "profile_memory": True}
        watched = activities(step.device)
        with profile(activities=watched, acc_events=True, **options) as profiler:
            for _ in range(workload.train.num_steps):
                run_step()
    profiler.export_chrome_trace(str(folder / TRACE))
    order = "self_device_time_total" if gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=-1)
    replace_text(folder / TABLE, table + "\n")
    spans: list[tuple[float, float]] = []
    if gpu:
        launched = sorted(on_device(list(profiler.events())), key=lambda e: e.time_range.start)
        first = launched[: len(launched) // workload.train.num_steps]  # the launches of one step
        spans = [(e.time_range.start, e.time_range.end) for e in first]
        work = by_order(work, ((e.name, e.time_range.elapsed_us() * 1e-6) for e in first))
    facts = {
        "plan": str(step.plan),
        "left_out": step.left_out,
        "device": str(step.device),
        "unprofiled_seconds": unprofiled,
        "costs": {name: asdict(cost) for name, cost in costs(workload).items()},
        "bytes_per_second": copy_rate(step.device),
        "flops_per_second": product_rate(workload.train.precision, step.device),
        "spans_us": spans,
    }
    write_json(folder / KERNELS, {**facts, "work": [asdict(kernel) for kernel in work]})


def _median_seconds(step: TrainStep, run_step: Callable[[], None]) -> float:
    run_step()
    return statistics.median(wall_seconds(run_step, queue_of(step.device)) for _ in range(RUNS))


def memory(folder: Path, workload: Workload) -> None:
    """Write the bytes of a step by category, at its peak."""
    from tinyllama.profiling.memory import observe

    with workload.step(capture=False) as (step, run_step):
        write_json(folder / "memory.json", observe(step, run_step))


def flops(folder: Path, workload: Workload) -> None:
    """Write the operations of a step, counted in several ways, and how many a second it does."""
    facts: dict[str, Any] = count(workload)
    with workload.step() as (step, run_step):
        seconds = _median_seconds(step, run_step)
        rate = product_rate(workload.train.precision, step.device)
    facts |= {"step_seconds": seconds, "product_flops_per_second": rate}
    facts["mfu"] = facts["flop"][FORMULA] / seconds / rate
    write_json(folder / "flops.json", facts)


def steps(folder: Path, workload: Workload) -> None:
    """Run the steps, and nothing else, for a profiler that watches this process from outside."""
    with workload.step() as (_, run_step):
        for _ in range(workload.train.num_steps):
            run_step()


WAYS = {way.__name__: way for way in (kernels, memory, flops, steps)}


def program(way: str, folder: Path, workload: Workload) -> list[str]:
    """The command that runs one of `WAYS`."""
    return [sys.executable, "-m", MODULE, way, str(folder), workload.dump()]


def load(path: Path) -> tuple[dict[str, Any], list[Work]]:
    """What `kernels` has just written: its facts, and the work."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts, [Work(**work) for work in facts.pop("work")]


def main(argv: Sequence[str]) -> int:
    way, folder, workload = argv
    WAYS[way](Path(folder), Workload.load(workload))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
