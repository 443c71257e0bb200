"""Records: read only when valid, written whole, over no other one."""

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from correctness_tests.support.commands import ENVIRONMENT
from correctness_tests.support.sample_records import bare_step, plain_record
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import (
    CurveEntry,
    OpEntry,
    Quartiles,
    Ratio,
    entry_as_json,
)
from tinyllama.harness.records.results import Record, as_json

TENSOR: Any = torch.ones(2)
STORED = Path(__file__).resolve().parents[2] / "results"
STEP = bare_step("small-fp32", "v1", name="x", seconds=1.0, seconds_quartiles=Quartiles(0.9, 1))


def record(**fields: Any) -> Record:
    return plain_record(**{"entries": [STEP], **fields})


def content(entries: Any = None, **fields: Any) -> dict[str, Any]:
    """A record as it is in a file, with other fields."""
    found = {**as_json(record()), **fields}
    return found if entries is None else {**found, "entries": entries}


def with_entry(**fields: Any) -> dict[str, Any]:
    return content([{**entry_as_json(STEP), **fields}])


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = results.save(record(), tmp_path)
    assert path == tmp_path / "a-card" / "20300102T030405Z-aaaaaaaaaa-g.json"
    assert results.load(path) == record()
    assert path.stat().st_mode & 0o777 == 0o644
    assert [found for found in results.records(tmp_path, "A Card")] == [(path, record())]


def test_a_new_record_names_its_machine_and_versions() -> None:
    found = results.new_record(torch.device("cpu"), "g")
    assert found.machine["cores"] >= 1
    assert found.versions["torch"] == torch.__version__
    results.from_json(as_json(found))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(group="../up"), "group '../up'"),
        (record(commit="a/b"), "commit 'a/b'"),
        (record(device="…"), "device"),
        (record(device=7), "device is 7"),
        (record(date="2030-13-01T00:00:00Z"), "date '2030-13"),
        (record(date="2030-1-1T0:0:0Z"), "date"),
        (record(complete=1), "complete is 1"),
        (record(versions={"torch": 2}), "versions"),
        (record(schema=3), "schema 3"),
        (record(machine={"cores": math.nan}), "machine: cores"),
        (record(entries=[STEP, STEP]), "a second entry has the name 'x'"),
        (record(entries=[replace(STEP, seconds=math.nan)]), r"\('x'\): seconds is nan"),
        (record(entries=[replace(STEP, kernels=TENSOR)]), "kernels is tensor"),
        (record(entries=[replace(STEP, seconds=np.float32(1))]), "seconds is "),
        (content(extra=1), "missing or unknown: extra"),
        (content(entries=7), "entries is 7"),
        (content([7]), r"entries\[0\] is 7"),
        (content([{"name": "x"}]), "has no kind"),
        (content([{"name": "x", "kind": "y"}]), "unknown kind 'y': use step, sweep, "),
        (content([{"name": "x", "kind": "step"}]), "has no role, workload, precision, contender"),
        (with_entry(second=1), "unknown field 'second' of the kind step"),
        (with_entry(seconds="1"), "seconds is '1', not a finite number of at least 0"),
        (with_entry(seconds=True), "seconds is True"),
        (with_entry(seconds=None), "seconds is None"),
        (with_entry(peak_bytes=-1), "peak_bytes is -1"),
        (with_entry(samples_per_second=math.inf), "samples_per_second is inf"),
        (with_entry(kernels=10**400), "kernels is 1000"),
        (with_entry(steps=1.5), "steps is 1.5, not a whole number"),
        (with_entry(seconds_quartiles=[2, 1]), "seconds_quartiles is .*, not two numbers in order"),
        (with_entry(over_v1=[1, 1, math.nan]), r"over_v1 is \[1, 1, nan\], not a ratio"),
        (with_entry(over_v1=[1, 1, 1], over_v2=[1, 1, 1]), "unknown field 'over_v2'"),
        (with_entry(over={"v1": [1, 2]}), r"over: v1 is \[1, 2\], not a ratio"),
        (with_entry(baseline="v1"), "unknown field 'baseline'"),
        (with_entry(role=1), "role is 1, not a text"),
        (with_entry(tolerances=[1]), "tolerances is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_that_is_none_is_neither_written_nor_read(
    tmp_path: Path, bad: Record | dict[str, Any], message: str
) -> None:
    if isinstance(bad, Record):
        with pytest.raises(ValueError, match=message):
            results.save(bad, tmp_path)
        assert not list(tmp_path.rglob("*"))
    text = json.dumps(as_json(bad) if isinstance(bad, Record) else bad, default=str)
    if "tensor" in text or "1.0" in message:
        return  # JSON has no such value
    if message != "seconds is ":
        with pytest.raises(ValueError, match=f"mine is not a record of this version: .*{message}"):
            results.parse(text.encode(), "mine")


def test_every_kind_of_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Ratios too, under the name of what they are over."""
    texts = ("name", "op", "provider", "role", "case", "dtype", "values", "passes")
    op: dict[str, Any] = dict.fromkeys(texts, "y")
    curve: dict[str, Any] = dict.fromkeys(("name", "workload", "contender", "precision"), "z")
    entries = [
        replace(STEP, baseline="hf-eager", over_baseline=Ratio(2, 1, 3), time_by={"other": 1.0}),
        OpEntry(**op, layouts={"strided": Ratio(1.0, 0.9, 1.1)}, queued=False),
        CurveEntry(**curve, steps=9, window=9, every=9, losses=[1.0, -0.5]),
    ]
    path = results.save(record(entries=entries), tmp_path)
    assert results.load(path).entries == entries
    step, found, _ = json.loads(path.read_text())["entries"]
    assert step["over_hf-eager"] == [2, 1, 3]
    assert not {"baseline", "over_baseline", "kernels"} & set(step)
    assert found["layouts"] == {"strided": [1.0, 0.9, 1.1]}


@pytest.mark.parametrize("path", sorted(STORED.glob("*/*.json")), ids=lambda path: path.stem)
def test_what_is_stored_is_read_whole_and_would_be_written_the_same(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert json.loads(json.dumps(as_json(results.load(path)))) == stored


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"schema": 1}', b'{"schema": 2}', b"[" * 10**6],
    ids=range(8),
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"x\.json is not a record of this version"):
        results.load(tmp_path / "x.json")


# -- written whole ----------------------------------------------------------------------------


@pytest.mark.long
def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    results.save(record(), tmp_path / "seed")
    (seed,) = (tmp_path / "seed").glob("*/*.json")
    code = f"""
import sys
from pathlib import Path
from tinyllama.harness.records import results
record = results.load(Path({str(seed)!r}))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    results.save(record, Path({str(tmp_path / "shared")!r}))
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert len(list(results.records(tmp_path / "shared"))) == 40


def test_records_of_one_second_come_in_the_order_in_which_they_were_saved(tmp_path: Path) -> None:
    """The baseline is the last of them."""
    saved = [results.save(replace(record(), command=f"{n}"), tmp_path) for n in range(11)]
    assert [path for path, _ in results.records(tmp_path)] == saved


@pytest.mark.parametrize("step", ["fsync", "chmod", "link"])
def test_a_crash_in_the_middle_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def crash(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    folder, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, crash)
        patch.setattr(tempfile, "tempdir", str(elsewhere))
        with pytest.raises(OSError, match="no space left, and the new content is in"):
            results.save(record(), folder)
    assert not list(folder.glob("*/*"))
    (kept,) = elsewhere.glob("*/*.json")
    assert results.load(kept).group == record().group
