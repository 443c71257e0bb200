"""The loss curve of a run as a file: a CSV or a picture."""

import csv
import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path

from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_writable, replace_text, write_whole
from tinyllama.training.result import Result

PICTURES = (".png", ".svg", ".pdf")


def check_curve(path: Path, option: str = "--curve") -> None:
    """Raise UsageError, naming the option, for a path whose suffix is unknown, whose package is
    missing, or where nothing can be written."""
    suffix, named = path.suffix.lower(), f"{option} {str(path)!r}"
    if suffix not in (".csv", *PICTURES):
        kinds = ", ".join((".csv", *PICTURES))
        raise UsageError(f"{named}: the suffix {path.suffix!r} is unknown: use {kinds}")
    if suffix in PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{named} needs matplotlib: {install('report')}; or write a .csv")
    check_writable(path, option)


def write_curve(path: Path, result: Result) -> None:
    """Write what `check_curve` accepted: of each step of the run its number (from 1, over all
    resumed runs), its loss before the update (nats), its seconds and, where gradients are clipped,
    their norm. Raises NotWrittenError."""
    steps = range(result.start + 1, result.start + 1 + len(result.losses))
    if path.suffix.lower() == ".csv":
        columns: dict[str, Sequence[float | None]] = {
            "step": steps,
            "loss": result.losses,
            "seconds": result.step_seconds,
        }
        if result.gradient_norms:
            columns["gradient_norm"] = result.gradient_norms
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
        replace_text(path, text.getvalue())
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, result.losses, label=f"{result.tier}, {result.train.precision}")
    chance = math.log(result.model.vocab_size)
    axes.axhline(chance, color="grey", linestyle=":", label="every token equally probable")
    axes.set(xlabel="step", ylabel="loss, nats / token")
    axes.legend()
    kind = path.suffix.lower()[1:]
    write_whole(path, lambda place: figure.savefig(place, format=kind, dpi=150))
