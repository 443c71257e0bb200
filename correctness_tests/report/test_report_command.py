"""``python -m tinyllama report``: tables, Markdown and the page, from records alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from correctness_tests.support.commands import printed, refused, tinyllama
from correctness_tests.support.sample_records import sample_records
from tinyllama.harness.records.entries import StepEntry
from tinyllama.harness.records.report import last_passes, latest, markdown, ops_markdown, terminal
from tinyllama.harness.records.results import save

pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
pytest.importorskip("jinja2", reason="extra 'report' is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    for record in sample_records():
        save(record, root)
    return root


@pytest.mark.long
def test_it_prints_tables_and_writes_the_page(folder: Path, tmp_path: Path) -> None:
    """Documented figures with their caveat; Markdown, for a step's summary, where it is asked."""
    page = tmp_path / "page.html"
    asked = ("report", "--results-dir", folder, "--html", page)
    assert "| contender | ms a step |" in printed(*asked, "--markdown", "-")
    page.unlink()
    shown = tinyllama(*asked)
    assert shown.status == 0
    assert "ms a step" in shown.out
    assert "of the roof" in shown.out
    assert str(page) in shown.err
    assert "<html" in page.read_text()
    lines = [line for line in shown.out.splitlines() if "MI325X (" in line]
    assert len(lines) >= 10
    assert all("never run on MI325X hardware" in line for line in lines)
    assert any("1 of 74 parameters" in line for line in lines)


def test_without_the_extra_that_the_page_needs_no_table_is_printed_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyllama.harness.page.NEEDS", ("jinja2", "no_such_module"))
    shown = tinyllama("report", "--results-dir", folder)
    assert (shown.status, shown.out) == (2, "")
    assert "error: the page needs no_such_module: " in shown.err


@pytest.mark.long
def test_another_repository_gets_none_of_this_one_s_claims_and_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ops may have the names of ours; there is no step of our tiers among its records. What it
    lacks is made by a command that it has."""
    monkeypatch.chdir(tmp_path)
    every = [replace(r, device="NVIDIA H200") for r in sample_records() if "ops" in r.group]
    save(every[0], tmp_path / "results")
    page = tmp_path / "page.html"
    asked = ("report", "--results-dir", tmp_path / "results", "--html", page)
    shown = printed(*asked, "--markdown", "-") + printed(*asked)
    assert "of the roof" in shown
    for text in (shown, page.read_text()):
        assert "MI325X" not in text
        assert "Documented" not in text
    assert "No target is about what was measured on this device." in page.read_text()
    assert "perf_tests" not in page.read_text().replace(every[0].command, "")
    own = next(r for r in sample_records() if r.group == "small-bf16")
    save(own, tmp_path / "results")
    shown = printed(*asked, "--device", "NVIDIA H200")
    assert "MI325X (never run on MI325X hardware)" in shown
    assert "triton</a>" in page.read_text().split('id="d0-ladder"')[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results-dir", "nowhere"], "--results-dir 'nowhere' is no folder"),
        (["--device", "Card Z"], "has no records of 'Card Z': make some with pytest --record"),
        (["--html", "nowhere/page.html"], "no folder 'nowhere'; make it first"),
        (["--html", "x", "--markdown", "./x"], "--html and --markdown are both 'x': name two"),
        (["--markdown", "nowhere/x.md"], "--markdown 'nowhere/x.md': no folder 'nowhere'"),
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["a-card/x.json", "a-card/gate/certificate.json"])
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_among_the_results_is_one_line_and_2(
    name: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    for record in sample_records():
        save(record, tmp_path / "results")
    path, page = tmp_path / "results" / name, tmp_path / "page.html"
    path.parent.mkdir(parents=True)
    make(path)
    asked = ("report", "--results-dir", tmp_path / "results", "--html", page)
    assert f"'{path}': repair or remove that file" in refused(*asked)
    assert not page.exists()


def test_the_newest_complete_record_is_shown_and_an_incomplete_one_only_for_want_of_it() -> None:
    records = sample_records()
    group = records[0].group
    of_group = [r for r in records if (r.device, r.group) == (records[0].device, group)]
    for record in of_group:
        record.complete = False
    (shown,) = [r for r in latest(of_group)]
    assert shown.date == max(record.date for record in of_group)
    assert "INCOMPLETE" in markdown([shown])
    of_group[0].complete = True
    assert latest(of_group) == [of_group[0]]


@pytest.mark.long
def test_a_text_of_a_record_is_no_markup(tmp_path: Path) -> None:
    """Records are carried from machine to machine, and a summary of CI shows what they say."""
    evil = '<script>x</script> &lt; ![i](http://e) [t][r] | \n# h <img src="x"> \ud800'
    for number, record in enumerate(sample_records()):
        record.device = f"{evil} {number}"
        record.versions = {evil: evil}
        record.missed = [evil]
        record.entries = [
            replace(entry, cannot=evil, left_out={evil: evil}) if number % 2 else entry
            for entry in record.entries
            if isinstance(entry, StepEntry)
        ]
        save(record, tmp_path / "results")
    summary = tmp_path / "summary.md"
    out = ("--html", tmp_path / "page.html", "--markdown", summary)
    printed("report", "--results-dir", tmp_path / "results", *out)
    text = summary.read_text()
    assert text.count("&lt;script>") > 10
    for markup in ("<script", "<img", " &lt; ", r"[^\\]\](\(|\[)", "\n# h", r"[^\\]\| # h"):
        assert not re.search(markup, text), markup
    page = (tmp_path / "page.html").read_text()
    assert "<script>x" not in page
    assert "<img src" not in page


def test_the_table_of_ops_has_a_row_for_each_case_and_a_column_for_each_provider() -> None:
    (record,) = [r for r in latest(sample_records()) if r.group.startswith("ops")][:1]
    entries = last_passes(record)
    header, _, *rows = ops_markdown([record]).split("\n\n")[0].splitlines()
    assert header.split(" | ")[0:4] == ["| op", "case", "dtype", "eager"]
    assert len(rows) == len({entry.call[:3] for entry in entries})
    assert sum(row.count("%)") for row in rows) == len(entries)
    record.entries.append(replace(entries[-1], provider="last"))
    header, _, *rows = ops_markdown([record]).split("\n\n")[0].splitlines()
    assert header.endswith(" | last |")
    assert sum(row.count("%)") for row in rows) == len(entries) + 1


@pytest.mark.long
def test_an_op_shows_its_last_pass_and_what_did_not_run_is_said() -> None:
    (record,) = [r for r in latest(sample_records()) if r.group.startswith("ops")][:1]
    shown = last_passes(record)
    assert {entry.passes for entry in shown} == {"forward+backward"}
    record.entries.append(replace(shown[0], name="op/x", provider="far", cannot="too far away"))
    assert any("far not timed: too far away" in line for line in terminal([record]))
