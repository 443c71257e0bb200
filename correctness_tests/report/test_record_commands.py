"""The commands on records, as their users meet them: exit status, and what is printed."""

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from correctness_tests.support.commands import printed, refused, tinyllama
from correctness_tests.support.sample_records import bare_step, plain_record
from tinyllama.harness.records import results
from tinyllama.harness.records.results import Record


def record(seconds: float = 1.0, **fields: Any) -> Record:
    first = bare_step("small-bf16", "v1", seconds=seconds, peak_bytes=2**20)
    peer = bare_step("small-bf16", "hf", "peer", seconds=2 * seconds)
    return plain_record(**{"group": "small-bf16", "entries": [first, peer], **fields})


def file(path: Path, content: Record) -> str:
    path.write_bytes(msgspec.json.encode(content))
    return str(path)


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    def run(a: Record, b: Record) -> tuple[int, str]:
        done = tinyllama("compare", file(tmp_path / "a.json", a), file(tmp_path / "b.json", b))
        return done.status, done.out

    return run


def has(text: str, *patterns: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}\n{text}"


# -- compare ----------------------------------------------------------------------------------


def test_equal_records_are_the_same(compared: Any) -> None:
    status, out = compared(record(), record())
    assert status == 0
    has(
        out,
        "^A: small-bf16; A Card; torch 2.0; commit aaaaaaaaaa; 2030-01-02$",
        r"step/small-bf16/v1 │ seconds +│ 1000 ms +│ 1000 ms +│ 1.000 │ SAME",
        r"step/small-bf16/v1 │ peak_bytes │ 1.00 MiB │ 1.00 MiB │ 1.000 │ SAME",
        r"step/small-bf16/hf │ seconds .* not gated",
        "^verdict: SAME$",
    )


def test_slower_is_10_missing_is_15_and_new_is_12(compared: Any) -> None:
    status, out = compared(record(), record(1.5))
    assert status == 10
    has(out, "1.500 │ SLOWER: ", "^verdict: SLOWER$")
    assert compared(record(1.5), record())[0] == 0
    lacking = record(entries=record().entries[1:])
    assert compared(record(), lacking)[0] == 15
    status, out = compared(lacking, record())
    assert status == 12
    has(out, r"seconds +│ +│ 1000 ms")
    assert compared(record(entries=[]), record(entries=[]))[0] == 15


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"device": "Another"}, "device A Card and Another"),
        ({"versions": {"torch": "3.0", "triton": "4"}}, "torch 2.0 and 3.0, triton none and 4"),
    ],
)
def test_other_settings_are_13_and_shown_without_verdict(
    compared: Any, fields: dict[str, Any], text: str
) -> None:
    status, out = compared(record(), record(9.0, **fields))
    assert status == 13
    has(out, f"^verdict: OTHER DEVICE OR VERSION: {text}: none can be given$", "9000 ms +│ 9.000")
    assert "SLOWER" not in out


def test_what_weakens_a_comparison_is_said(compared: Any) -> None:
    _, out = compared(record(), record(complete=False, group="other"))
    has(out, "^B: other; .*; not complete$", "note: A is of group small-bf16, B of other")


def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    good, bad = file(tmp_path / "good.json", record()), tmp_path / "bad.json"
    assert "nowhere.json': No such file" in refused("compare", good, "nowhere.json")
    assert "Is a directory" in refused("compare", str(tmp_path), good)
    assert "are one file" in refused("compare", good, good)
    bad.write_text(Path(good).read_text().replace('"complete":true', '"complete":"yes"'))
    error = refused("compare", good, str(bad))
    assert "bad.json is not a record of this version: Expected `bool`, got `str`" in error
    assert "A.json" in refused("compare")


# -- results ----------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    results.save(record(), tmp_path / "results")
    results.save(record(group="ops-bf16"), tmp_path / "results")
    results.save(record(device="Another", commit="b" * 40 + "+dirty"), tmp_path / "results")
    return tmp_path / "results"


def test_list_is_a_table_of_the_records(root: Path) -> None:
    has(
        printed("results", "list", "--results-dir", root),
        r"A Card +│ small-bf16 │ 2030-01-02T03:04:05Z │ a{10} +│ yes +│ 2 +│ 2030\w+-a{10}-sm",
        r"A Card +│ ops-bf16",
        r"Another +│ small-bf16 │ .* │ b{10}\+dirty",
    )
    for device, group in (("a card", "x"), ("card", "ops-bf16"), ("a card", "ops")):  # whole names
        chosen = ("--results-dir", root, "--device", device, "--group", group)
        said = refused("results", "list", *chosen)
        assert "there are A Card ops-bf16, A Card small-bf16, Another" in said


def test_what_is_not_a_record_is_named(root: Path) -> None:
    (root / "bad").mkdir()
    (root / "bad" / "x.json").write_text("{}")
    error = refused("results", "list", "--results-dir", str(root))
    assert "bad/x.json is not a record of this version" in error
    error = refused("results", "list", "--results-dir", "gone")
    assert "--results-dir 'gone' is no folder" in error
    assert "COMMAND" in refused("results")


def test_a_pipe_is_read_by_nothing(root: Path, tmp_path: Path) -> None:
    """To open it would wait for a writer without end."""
    good, pipe = file(tmp_path / "good.json", record()), root / "a-card" / "pipe.json"
    os.mkfifo(pipe)
    why = f"'{pipe}' is a pipe or a device, not a file"
    folder = ("--results-dir", str(root))
    assert f"{why}: repair or remove" in refused("results", "list", *folder)
    assert why in refused("compare", good, str(pipe))
    assert why in refused("kernels", "--chip", "sm_90", "--against", str(pipe))
    assert "is a pipe or a device" in refused("compare", good, "/dev/zero")
    page = str(tmp_path / "page.html")
    assert "is a pipe or a device" in refused("report", *folder, "--html", page)


def test_a_device_without_a_letter_has_no_records(root: Path) -> None:
    for command in (["results", "list"], ["report"]):
        error = refused(*command, "--results-dir", str(root), "--device", "!")
        assert "no record" in error
