"""``tinyllama report``: twenty lines, tables, Markdown and the page, from records alone."""

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from correctness_tests.support.commands import printed, refused
from correctness_tests.support.sample_records import record as sample
from correctness_tests.support.sample_records import sample_records, sample_targets, steps
from tinyllama.harness.records.entries import OpEntry, StepEntry
from tinyllama.harness.records.results import Record, save
from tinyllama.harness.report.summary import LINES, summaries, terminal_lines
from tinyllama.harness.report.tables import latest

pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
pytest.importorskip("jinja2", reason="extra 'report' is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    for record in sample_records():
        save(record, root)
    return root


def text_of(page: Path) -> str:
    """The words of a page, without those inside of pictures."""
    html = re.sub(r"<(style|svg).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# -- what is fastest, missed and changed ------------------------------------------------------


def test_twenty_lines_say_what_is_fastest_missed_and_changed() -> None:
    lines = terminal_lines(summaries(sample_records(), sample_targets()))
    assert len(lines) <= LINES
    text = "\n".join(lines)
    assert "fastest  v3 in 3 of 4 groups of steps" in text
    assert "small-bf16: v3 0.97 ms, 2.27 times as fast as torchtitan (2.2 ms)" in text
    assert "triton in 14 of 20 cases" in text
    assert "missed   2 of " in text
    bar = "small bf16: v3 speed over v1 >= 24.85: measured 24.845 "
    assert bar in text, "in as many digits as show the miss"
    assert "small-bf16 not compared with 2026-02-09: torch 2.10.0 -> 2.11.0" in text
    assert "MI325X" not in text, "a claim about a device that was not measured"


@pytest.mark.parametrize(("scale", "word"), [(1.3, "worse"), (0.7, "better")])
def test_a_change_since_the_record_before_is_better_or_worse(scale: float, word: str) -> None:
    before = sample("small-bf16", steps("small-bf16"), date="2026-03-01T00:00:00Z")
    after = sample("small-bf16", steps("small-bf16", scale))
    (summary,) = summaries([before, after])
    *_, changed = summary.parts
    line = f"{word}: step/small-bf16/v1 seconds 24.1 ms -> {24.1 * scale:.4g} ms"
    assert line in "\n".join(changed.lines)
    assert all(line.startswith(word) for line in changed.lines)
    assert changed.sentence == f"{len(changed.lines)} figures {word}"
    (equal,) = summaries([before, replace(after, entries=before.entries)])
    assert equal.parts[-1].sentence == "nothing beyond the scatter since the record before"


def test_what_runs_of_another_repository_missed_is_told_in_their_words() -> None:
    line = "softmax-triton, transposed: 1.40 times as long as contiguous, allowed 1.1"
    record = sample("ops-fp32", [], missed=[line])
    assert summaries([record])[0].parts[1].lines == [f"ops-fp32: {line}"]
    assert not summaries([record], sample_targets())[0].parts[1].lines, "bars are those of today"


def test_the_newest_complete_record_is_shown_and_an_incomplete_one_for_want_of_it() -> None:
    old, new = sample("g", [], date="2026-01-05T09:00:00Z"), sample("g", [], complete=False)
    assert latest([old, new]) == [old]
    assert latest([replace(old, complete=False), new]) == [new]


# -- the command ------------------------------------------------------------------------------


@pytest.mark.long
def test_it_prints_lines_or_tables_and_writes_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ("report", "--results-dir", folder, "--html", page)
    assert len(printed(*command).splitlines()) <= LINES
    assert "ms a step" in printed(*command, "--all")
    words = text_of(page)
    first, second = (words.index(f"SYNTHETIC device {name}") for name in "AB")
    parts = ("Fastest v3 in 3 of", "Missed", "Changed", "small-bf16: v3 0.97 ms")
    places = [words.index(part) for part in parts]
    assert [first, *places, second] == sorted([first, *places, second])
    html = page.read_text()
    assert html.index("<svg") > html.index("Changed")
    for loads in ("<script", '<link rel="stylesheet', "src=", "@import"):
        assert loads not in html


@pytest.mark.long
def test_another_repository_gets_none_of_this_project_s_bars(tmp_path: Path) -> None:
    """Its ops may have the names of ours; there is no step of our tiers among its records."""
    ops = next(record for record in sample_records() if record.of(OpEntry))
    save(replace(ops, device="NVIDIA H200"), tmp_path / "results")
    page = tmp_path / "page.html"
    command = ("report", "--results-dir", tmp_path / "results", "--html", page)
    assert "no bar is about these records" in printed(*command)
    assert "under the roofline" in text_of(page)


@pytest.mark.long
def test_a_text_of_a_record_is_no_markup(tmp_path: Path) -> None:
    """Records are carried from machine to machine."""
    evil = '<script>x</script> &lt; ![i](http://e) [t][r] | \n# h <img src="x">'

    def hostile(record: Record, number: int) -> Record:
        entries = [
            replace(step, cannot=evil, left_out={evil: evil}) for step in record.of(StepEntry)
        ]
        texts = {"device": f"{evil} {number}", "versions": {evil: evil}, "missed": [evil]}
        return replace(record, entries=entries if number % 2 else record.entries, **texts)

    for number, record in enumerate(sample_records()):
        save(hostile(record, number), tmp_path / "results")
    page = tmp_path / "page.html"
    printed("report", "--results-dir", tmp_path / "results", "--html", page)
    assert not re.search("<script>x|<img src", page.read_text())


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "x.json is not a record of this version"), (None, "is a pipe or a device, not a file")],
)
def test_a_file_that_is_no_record_is_named(
    content: str | None, message: str, tmp_path: Path
) -> None:
    """To open a pipe would wait for a writer without end."""
    path = tmp_path / "a-card" / "x.json"
    path.parent.mkdir()
    path.write_text(content) if content else os.mkfifo(path)
    error = refused("report", "--results-dir", tmp_path)
    assert message in error
    assert error.endswith("repair or remove that file")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results-dir", "nowhere"], "--results-dir 'nowhere' is no folder"),
        (["--device", "Card Z"], "has no records of 'Card Z': make some with pytest --record"),
        (["--html", "nowhere/page.html"], "no folder 'nowhere'; make it first"),
        (["--device", "!"], "has no records of '!'"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(
    arguments: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused("report", "--results-dir", folder, *arguments)
    assert not list(tmp_path.iterdir()), "nothing is written"
