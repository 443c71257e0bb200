"""Figures of the documents, drawn from the records under results/ and from nothing else.

A figure and the text around it name the record. For a newer record the figure is drawn again.
"""

import io
from pathlib import Path
from typing import Any

from tinyllama.harness.records.entries import CurveEntry
from tinyllama.harness.records.results import Record
from tools.result_tables import newest

DOCS = Path(__file__).resolve().parent.parent / "docs"
CURVES = DOCS / "curves.svg"
STYLE: Any = {"svg.hashsalt": "tinyllama", "svg.fonttype": "none", "font.size": 9}
COLOURS = {"v1": "#6b7280", "v3": "#d9480f", "v4": "#1c7ed6"}


def curves() -> str:
    """Markdown that shows the newest loss curves and names their record."""
    record = _newest()
    if record is None:
        return "No loss curves are recorded yet."
    return f"![Loss of each tier over the steps, on text]({CURVES.name})\n\n{_source(record)}"


def write() -> None:
    """Draw the figure again where it is not of the newest record."""
    record = _newest()
    if record is None:
        return
    mark = f"<!-- {_source(record)} -->"
    if not CURVES.exists() or mark not in CURVES.read_text(encoding="utf-8"):
        CURVES.write_text(f"{draw(record).rstrip()}\n{mark}\n", encoding="utf-8")


def _newest() -> Record | None:
    return next((record for group in newest(CurveEntry) for record in group), None)


def _source(record: Record) -> str:
    return f"{record.group}: {record.device}; commit {record.short_commit}; {record.date[:10]}."


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
