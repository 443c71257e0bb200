"""The loss curve of a run as a file: a CSV, a picture, or a folder of TensorBoard's events."""

import csv
import importlib.util
import io
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tinyllama.harness.machine.distribution import install
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import (
    check_results_dir,
    check_writable,
    replace_text,
    write_new,
    write_whole,
)
from tinyllama.training.result import Result

PICTURES = (".png", ".svg", ".pdf")
KINDS = f".csv, {', '.join(PICTURES)}, or without one a folder for TensorBoard"


def check_curve(path: Path, option: str = "--curve") -> None:
    """Raise UsageError, naming the option, for a path whose suffix is unknown, whose package is
    missing, or where nothing can be written. Create the folder for TensorBoard."""
    suffix, named = path.suffix.lower(), f"{option} {str(path)!r}"
    if suffix not in ("", ".csv", *PICTURES) and not path.is_dir():
        raise UsageError(f"{named}: the suffix {path.suffix!r} is unknown: use {KINDS}")
    if suffix in PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{named} needs matplotlib: {install('report')}; or write a .csv")
    if suffix and not path.is_dir():
        check_writable(path, option)
    elif importlib.util.find_spec("tensorboard") is None:
        raise UsageError(f"{named} needs tensorboard: pip install tensorboard; or write a .csv")
    else:
        check_results_dir(path, option)


def write_curve(path: Path, result: Result) -> None:
    """Write what `check_curve` accepted: of each step of the run its number (from 1, over all
    resumed runs), its loss before the update (nats), its seconds and, where gradients are clipped,
    their norm. Raises NotWrittenError."""
    if path.is_dir():
        _events(path, result)
    elif path.suffix.lower() == ".csv":
        replace_text(path, _csv(result))
    else:
        write_whole(path, lambda part: _picture(part, path.suffix.lower()[1:], result))


def _csv(result: Result) -> str:
    columns: dict[str, Sequence[float | None]] = {
        "step": _steps(result),
        "loss": result.losses,
        "seconds": result.step_seconds,
    }
    if result.gradient_norms:
        columns["gradient_norm"] = result.gradient_norms
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _steps(result: Result) -> range:
    return range(result.start + 1, result.start + 1 + len(result.losses))


def _picture(path: Path, kind: str, result: Result) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(_steps(result), result.losses, label=f"{result.tier}, {result.train.precision}")
    chance = math.log(result.model.vocab_size)
    axes.axhline(chance, color="grey", linestyle=":", label="every token equally probable")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats / token")
    axes.legend()
    figure.savefig(path, format=kind, dpi=150)


def _events(folder: Path, result: Result) -> None:
    """Write elsewhere first, because the writer creates the file long before it is complete."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as temporary:
        with SummaryWriter(temporary) as writer:
            for step, loss in zip(_steps(result), result.losses, strict=True):
                writer.add_scalar("loss", loss, step)
        (events,) = Path(temporary).iterdir()
        write_new(folder / events.name, events.read_bytes(), keep=True)
