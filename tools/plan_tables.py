"""Tables of the planner (docs/train.md): its errors."""

from tinyllama.bench.planner import Rates, points
from tinyllama.harness.records.results import Record, load
from tinyllama.harness.report.tables import markdown_table
from tools.result_tables import tracked

WITHIN = 0.10  # of what was measured: what is asked of the planner


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
