"""What each tier gains and costs, for the guide of the workshop."""

import ast
import re

from tinyllama.harness.records.entries import StepEntry
from tinyllama.model.config import PLANS
from tinyllama.model.tiers import TIERS, Tier
from tools.model_tables import table as markdown
from tools.result_tables import ROOT, newest

OPS = ROOT / "tinyllama" / "ops"
GROUP = "small-bf16"
IMPORTED = re.compile(r"^from tinyllama\.ops(?:\.(\w+)\S*| import (\w+))", re.M)


def table() -> str:
    """For each tier: its own kernels' lines, and of the newest record of `GROUP` on each device the
    time, launches and peak of a step."""
    of_group = [
        next((record for record in records if record.group == GROUP), None)
        for records in newest(StepEntry)
    ]
    headers = ["tier", "lines of kernels", "ms a step", "over V1", "kernels a step", "peak, MiB"]
    tables = []
    for record in filter(None, of_group):
        entries = {entry.contender: entry for entry in record.of(StepEntry) if entry.ran}
        rows = [
            [
                name.upper(),
                kernel_lines(tier),
                f"{entry.time * 1e3:.2f}",
                f"{entry.over_baseline.median:.1f}" if entry.over_baseline else "1",
                entry.kernels,
                f"{(entry.peak_bytes or 0) / 2**20:.0f}",
            ]
            for name, tier in TIERS.items()
            if (entry := entries.get(name)) is not None
        ]
        source = f"{record.device}, `{GROUP}`, commit {record.short_commit}, {record.date[:10]}"
        tables.append(f"{markdown(headers, rows)}\n\nMeasured on {source}.")
    return "\n\n".join(tables) or "Nothing is recorded yet."


def kernel_lines(tier: Tier) -> int:
    """Lines of the functions under ``@jit`` of the ops whose kernels a tier launches, and of those
    that these import."""
    waiting = [op for op, provider in tier.table.items() if provider in ("triton", *PLANS)]
    done: set[str] = set()
    lines = 0
    while waiting:
        op = waiting.pop()
        if op in done:
            continue
        done.add(op)
        alone = OPS / f"{op}.py"
        for path in [alone] if alone.is_file() else (OPS / op).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            lines += _jit_lines(text)
            waiting += [first or second for first, second in IMPORTED.findall(text)]
    return lines


def _jit_lines(text: str) -> int:
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(decorator, ast.Name) and decorator.id == "jit"
            for decorator in node.decorator_list
        )
    )
