"""Certificates as they are read again: from folders, and in documents."""

import re
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.gate_samples import FOUND, certificate, stored
from correctness_tests.support.sample_records import FIRST, SECOND, record
from tinyllama.harness.gate.certificates import FIELDS, certificates, load, provenance
from tinyllama.harness.gate.noise import SCHEMA
from tinyllama.harness.report.tables import source


def test_certificates_are_those_of_a_folder_or_of_one_device(tmp_path: Path) -> None:
    assert certificates(tmp_path) == []
    stored(tmp_path, certificate())
    stored(tmp_path, certificate(SECOND), "b-device")
    assert [one["device"] for one in certificates(tmp_path)] == [FIRST, SECOND]
    assert [one["device"] for one in certificates(tmp_path, SECOND)] == [SECOND]


def test_figures_of_a_changed_tree_say_so() -> None:
    """Its commit alone names code that was not measured."""
    commit = "b" * 40 + "+dirty"
    of_blocks = provenance({**certificate(), "commits": [commit]})
    for text in (of_blocks, source(record("steps", [], commit=commit))):
        assert "; commit bbbbbbbbbb+dirty; " in text


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_no_certificate_is_named(field: str, tmp_path: Path) -> None:
    path = stored(tmp_path, {**certificate(), field: None})
    with pytest.raises(ValueError, match=rf"{path} is no certificate: {field} is None"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not an object"):
        load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{path} is no certificate"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bars": [{}]}, "bars[0]: text is None, not of type str"),
        ({"bars": [3]}, "bars[0]: it is not an object of fields"),
        ({"bars": [{"text": "", "held": 1, "measured": ""}]}, "bars[0]: held is 1, not of type b"),
        ({"bars": [{"text": "", "held": True}]}, "bars[0]: measured is None, not of type str"),
        ({"found": [{}]}, "found[0]: benchmark is None, not of type str"),
        ({"found": [FOUND, None]}, "found[1]: it is not an object of fields"),
        ({"found": [{**FOUND, "metric": 1}]}, "found[0]: metric is 1, not of type str"),
        ({"found": [{**FOUND, "spread": "wide"}]}, "found[0]: spread is 'wide', not a finite"),
        ({"found": [{**FOUND, "smallest": "x"}]}, "found[0]: smallest is 'x', neither a number"),
        ({"found": [FOUND, {**FOUND, "detected": {}}]}, "found[1]: detected is of other slowdowns"),
        ({"found": [{**FOUND, "detected": {"x": 1.0}}]}, "found[0]: detected has 'x', not a slow"),
        ({"found": [{**FOUND, "detected": {"0.1": None}}]}, "detected at 0.1 is None, not a share"),
        ({"commits": [1]}, "commits: each is a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bars_and_figures_hold_what_is_shown_of_them(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = stored(tmp_path, {**certificate(), **change})
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(path)
    assert str(error.value).startswith(f"{path} is no certificate: ")


def test_a_certificate_of_blocks_that_were_taken_otherwise_is_none(tmp_path: Path) -> None:
    path = stored(tmp_path, {**certificate(), "schema": SCHEMA - 1})
    with pytest.raises(ValueError, match=f"schema {SCHEMA - 1} is not {SCHEMA}.*certify again"):
        load(path)
