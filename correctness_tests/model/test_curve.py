"""The loss curve that ``tinyllama train --curve`` writes."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from correctness_tests.support.commands import SHORT, refused
from tinyllama import cli
from tinyllama.training import curve


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_a_csv_has_a_row_for_each_step_and_goes_on_after_a_resumed_run(tmp_path: Path) -> None:
    first, second, saved, written = (tmp_path / n for n in ("a.csv", "b.CSV", "saved", "run.json"))
    assert cli.main([*SHORT, "--save", str(saved), "--curve", str(first)]) == 0
    again = ["--resume", str(saved), "--max-grad-norm", "0.5", "--json", str(written)]
    assert cli.main([*SHORT, *again, "--curve", str(second)]) == 0
    assert [list(row) for row in rows(first)] == [["step", "loss", "seconds"]] * 2
    result = json.loads(written.read_text())
    assert [int(row["step"]) for row in rows(first) + rows(second)] == [1, 2, 3, 4]
    for name, field in (
        ("loss", "losses"),
        ("seconds", "step_seconds"),
        ("gradient_norm", "gradient_norms"),
    ):
        assert [float(row[name]) for row in rows(second)] == result[field]


def test_a_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
    begins = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.pdf": b"%PDF"}
    options = [word for name in begins for word in ("--curve", str(tmp_path / name))]
    assert cli.main([*SHORT, *options]) == 0
    for name, begin in begins.items():
        assert (tmp_path / name).read_bytes().startswith(begin)


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
        ("{tmp}/runs", "", "'{tmp}/runs': the suffix '' is unknown: use .csv, .png, .svg"),
    ],
)
def test_what_cannot_be_written_is_an_error_before_the_first_step(
    path: str, absent: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    there = importlib.util.find_spec("json")
    spec_of = lambda name: None if name == absent else find(name) or there  # noqa: E731
    monkeypatch.setattr(curve.importlib.util, "find_spec", spec_of)
    monkeypatch.setattr("tinyllama.training.train.train", lambda *a, **k: pytest.fail("trained"))
    options = ["--json", str(tmp_path / "run.csv"), "--curve", *path.format(tmp=tmp_path).split()]
    assert message.format(tmp=tmp_path) in refused(*SHORT, *options)
    assert not list(tmp_path.iterdir())
