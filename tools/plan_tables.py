"""Tables of the planner (docs/PARALLEL.md): its errors, and what it says of some steps."""

from tinyllama.bench.planner import SHAPES, Links, Rates, Work, plans, points
from tinyllama.cli.plan import BETWEEN, INSIDE
from tinyllama.harness.records.results import Record, load
from tinyllama.harness.report.tables import markdown_table
from tinyllama.model.config import PRESETS
from tools.result_tables import tracked

WITHIN = 0.10  # of what was measured: what is asked of the planner
# Model, sequences of each GPU, tokens of a sequence, GPUs.
STEPS = (
    ("medium", 16, 512, 2),
    ("large", 4, 4096, 2),
    ("large", 4, 4096, 8),
    ("8B", 1, 8192, 64),
    ("70B", 1, 8192, 1024),
)


def _records() -> list[Record]:
    return [load(path) for path in tracked("results/nvidia-h200/*.json")]


def errors() -> str:
    """Recorded and planned time and memory of steps on one GPU."""
    heads = [
        "workload",
        "recorded ms",
        "planned ms",
        "error",
        "recorded MiB",
        "planned MiB",
        "error",
    ]
    rows, beyond = [heads], []
    for point in points(_records()):
        off = {"time": point.time_error, "memory": point.memory_error}
        beyond += [f"{what} of `{point.workload}`" for what, e in off.items() if abs(e) > WITHIN]
        rows.append(
            [
                point.workload,
                f"{point.recorded_seconds * 1e3:.2f}",
                f"{point.plan.seconds * 1e3:.2f}",
                f"{off['time']:+.1%}",
                f"{point.recorded_bytes / 2**20:,.0f}",
                f"{point.plan.bytes / 2**20:,.0f}",
                f"{off['memory']:+.1%}",
            ]
        )
    said = (
        f"Not within {WITHIN:.0%}: {', '.join(beyond)}." if beyond else f"All within {WITHIN:.0%}."
    )
    rates = Rates(_records()).record
    source = f"Rates of ops: {rates.device}, commit {rates.short_commit}, {rates.date[:10]}."
    return f"{markdown_table(rows)}\n\n{said} {source}"


def steps() -> str:
    """Planned steps on several GPUs; none of them was measured."""
    rates = Rates(_records())
    links = Links(per_node=8, inside=INSIDE * 1e9, between=BETWEEN * 1e9)
    heads = ["model", "GPUs", "B × T per GPU", "parameters", "memory mode", "ms a step"]
    rows = [[*heads, "exposed communication, ms", "tokens/s", "GiB per GPU"]]
    for name, batch, length, gpus in STEPS:
        work = Work(SHAPES[name] if name in SHAPES else PRESETS[name], batch, length)
        for plan in plans(work, gpus, links, rates):
            where = "shards" if plan.way == "sharded" else "on each"
            rows.append(
                [
                    name,
                    f"{gpus}",
                    f"{batch} × {length}",
                    where,
                    plan.memory,
                    f"{plan.seconds * 1e3:,.1f}",
                    f"{plan.exposed * 1e3:,.1f}",
                    f"{plan.tokens_per_second:,.0f}",
                    f"{plan.bytes / 2**30:,.1f}",
                ]
            )
    return markdown_table(rows)
