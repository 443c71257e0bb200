"""The tables of records as lines of text, of SYNTHETIC records that reach each case.

    python -m correctness_tests.support.told_tables    (writes correctness_tests/report/tables.txt)

`test_tables_as_a_whole.py` compares with that file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from correctness_tests.support.irregular_records import records
from correctness_tests.support.sample_records import bare_step, ratio, record, step
from tinyllama.harness.records import report
from tinyllama.harness.records.entries import OpEntry, PartEntry, StepEntry
from tinyllama.harness.records.results import Record

FILE = Path(__file__).parents[1] / "report/tables.txt"


def every() -> list[Record]:
    """Those of the page, of whose groups one is incomplete; one missed a target; and parts."""
    found = report.latest(records())
    found[0] = replace(found[0], missed=["SYNTHETIC bar", "another | one"])
    few = [step("tiny-bf16", "liger", 1e-3), step("tiny-bf16", "v1"), cannot("tiny-bf16", "v2")]
    alone = [record(group, [step(group, "liger")]) for group in ("odd-bf16", "small-fp64")]
    parts = [*of_parts("small-bf16", 1.0), *of_parts("large-fp32", 9.0)[:1]]
    return [*found, record("parts", parts), *alone, record("tiny-bf16", few)]


def cannot(group: str, contender: str) -> StepEntry:
    return bare_step(group, contender, cannot="SYNTHETIC: no kernel")


def of_parts(group: str, scale: float) -> list[PartEntry]:
    workload, precision = group.split("-")
    named: dict[str, Any] = {
        "workload": workload,
        "precision": precision,
        "role": "tier",
        "baseline": "v2",
    }
    return [
        PartEntry(
            name=f"part/{group}/{name}",
            contender=name,
            seconds=scale * (1 + number) * 1e-3,
            over_baseline=ratio(1.0 + number),
            **named,
        )
        for number, name in enumerate(("v2", "v2-no-norm", f"v2-no-{workload}"))
    ]


def told() -> str:
    """Each table under the name of its function, some twice: what comes last in them matters."""
    found = every()
    ops_last = [one for one in found if one.of(StepEntry)][:2]
    ops_last += [one for one in found if one.of(OpEntry)]
    texts = {
        "latest": "\n".join(f"{one.device}: {one.group} of {one.date}" for one in found),
        "terminal": "\n".join(report.terminal(found[-4:], width=180)),
        "terminal, ops last": "\n".join(report.terminal(ops_last, width=180)),
        "markdown": report.markdown(found[-4:]),
        "markdown, ops last": report.markdown(ops_last),
        "ladder_markdown": report.ladder_markdown(found),
        "parts_markdown": report.parts_markdown(found),
        "ops_markdown": report.ops_markdown(ops_last),
        "aligned": "\n".join(report.aligned([["a", "bb", "c"], ["ddd", "e", ""], ["", "", "f"]])),
    }
    lines = [f"== {name}\n{text}" for name, text in texts.items()]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


if __name__ == "__main__":
    FILE.write_text(told(), encoding="utf-8")
