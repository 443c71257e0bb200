"""Each field of a record is of its type, each entry has what its kind needs, and what a record
says of its command and its software."""

import importlib.util
import math
import sys
from dataclasses import MISSING, fields
from typing import Any

import pytest

from correctness_tests.support.sample_records import plain_record
from tinyllama.harness.records import results
from tinyllama.harness.records.entries import KINDS, entry_from_json
from tinyllama.harness.records.results import as_json, from_json


def content(**changed: Any) -> dict[str, Any]:
    return {**as_json(plain_record(entries=[])), **changed}


@pytest.mark.parametrize("name", sorted(content().keys() - {"schema"}))
def test_a_field_of_another_type_is_named(name: str) -> None:
    assert from_json(content()) == plain_record(entries=[])
    with pytest.raises(ValueError, match=rf"^{name} is None, not of type \w+$"):
        from_json(content(**{name: None}))
    with pytest.raises(ValueError, match=f"^fields missing or unknown: {name}$"):
        from_json({key: value for key, value in content().items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"), [("versions", {"torch": "2", "triton": 3}), ("missed", ["a bar", 1])]
)
def test_versions_and_what_was_missed_are_texts(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: each is a text$"):
        from_json(content(**{name: value}))


def test_all_versions_are_said_in_words() -> None:
    record = plain_record(entries=[], versions={"python": "3.12", "torch": "2.11"})
    assert record.software == "python 3.12, torch 2.11"


@pytest.mark.parametrize(
    ("machine", "where"),
    [
        ({"a": 1, "b": {"c": math.nan}}, "machine: b: c is nan"),
        ({"a": ["x", math.inf]}, "machine: a is inf"),
        ({"a": [{"b": (1, b"2")}]}, "machine: a: b is b'2'"),
    ],
)
def test_a_machine_is_told_in_texts_and_finite_numbers(machine: Any, where: str) -> None:
    from_json(content(machine={"a": [1, None, True, "x", {"b": 0.5}]}))
    with pytest.raises(ValueError, match=where):
        from_json(content(machine=machine))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ceiling"])
def test_an_entry_without_what_its_kind_needs_is_told_all_of_it(kind: str) -> None:
    needed = [f.name for f in fields(KINDS[kind]) if f.default is MISSING and f.name != "name"]
    with pytest.raises(ValueError, match=f" has no {', '.join(needed)}$"):
        entry_from_json("e", {"kind": kind, "name": "x"})


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["/somewhere/bin/pytest", "perf_tests", "-k", "a b"], "pytest perf_tests -k 'a b'"),
        (["/somewhere/tinyllama/__main__.py", "bench"], "tinyllama bench"),
        (["pytest", "--results-dir", "/a b/c", "-x"], "pytest -x"),
        (["pytest", "--results-dir=/a", "-x"], "pytest -x"),
    ],
)
def test_a_command_is_told_without_folders_of_a_machine(
    given: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", given)
    assert results._command() == command


@pytest.mark.parametrize("there", [False, True])
def test_the_version_of_triton_is_told_where_it_is(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None)
    module = type(sys)("triton")
    module.__version__ = "3.x"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    assert results.versions().get("triton") == ("3.x" if there else None)
