"""Figures of the documents, drawn from the records under results/ and from nothing else.

A figure and the text around it name the record. For a newer record the figure is drawn again.
"""

import io
from pathlib import Path
from typing import Any

from tinyllama.harness.records.entries import CurveEntry, StepEntry
from tinyllama.harness.records.results import Record
from tinyllama.harness.report.plots import ladder as ladder_of
from tools.result_tables import newest

ROOT = Path(__file__).resolve().parent.parent
CURVES, LADDER = ROOT / "docs/curves.svg", ROOT / "docs/pictures/ladder.svg"
STYLE: Any = {"svg.hashsalt": "tinyllama", "svg.fonttype": "none", "font.size": 9}
COLOURS = {"v1": "#6b7280", "v3": "#d9480f", "v4": "#1c7ed6"}


def curves() -> str:
    """Markdown of a page in docs/ that shows the newest loss curves and names their record."""
    records = _with_curves()
    if not records:
        return "No loss curves are recorded yet."
    return f"![Loss of each tier over the steps, on text]({CURVES.name})\n\n{_source(records)}"


def ladder() -> str:
    """Markdown of README that shows the steps of the device that was measured last."""
    records = _with_steps()
    if not records:
        return "No step is recorded yet."
    picture = LADDER.relative_to(ROOT)
    return (
        f"![Time of a training step over the floor's: V1 to V4 and peers]({picture})\n\n"
        f"*{records[0].device}; each row is a model size and precision, and has its fastest tier's "
        "time. A peer is\nanother project's step; the floor is torch's matrix products, attention "
        "and AdamW alone.*"
    )


def write() -> None:
    """Draw each figure again that is not of the newest records."""
    for path, records, drawn in (
        (CURVES, _with_curves(), lambda records: draw(records[0])),
        (LADDER, _with_steps(), ladder_of),
    ):
        mark = f"<!-- {_source(records)} -->" if records else ""
        if records and (not path.exists() or mark not in path.read_text(encoding="utf-8")):
            path.write_text(f"{drawn(records).rstrip()}\n{mark}\n", encoding="utf-8")


def _with_curves() -> list[Record]:
    return [record for group in newest(CurveEntry) for record in group][:1]


def _with_steps() -> list[Record]:
    """The records with steps of the device that was measured last."""
    devices = newest(StepEntry)
    return max(devices, key=lambda records: max(r.date for r in records)) if devices else []


def _source(records: list[Record]) -> str:
    return " ".join(
        f"{record.group}: {record.device}; commit {record.short_commit}; {record.date[:10]}."
        for record in records
    )


def draw(record: Record) -> str:
    """The SVG of a record's loss curves: V1 and the other tiers in each precision that these have,
    and below the distance of each from V1, beside that of V1 from itself in float64."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    entries = {(entry.contender, entry.precision): entry for entry in record.of(CurveEntry)}
    exact = entries["v1", "fp64"]
    precisions = list(dict.fromkeys(precision for tier, precision in entries if tier != "v1"))
    steps = [place * exact.every for place in range(len(exact.losses))]
    with rc_context(STYLE):
        figure = Figure(figsize=(4 * len(precisions), 4.6))
        figure.set_layout_engine("constrained", w_pad=0.1)
        axes = figure.subplots(2, len(precisions), sharex=True, squeeze=False, height_ratios=(2, 1))
        for (upper, lower), precision in zip(axes.T, precisions, strict=True):
            of_v1 = entries["v1", precision].losses
            ours = {tier: entry.losses for (tier, at), entry in entries.items() if at == precision}
            for tier, losses in ours.items():
                title, first = tier.upper(), tier == "v1"
                width, alpha = (3, 0.5) if first else (1, 1)
                colour = COLOURS[tier]
                upper.plot(
                    *(steps, losses), color=colour, linewidth=width, alpha=alpha, label=title
                )
                reference, name = (exact.losses, "V1 in float64") if first else (of_v1, "V1")
                distance = [a - b for a, b in zip(losses, reference, strict=True)]
                lower.plot(steps, distance, color=colour, linewidth=1, label=f"{title} - {name}")
            upper.set_title(f"{exact.workload}, {precision}")
            upper.legend(frameon=False)
            lower.legend(frameon=False, loc="upper left")
            lower.set_xlabel("step")
        axes[0][0].set_ylabel(f"loss, mean of {exact.window} steps")
        axes[1][0].set_ylabel("difference")
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        return stream.getvalue()
