"""The loss curve that ``tinyllama train --curve`` writes."""

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from correctness_tests.support.commands import SHORT, refused
from tinyllama import cli
from tinyllama.training import curve


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_has_a_row_for_each_step_and_goes_on_after_a_resumed_run(tmp_path: Path) -> None:
    first, second, saved, told = (tmp_path / n for n in ("a.csv", "b.CSV", "saved", "run.json"))
    assert cli.main([*SHORT, "--save", str(saved), "--curve", str(first)]) == 0
    again = ["--resume", str(saved), "--max-grad-norm", "0.5", "--json", str(told)]
    assert cli.main([*SHORT, *again, "--curve", str(second)]) == 0
    assert [list(row) for row in rows(first)] == [["step", "loss", "seconds"]] * 2
    result = json.loads(told.read_text())
    assert [int(row["step"]) for row in rows(first) + rows(second)] == [1, 2, 3, 4]
    for name, field in (
        ("loss", "losses"),
        ("seconds", "step_seconds"),
        ("gradient_norm", "gradient_norms"),
    ):
        assert [float(row[name]) for row in rows(second)] == result[field]


def test_a_picture_shows_the_losses_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
    from matplotlib.figure import Figure

    save = create_autospec(Figure.savefig, side_effect=Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", save)
    paths = {
        tmp_path / "a.png": b"\x89PNG",
        tmp_path / "a.svg": b"<?xml",
        tmp_path / "a.pdf": b"%PDF",
    }
    told = tmp_path / "run.json"
    options = [word for path in paths for word in ("--curve", str(path))]
    assert cli.main([*SHORT, *options, "--json", str(told)]) == 0
    for path, begin in paths.items():
        assert path.read_bytes().startswith(begin)
    (axes,) = save.call_args_list[0].args[0].axes
    losses, chance = (np.asarray(line.get_xydata()).tolist() for line in axes.lines)
    assert losses == [list(each) for each in enumerate(json.loads(told.read_text())["losses"], 1)]
    assert chance[0][1] == pytest.approx(6.907755, rel=1e-6)  # ln(1000)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss, nats / token")


def test_a_scalar_of_each_step_is_written_elsewhere_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for TensorBoard's writer, which may not be installed."""

    class Writer:
        def __init__(self, folder: str) -> None:
            self.file = Path(folder) / "events.0"
            self.file.write_text("")

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *error: object) -> None:
            assert list(tmp_path.iterdir()) == [], "it is not complete"

        def add_scalar(self, *scalar: Any) -> None:
            with self.file.open("a") as file:
                file.write(f"{scalar}\n")

    made = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", made)
    result: Any = SimpleNamespace(start=4, losses=[3.0, 2.5, 2.0])
    curve.write_curve(tmp_path, result)
    text = (tmp_path / "events.0").read_text()
    assert text.splitlines() == ["('loss', 3.0, 5)", "('loss', 2.5, 6)", "('loss', 2.0, 7)"]


def test_tensorboard_gets_a_scalar_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told, folder = tmp_path / "run.json", tmp_path / "runs"
    assert cli.main([*SHORT, "--curve", str(folder), "--json", str(told)]) == 0
    events = EventAccumulator(str(folder)).Reload().Scalars("loss")
    losses = json.loads(told.read_text())["losses"]
    assert [(e.step, e.value) for e in events] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("path", "absent", "message"),
    [
        ("{tmp}/a.gif", "", "'{tmp}/a.gif': the suffix '.gif' is unknown: use .csv, .png, .svg"),
        ("{tmp}/none/a.csv", "", "'{tmp}/none/a.csv': no folder '{tmp}/none'; make it first"),
        ("{tmp}/run.csv", "", "--json and --curve are both '{tmp}/run.csv': name two files"),
        (
            "{tmp}/a.csv --resume {tmp}/a.csv",
            "",
            "--resume and --curve are both '{tmp}/a.csv': name",
        ),
        ("{tmp}/a.png", "matplotlib", "'{tmp}/a.png' needs matplotlib: pip install"),
        ("{tmp}/runs", "tensorboard", "'{tmp}/runs' needs tensorboard: pip install tensorboard"),
        ("/proc/none/runs", "", "--curve /proc/none/runs: No such file or directory; name a"),
    ],
)
def test_what_cannot_be_written_is_an_error_before_the_first_step(
    path: str, absent: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    there = importlib.util.find_spec("json")
    found = lambda name: None if name == absent else find(name) or there  # noqa: E731
    monkeypatch.setattr(curve.importlib.util, "find_spec", found)
    monkeypatch.setattr("tinyllama.training.train.train", lambda *a, **k: pytest.fail("trained"))
    options = ["--json", str(tmp_path / "run.csv"), "--curve", *path.format(tmp=tmp_path).split()]
    assert message.format(tmp=tmp_path) in refused(*SHORT, *options)
    assert not list(tmp_path.iterdir())
