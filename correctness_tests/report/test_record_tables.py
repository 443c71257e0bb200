"""Tables in Markdown that are made from records: what stands in which cell."""

from dataclasses import replace
from typing import Any

from correctness_tests.support.sample_records import ratio, record, steps
from tinyllama.harness.records.entries import PartEntry
from tinyllama.harness.records.report import markdown, parts_markdown


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_baseline_is_1_over_itself_and_the_others_have_their_intervals() -> None:
    header, _, *rows = cells(markdown([record("small-bf16", steps("small-bf16"))]))
    over = {row[0]: row[header.index("over V1")] for row in rows}
    assert over["v1"] == "1"
    assert over["v2"] == "12.96 [12.70, 13.22]"
    assert over["floor"] == over["megatron"] == ""


def test_a_part_switched_off_has_its_time_and_its_ratio_in_the_column_of_its_group() -> None:
    def part(group: str, name: str, milliseconds: float, over: float) -> PartEntry:
        workload, precision = group.split("-")
        fields: dict[str, Any] = {"workload": workload, "precision": precision}
        fields |= {"contender": name, "baseline": "v2", "over_baseline": ratio(over)}
        entry = PartEntry(name=f"parts/{group}/{name}", seconds=milliseconds * 1e-3, **fields)
        return entry if name != "v2" else replace(entry, over_baseline=ratio(1.0, 0.0))

    found = [
        part("small-fp32", "v2", 6.0, 1.0),
        part("small-fp32", "without norm", 8.0, 0.75),
        part("small-bf16", "v2", 2.0, 1.0),
    ]
    header, _, *rows = cells(parts_markdown([record("parts", found)]))
    assert header == ["V2", "small fp32", "small bf16"]
    assert rows == [
        ["v2", "6.00 ms", "2.00 ms"],
        ["without norm", "8.00 ms, 0.75 [0.73, 0.77]", ""],
    ]
