"""Records: read only when valid, written whole, over no other one."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from correctness_tests.support.sample_records import bare_step, plain_record, sample_records
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import Quartiles, StepEntry
from tinyllama.harness.records.results import Record

STORED = Path(__file__).resolve().parents[2] / "results"
STEP = bare_step("small-fp32", "v1", name="x", seconds=1.0, seconds_quartiles=Quartiles(0.9, 1.0))
RECORD = plain_record(entries=[STEP])
CONTENT: dict[str, Any] = msgspec.to_builtins(RECORD)


def with_step(**fields: Any) -> dict[str, Any]:
    """The content of a file whose only entry has other fields."""
    return {**CONTENT, "entries": [{**CONTENT["entries"][0], **fields}]}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = results.save(RECORD, tmp_path)
    assert path == tmp_path / "a-card" / "20300102T030405Z-aaaaaaaaaa-g.json"
    assert list(results.records(tmp_path, "A Card")) == [(path, RECORD)]
    assert path.stat().st_mode & 0o777 == 0o644
    for record in sample_records():
        path = results.save(record, tmp_path / "samples")
        loaded = results.load(path)
        assert loaded == record
        assert msgspec.json.decode(path.read_bytes())["schema"] == 3


def test_a_new_record_names_its_machine_and_versions(tmp_path: Path) -> None:
    record = results.new_record(torch.device("cpu"), "g")
    assert record.versions["torch"] == torch.__version__
    assert record.machine["cores"]
    record.machine["unavailable"] = {"driver": "no sensor is installed"}
    assert results.load(results.save(record, tmp_path)).machine == record.machine


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({**CONTENT, "schema": 2}, r"\$.schema"),
        ({**CONTENT, "extra": 1}, "unknown field `extra`"),
        ({**CONTENT, "group": "../up"}, r"\$.group"),
        ({**CONTENT, "commit": "a/b"}, r"\$.commit"),
        ({**CONTENT, "device": "…"}, "names no device"),
        ({**CONTENT, "date": "2030-13-01T00:00:00Z"}, "use UTC, as in 2030-01-31T23:59:59Z"),
        ({**CONTENT, "complete": 1}, r"\$.complete"),
        ({**CONTENT, "versions": {"torch": 2}}, r"\$.versions"),
        ({**CONTENT, "entries": 2 * CONTENT["entries"]}, "several entries have the name 'x'"),
        ({**CONTENT, "entries": [{"name": "x", "kind": "y"}]}, r"entries\[0\].kind"),
        ({**CONTENT, "entries": [{"name": "x", "kind": "step"}]}, "missing required field"),
        (with_step(second=1), "unknown field `second`"),
        (with_step(seconds="1"), r"entries\[0\].seconds"),
        (with_step(seconds=0), r"entries\[0\].seconds"),
        (with_step(seconds=None), "neither seconds nor a reason"),
        (with_step(seconds=True), r"entries\[0\].seconds"),
        (with_step(peak_bytes=-1), r"entries\[0\].peak_bytes"),
        (with_step(gradients=1.5), r"entries\[0\].gradients"),
        (with_step(kernels=10**400), r"entries\[0\].kernels"),
        (with_step(over={"v1": [1, 2]}), r"entries\[0\].over"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused_by_name(content: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"mine is not a record of this version: .*{field}"):
        results.parse(json.dumps(content).encode(), "mine")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"schema": 3}', b"[" * 10**6, b'{"seconds": NaN}'],
    ids=range(8),
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"x\.json is not a record of this version"):
        results.load(tmp_path / "x.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.ones(2), "1", -1.0])
def test_a_figure_that_is_none_is_not_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seconds|no figure"):
        results.save(plain_record(entries=[replace(STEP, seconds=value)]), tmp_path)
    with pytest.raises(ValueError, match=r"machine|no figure"):
        results.save(plain_record(machine={"memory": [value]}), tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_a_figure_of_numpy_is_written_as_a_number(tmp_path: Path) -> None:
    record = plain_record(entries=[replace(STEP, seconds=np.float64(2.5))])
    (step,) = results.load(results.save(record, tmp_path)).of(StepEntry)
    assert step.seconds == 2.5


def test_every_stored_record_is_read_and_would_be_written_the_same() -> None:
    paths = sorted(STORED.glob("*/*.json"))
    assert paths
    for path in paths:
        content = msgspec.json.encode(results.load(path))
        assert path.read_bytes() == msgspec.json.format(content, indent=1) + b"\n", path


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: results.save(RECORD, tmp_path), range(40)))
    assert len(set(paths)) == len(list(results.records(tmp_path))) == 40


def test_records_of_one_second_come_in_the_order_in_which_they_were_saved(tmp_path: Path) -> None:
    """The baseline is the last of them."""

    def numbered(number: int) -> Record:
        return plain_record(command=f"{number}")

    saved = [results.save(numbered(number), tmp_path) for number in range(11)]
    assert [path for path, _ in results.records(tmp_path)] == saved
