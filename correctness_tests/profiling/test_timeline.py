"""The picture of a trace: what runs when, and nothing drawn twice."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tinyllama.profiling import chrome
from tinyllama.profiling.kernels import Dispatch
from tinyllama.profiling.timeline import FINEST, bars, first_step, picture


def event(name: str, start: float, length: float, **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": 1, **more}


def test_operators_are_cut_where_they_call_others(tmp_path: Path) -> None:
    events = [
        event("outer", 0, 10),
        event("aten::mm", 2, 3),
        event("inner", 3, 1),
        event("aten::mul", 5, 5),
        event("next", 20, 4),
        event("other thread", 1, 30, tid=2),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events[::-1]}))
    found = chrome.read(path, inner=True).dispatches
    assert [(one.name, one.start_ns, one.end_ns) for one in found if one.stream == 1] == [
        ("outer", 0, 2000),
        ("aten::mm", 2000, 3000),
        ("inner", 3000, 4000),
        ("aten::mm", 4000, 5000),
        ("aten::mul", 5000, 10000),
        ("next", 20000, 24000),
    ]
    assert [one.name for one in found if one.stream == 2] == ["other thread"]


def test_kernels_of_a_gpu_are_drawn_as_they_are(tmp_path: Path) -> None:
    kernels = [event("gemm", 5, 2, cat="kernel", args={"stream": 7}), event("outer", 0, 10)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": kernels}))
    assert chrome.read(path, inner=True) == chrome.read(path)


def test_what_lies_close_together_is_one_bar_of_its_kind_and_stream() -> None:
    whole = 1000 * FINEST
    found = bars(
        [
            Dispatch("gemm", 100, 500, 7),
            Dispatch("gemm", 600, 900, 7),
            Dispatch("norm_kernel", 700, 800, 7),
            Dispatch("gemm", 9000, 9100, 8),
            Dispatch("gemm", 90_000, 100 + whole, 7),
        ]
    )
    assert found[7, "products"][0] == (0.0, 1.0), "from 0 to 0.8, and as wide as can be seen"
    assert [start for start, _ in found[7, "products"]] == pytest.approx([0.0, 89.9])
    ((start, length),) = found[7, "elementwise"]
    assert start == pytest.approx(0.6)
    assert length == 1.0
    assert list(found) == [(7, "products"), (7, "elementwise"), (8, "products")]


def test_the_picture_names_streams_and_kinds_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra 'report' is not installed")
    launches = [Dispatch("gemm", 0, 500, 7), Dispatch("Memcpy DtoD", 400, 900, 20)]
    picture(launches, tmp_path / "a.svg")
    picture(launches, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in ("stream 1", "stream 2", "products", "copies", "microseconds"):
        assert word in text
    assert "elementwise" not in text
    assert text == (tmp_path / "b.svg").read_text()


def test_one_step_of_several_is_drawn() -> None:
    launches = [
        Dispatch(name, start, start + 5)
        for name, start in zip("dacb", (60, 0, 50, 10), strict=True)
    ]
    assert [one.name for one in first_step(launches, 2)] == ["a", "b"]
