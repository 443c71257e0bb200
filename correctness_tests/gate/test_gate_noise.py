"""A/A blocks as a file: whole, checked, and apart from the records."""

import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.gate_samples import CARD, DEVICE, VERSIONS, block
from tinyllama.harness.gate.decision import Spread
from tinyllama.harness.gate.noise import SCHEMA, Noise, noise_path
from tinyllama.harness.records.results import records


def test_blocks_come_back_and_records_do_not_meet_them(tmp_path: Path) -> None:
    noise = Noise.load(tmp_path, CARD)
    assert noise == Noise(CARD)
    for number in range(3):
        noise.add(block(number))
    old = os.umask(0o077)
    try:
        path = noise.save(tmp_path)
    finally:
        os.umask(old)
    assert path == tmp_path / "a-card-1" / "gate" / "noise.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert Noise.load(tmp_path, CARD) == noise
    assert [*records(tmp_path), *records(tmp_path, CARD)] == []


def test_blocks_of_two_that_record_at_once_all_stay(tmp_path: Path) -> None:
    """As two GPUs of one machine are certified into one folder."""
    both = [Noise(CARD), Noise(CARD)]
    for number in range(4):
        path = both[number % 2].record(tmp_path, block(number))
    assert path == noise_path(tmp_path, CARD)
    assert Noise.load(tmp_path, CARD).blocks == [block(number) for number in range(4)]
    assert both[1].blocks == Noise.load(tmp_path, CARD).blocks
    assert [one.name for one in path.parent.iterdir()] == ["noise.json"]

    def many(first: int) -> None:
        for number in range(first, first + 20, 2):
            Noise(CARD).record(tmp_path, block(number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(many, (10, 11)))
    assert len(Noise.load(tmp_path, CARD).blocks) == 24


def test_a_block_has_its_wave_and_older_ones_have_none(tmp_path: Path) -> None:
    noise = Noise(CARD, [block(0, wave="ab"), block(1, wave="ab"), block(2)])
    path = noise.save(tmp_path)
    data = json.loads(path.read_text())
    assert [one["wave"] for one in data["blocks"]] == ["ab", "ab", ""]
    for one in data["blocks"]:
        del one["wave"]
    path.write_text(json.dumps(data))
    assert [one.wave for one in Noise.load(tmp_path, CARD).blocks] == [""] * 3
    data["blocks"][0]["wave"] = 3
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="wave is 3, not of type str"):
        Noise.load(tmp_path, CARD)


def test_only_blocks_of_the_same_versions_count() -> None:
    newer = {"torch": "2.12"}
    versions = [newer, {}, {**VERSIONS, "hip": "7.0"}]
    others = [block(n, versions=one) for n, one in enumerate(versions, 2)]
    noise = Noise(CARD, [block(0), block(1), *others])
    assert noise.spread("copy-ours", DEVICE, VERSIONS) == Spread.of([0.001, 0.002])
    assert noise.spread("copy-ours", DEVICE, newer) == Spread.of([0.003])
    assert noise.spread("copy-ours", DEVICE, {**VERSIONS, "triton": "3.6"}) == Spread()
    assert noise.spread("copy-theirs", DEVICE, VERSIONS) == Spread()
    with pytest.raises(ValueError, match="metric 'seconds': use one of"):
        noise.spread("copy-ours", "seconds", VERSIONS)


BROKEN_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "date": ({"date": "2030-01-01"}, "date '2030-01-01': use UTC"),
    "commit": ({"commit": ""}, "commit is empty"),
    "versions": ({"versions": {}}, "versions is empty"),
    "no pairs": ({"pairs": 0}, "pairs is 0"),
    "statistics": ({"statistics": {}}, "statistics is empty"),
    "a name": ({"statistics": {"": {DEVICE: 0.0}}}, "a benchmark's name is a text"),
    "metric": ({"statistics": {"copy": {"seconds": 0.1}}}, "metric 'seconds': use one of"),
    "nan": ({"statistics": {"copy": {DEVICE: float("nan")}}}, f"{DEVICE} is nan, not a finite"),
    "text": ({"statistics": {"copy": {DEVICE: "0.1"}}}, f"{DEVICE} is '0.1', not a finite"),
}


@pytest.mark.parametrize(("fields", "message"), BROKEN_BLOCKS.values(), ids=BROKEN_BLOCKS)
def test_a_broken_block_is_neither_added_nor_saved_nor_read(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    noise = Noise(CARD, [block()])
    path = noise.save(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"the block.*{message}"):
        noise.add(block(1, **fields))
    noise.blocks.append(block(1, **fields))
    with pytest.raises(ValueError, match=rf"blocks\[1\].*{message}"):
        noise.save(tmp_path)
    assert path.read_bytes() == before
    data = json.loads(before)
    data["blocks"].append({**data["blocks"][0], **fields})
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"noise.json.*blocks\[1\].*{message}"):
        Noise.load(tmp_path, CARD)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {key: value for key, value in data.items() if key != name}


BROKEN_FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "list": (lambda data: [data], "not an object of fields"),
    "schema": (lambda data: {**data, "schema": SCHEMA - 1}, "schema .* is not .* certify again"),
    "no blocks": (without("blocks"), "missing or unknown: blocks"),
    "a field more": (lambda data: {**data, "more": 1}, "missing or unknown: more"),
    "part of one": (lambda data: {**data, "blocks": [{}]}, r"blocks\[0\].*commit, date, pairs"),
    "twice": (lambda data: {**data, "blocks": 2 * data["blocks"]}, r"blocks\[1\] is there twice"),
    "device": (lambda data: {**data, "device": "a-card-1"}, "device 'a-card-1' is not 'A Card 1'"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_is_one_error_that_names_it(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    path = Noise(CARD, [block()]).save(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=rf"noise\.json holds no A/A blocks.*{message}"):
        Noise.load(tmp_path, CARD)


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"[" * 100_000], ids=range(4))
def test_what_is_not_json_is_one_error_that_names_it(text: bytes, tmp_path: Path) -> None:
    path = noise_path(tmp_path, CARD)
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"noise\.json holds no A/A blocks"):
        Noise.load(tmp_path, CARD)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise(CARD, [block()])
    path = noise.save(tmp_path)
    noise.add(block(1))

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        patch.setattr(tempfile, "tempdir", str(tmp_path))  # where the content is kept
        with pytest.raises(OSError, match="no space left"):
            noise.save(tmp_path)
    assert Noise.load(tmp_path, CARD).blocks == [block()]
    assert os.listdir(path.parent) == ["noise.json"]
