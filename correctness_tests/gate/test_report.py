"""The report that proves a green gate: complete, of this tree, and readable."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.own_repository import committed
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.report import Base, Report, line, read, verify
from tinyllama.harness.gate.snapshots import Repository
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.records.outcome import Outcome

NAME = "norm-triton-N8/forward"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """With a commit, and a change that is not committed; the current folder."""
    folder = committed(tmp_path / "checkout", {"op.py": "x = 1\n"}, monkeypatch)
    (folder / "op.py").write_text("x = 2\n")
    return Repository(folder, tmp_path / "scratch")


@pytest.fixture
def green(repository: Repository) -> Report:
    base = Base("main", repository.resolve("main"), "python", [NAME], ended=True)
    verdicts = [line("main", NAME, Outcome.SAME, "device_seconds +0.1%")]
    report = Report(repository.of_working_tree(), "main", "cuda (a GPU)")
    report.bases, report.verdicts = [base], verdicts
    report.conclude()
    return report


ASKED = Options(against=("main",), device="cuda")


def test_a_green_report_of_this_tree_is_verified(
    green: Report, repository: Repository, tmp_path: Path
) -> None:
    green.write(tmp_path / "gate.json")
    assert green.status == 0
    assert "all green" in verify(tmp_path / "gate.json", repository, ASKED)


Spoil = Callable[[Report], None]
SPOILED: dict[str, Spoil] = {
    "a benchmark without a verdict": lambda r: r.bases[0].expected.append("another"),
    "a comparison that did not end": lambda r: r.bases.__setitem__(0, Base("main", "", "python")),
    "nothing was compared": lambda r: r.verdicts.clear(),
    "a verdict that is not green": lambda r: r.verdicts.append(
        line("main", "b", Outcome.INCONCLUSIVE, "")
    ),
    "an end before its time": lambda r: setattr(r, "ended", "Ctrl-C"),
    "a judge that failed at its end": lambda r: setattr(r, "status", 2),
    "another tree": lambda r: setattr(r, "candidate", "0" * 40),
    "another device": lambda r: setattr(r, "device", "cpu (a CPU)"),
    "one op alone": lambda r: setattr(r, "only", ["norm"]),
    "another base": lambda r: r.bases.__setitem__(
        0, Base("old", "0" * 40, "python", [NAME], ended=True)
    ),
}


@pytest.mark.parametrize("why", SPOILED)
def test_a_report_that_proves_nothing_is_refused(
    green: Report, repository: Repository, tmp_path: Path, why: str
) -> None:
    SPOILED[why](green)
    green.write(tmp_path / "gate.json")
    with pytest.raises(UsageError):
        verify(tmp_path / "gate.json", repository, ASKED)


@pytest.mark.parametrize("option", ["op", "ops"])
def test_a_report_without_what_the_command_requires_is_refused(
    green: Report, repository: Repository, tmp_path: Path, option: str
) -> None:
    def asked(name: str) -> Options:
        chosen: dict[str, Any] = {option: (name,)}
        return replace(ASKED, **chosen)

    path, green.only = tmp_path / "gate.json", ["norm"]
    green.write(path)
    assert verify(path, repository, asked("norm"))
    with pytest.raises(UsageError, match="--op"):
        verify(path, repository, asked("other"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 0}', "null"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "gate.json").write_text(text)
    with pytest.raises(UsageError, match="no report"):
        read(tmp_path / "gate.json")


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([Outcome.SAME, Outcome.NEW, Outcome.IDENTICAL], 0),
        ([Outcome.SLOWER, Outcome.INCONCLUSIVE, Outcome.NOT_DECIDED], 10),
        ([Outcome.SLOWER, Outcome.MISSING, Outcome.BUSY], 10),
        ([Outcome.WRONG_RESULT, Outcome.SLOWER, Outcome.NOT_JUDGED], 16),
        ([Outcome.BUSY, Outcome.INCONCLUSIVE], 14),
        ([Outcome.NOT_JUDGED, Outcome.MISSING], 17),
    ],
)
def test_a_proved_verdict_decides_before_an_unknown_one(
    green: Report, outcomes: list[Outcome], status: int
) -> None:
    green.verdicts = [line("main", str(n), outcome, "") for n, outcome in enumerate(outcomes)]
    green.conclude()
    assert green.status == status
    green.ended = "Ctrl-C"
    green.conclude()
    assert green.status == (status if status in (10, 16) else 2), "what is not proved is open"


def test_people_read_one_line_a_verdict_and_references_apart(green: Report) -> None:
    green.verdicts += [line("main", "norm-eager-N8/forward", Outcome.SLOWER, "host +9%")]
    green.deleted_tests, green.protected = ["tests/test_norm.py"], ["pyproject.toml"]
    green.conclude()
    text = "\n".join(green.lines())
    assert text.count("norm-eager-N8") == text.count("norm-triton-N8") == 1
    assert "1 SAME; references: 1 SLOWER: status 10" in text
    for page in (text, green.markdown()):
        assert "deleted test: tests/test_norm.py" in page
        assert "the base's judged: pyproject.toml" in page
