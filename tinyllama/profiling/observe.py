"""What PyTorch sees of a training step: the program that ``tinyllama profile`` runs.

    python -m tinyllama.profiling.observe WAY FOLDER WORKLOAD

WAY is a function of this file; what it finds is written into the folder.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import replace_text, write_json
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.measure.ceilings import copy_rate, product_rate
from tinyllama.harness.measure.clock import queue_of, wall_seconds
from tinyllama.harness.measure.launches import activities, on_device
from tinyllama.profiling.kernels import ProfileError
from tinyllama.profiling.ranges import (
    PREFIX,
    STACK,
    STEP,
    Work,
    attributed,
    by_order,
    in_layers,
    named,
)
from tinyllama.profiling.rates import costs
from tinyllama.profiling.workload import Workload

MODULE = "tinyllama.profiling.observe"
KERNELS = "kernels.json"
TRACE = "trace.json"
TABLE = "operators.txt"


def kernels(folder: Path, workload: Workload) -> None:
    """Write every kernel of one step with the op that it belongs to (`KERNELS`), the trace of
    the steps (`TRACE`), and PyTorch's own table of operators (`TABLE`).

    A captured step is profiled as it runs; its ops are those of an uncaptured step of the same
    tier, whose kernels come in the same order.
    """
    with workload.step(capture=False) as (step, once):
        gpu = step.device.type != "cpu"
        once()  # what was restored after the warm-up is rounded again in the first step
        with (
            named(step),
            profile(activities=activities(step.device), acc_events=True) as seen,
            record_function(PREFIX + STEP),
        ):
            once()
        eager = attributed(list(seen.events()), gpu)
        if gpu:
            eager = in_layers(eager, STACK, workload.model.num_layers)
    with workload.step() as (step, once):
        once()
        unprofiled = statistics.median(wall_seconds(once, queue_of(step.device)) for _ in range(9))
        with profile(
            activities=activities(step.device),
            acc_events=True,
            record_shapes=True,
            profile_memory=True,
        ) as seen:
            for _ in range(workload.train.num_steps):
                once()
        events = list(seen.events())
        captured = bool(step.graphs)
    seen.export_chrome_trace(str(folder / TRACE))
    order = "self_device_time_total" if gpu else "self_cpu_time_total"
    replace_text(folder / TABLE, seen.key_averages().table(sort_by=order, row_limit=-1) + "\n")
    found = eager
    spans: list[tuple[float, float, int]] = []
    if gpu:
        launched = sorted(on_device(events), key=lambda e: e.time_range.start)
        one = launched[: len(launched) // workload.train.num_steps]
        spans = [(e.time_range.start, e.time_range.end, int(e.device_resource_id)) for e in one]
        found = by_order(eager, ((e.name, e.time_range.elapsed_us() * 1e-6) for e in one))
    write_json(
        folder / KERNELS,
        {
            "captured": captured,
            "plan": str(step.plan),
            "left_out": step.left_out,
            "device": str(step.device),
            "unprofiled_seconds": unprofiled,
            "costs": {name: asdict(cost) for name, cost in costs(workload).items()},
            "ceilings": {
                "bytes_per_second": copy_rate(step.device),
                "flops_per_second": product_rate(workload.train.precision, step.device),
            },
            "work": [asdict(work) for work in found],
            "spans_us": spans,
        },
    )


def memory(folder: Path, workload: Workload) -> None:
    """Write the bytes of a step by category, at its peak."""
    from tinyllama.profiling.memory import observe

    with workload.step(capture=False) as (step, once):
        write_json(folder / "memory.json", observe(step, once))


def flops(folder: Path, workload: Workload) -> None:
    """Write the operations of a step, counted in several ways, and how many a second it does."""
    from tinyllama.profiling.flops import FORMULA, count

    found = count(workload)
    with workload.step() as (step, once):
        once()
        seconds = statistics.median(wall_seconds(once, queue_of(step.device)) for _ in range(9))
        rate = product_rate(workload.train.precision, step.device)
    found |= {"step_seconds": seconds, "product_flops_per_second": rate}
    found["mfu"] = found["flop"][FORMULA] / seconds / rate
    write_json(folder / "flops.json", found)


def triton(folder: Path, workload: Workload) -> None:
    """Write each op's time and error by Triton and by PyTorch, and a study of block sizes."""
    from tinyllama.profiling.block_sizes import block_sizes
    from tinyllama.profiling.op_times import each

    device = workload.on()
    dtype = {"tf32": "fp32"}.get(workload.train.precision, workload.train.precision)
    found: dict[str, Any] = {"ops": each(device, dtype)}
    try:
        found["block_sizes"] = block_sizes(device)
    except UsageError as error:
        found["block_sizes_unavailable"] = str(error)
    write_json(folder / "triton.json", found)


def energy(folder: Path, workload: Workload) -> None:
    """Write the joules of a step and the mean watts."""
    from tinyllama.harness.machine.sensors import sensor
    from tinyllama.harness.measure.energy import energy as measured

    gpu = sensor(workload.on())
    if isinstance(gpu, str):
        raise SystemExit(gpu)
    with workload.step() as (step, once):
        found = measured(once, step.device, gpu)
    samples = workload.train.samples_per_step
    write_json(
        folder / "energy.json", {**asdict(found), "joules_per_sample": found.joules / samples}
    )


def steps(folder: Path, workload: Workload) -> None:
    """Run the steps, and nothing else: what a profiler of its own looks at."""
    with workload.step() as (_, once):
        for _ in range(workload.train.num_steps):
            once()


WAYS = {way.__name__: way for way in (kernels, memory, flops, triton, energy, steps)}


def program(way: str, folder: Path, workload: Workload) -> list[str]:
    """The command that runs one of `WAYS`."""
    return [sys.executable, "-m", MODULE, way, str(folder), workload.dump()]


def load(path: Path) -> tuple[dict[str, Any], list[Work]]:
    """What `kernels` wrote: its facts, and the work. Raises ProfileError."""
    try:
        facts = json_of(path.read_text(encoding="utf-8"))
        return facts, [Work(**work) for work in facts.pop("work")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ProfileError(f"{path} cannot be read: {error!r}; profile again") from error


def main(argv: Sequence[str]) -> int:
    way, folder, workload = argv
    WAYS[way](Path(folder), Workload.load(workload))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
