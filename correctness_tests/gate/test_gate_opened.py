"""What a process opens, loads and starts, as Python's audit hooks tell it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from correctness_tests.support.tried import FP32, MATRIX, small
from tinyllama.harness import Case, Provider
from tinyllama.harness.gate import events, opened
from tinyllama.ops import OPS


@pytest.mark.parametrize("searches", [False, True])
def test_each_event_is_noted_by_its_kind(searches: bool) -> None:
    """Paths of each type, and none of a file that is open."""
    noted: list[tuple[str, str]] = []
    to: Any = SimpleNamespace(
        files=set(),
        native=[],
        _is_search=lambda: searches,
        _is_apart=lambda name: name == "/own/lib.so",
        _foreign=lambda file, reason: noted.append((file, reason)),
        _by_itself=lambda reason: noted.append(("", reason)),
    )
    given: tuple[tuple[Any, ...], ...] = (
        *(("open", name) for name in ("/a/one", b"/a/two", Path("/a/three"), 7)),
        ("sqlite3.connect", "/a/four"),
        *(("os.listdir", "/a/five"), ("os.scandir", None)),
        ("os.remove", "/a/six"),
        *(("import", "name", file) for file in (None, "/a/x.so")),
        *(("ctypes.dlopen", name) for name in ("libc.so", "/own/lib.so")),
        *((one,) for one in sorted(events._PROGRAMS)),
        ("os.putenv", "a", "b"),
    )
    for event, *args in given:
        events.Events._event(to, event, tuple(args))
    listed = set() if searches else {"/a/five", os.getcwd()}
    assert to.files == {"/a/one", "/a/two", "/a/three", "/a/four"} | listed
    assert to.native == ["it loads the library /own/lib.so"]
    assert noted == [
        ("/a/x.so", "it loads /a/x.so"),
        ("", "it loads the library libc.so"),
        *(("", f"it starts a process ({one})") for one in sorted(events._PROGRAMS)),
    ]


@pytest.mark.parametrize("between", [(), ("/standard/pathlib.py",), ("/standard/a.py", "<b>")])
@pytest.mark.parametrize(("caller", "read"), [("/reader/a.py", set()), ("/own/a.py", {"/x.json"})])
def test_a_file_is_read_as_a_text_by_the_nearest_code_outside_of_the_standard_library(
    caller: str, read: set[str], between: tuple[str, ...]
) -> None:
    """between: the files of code that the caller opens a file through."""
    made = events.Events.__new__(events.Events)
    made.files, made.texts = set(), set()
    made.standard, made.readers = ("/standard/",), ("/reader/",)
    opened: Any = partial(made._event, "open", ("/x.json",))
    for file in (*between, caller):
        space = {"call": opened}
        exec(compile("def through(): call()", file, "exec"), space)
        opened = space["through"]
    opened()
    assert made.texts == read


def test_native_code_of_python_and_of_known_libraries_may_run() -> None:
    noted: list[str] = []
    to: Any = SimpleNamespace(trusted=tuple(events._folders()), native=noted)
    here = Path(torch.__file__).parent
    for file in (here / "_C.so", Path(numpy.__file__).parent / "core/x.so", "/elsewhere/x.so"):
        events.Events._foreign(to, str(file), f"it loads {file}")
    assert noted == ["it loads /elsewhere/x.so"]


def test_modules_that_were_imported_may_hide_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that start processes, then those without source, then what was noted first."""
    modules = {"zz_right": "/a/zz.py", "zz_c": "/a/c.pyc", "zz_b": "/a/b.pyc", "zz_none": None}
    made = events.Events.__new__(events.Events)
    made.known, made.native = set(sys.modules) - {*events._STARTS}, []
    made.known.add("zz_c")

    def load(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=modules.get(name)))

    for name in events._STARTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("zz_right", "zz_c", "zz_none"):
        load(name)
    assert made.unidentified() is None
    made.native += ["it loads one", "it loads two"]
    assert made.unidentified() == "it loads one"
    load("zz_b")
    assert made.unidentified() == "it imports zz_b without source"
    made.known.remove("zz_c")
    load("zz_a")
    assert made.unidentified() == "it imports zz_b without source", "the first by name"
    for name in events._STARTS:
        load(name)
        assert made.unidentified() == "it starts a process (multiprocessing)"
        monkeypatch.delitem(sys.modules, name)


def test_what_is_called_of_a_provider_are_its_passes_or_itself() -> None:
    op = OPS["rms_norm"]
    plain, derived = op.providers["eager"], op.providers["triton"]
    assert opened._called(op, plain)[-1] is plain.call
    own = derived.derived
    assert own is not None
    found = opened._called(op, derived)
    assert found[4:] == [own.forward, own.backward, dict(own.reads), own.saved]


@pytest.mark.parametrize("smallest", [0, 1])
@pytest.mark.parametrize("noted", [True, False])
def test_a_provider_is_called_once_forward_and_backward_on_its_smallest_case(
    noted: bool, smallest: int
) -> None:
    calls: list[Any] = []
    cases = [Case(N=2, D=3), Case(N=5, D=8)]
    op = small("twice", lambda x: 2 * x, {"x": MATRIX}, {"y": "N D"}, cases[:: 1 - 2 * smallest])

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        x.register_hook(lambda gradient: calls.append("backward"))
        return 2 * x

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        calls.append("noting")
        yield
        calls.append("noted")

    executed: Any = SimpleNamespace(noting=noting) if noted else None
    opened._call(op, Provider(op.name, "tried", call, dtypes=FP32), torch.device("cpu"), executed)
    expected = [(2, 3), "backward"]
    assert calls == (["noting", *expected, "noted"] if noted else expected)


@pytest.mark.parametrize(
    ("requires", "on"),
    [((), "cpu"), (("fp32",), "cpu"), (("gpu",), "meta"), (("fp32", "gpu"), "meta")],
)
def test_a_provider_is_called_on_the_device_only_if_a_cpu_lacks_what_it_requires(
    requires: tuple[str, ...], on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        opened,
        "evaluate",
        lambda op, call, inputs, *_, **__: called.append(inputs.args["x"].device.type),
    )
    op = small("twice", lambda x: 2 * x, {"x": MATRIX}, {"y": "N D"})
    provider = Provider(op.name, "tried", lambda x: 2 * x, dtypes=FP32, requires=requires)
    opened._call(op, provider, torch.device("meta"))
    assert called == [on]


def test_a_provider_that_covers_no_case_is_not_called() -> None:
    op = small("twice", lambda x: 2 * x, {"x": MATRIX}, {"y": "N D"})
    nothing = Provider(op.name, "tried", pytest.fail, dtypes=(torch.float64,))
    opened._call(op, nothing, torch.device("cpu"))


def raises() -> None:
    raise OSError("no more files\nby anybody")


@pytest.mark.parametrize(
    ("say", "said", "reason"),
    [
        (lambda: {"a": 1}, {"a": 1}, ""),
        (raises, None, "raised OSError: no more files"),
        (sys.exit, None, "raised SystemExit: "),
        (lambda: os._exit(0), None, "ended the process"),
        (partial(signal.raise_signal, signal.SIGUSR2), None, "ended the process by SIGUSR2"),
        (signal.pause, None, "ended the process by SIGKILL, which it gets after 0 s"),
        (object, None, "raised TypeError: Object of type object is not JSON serializable"),
    ],
    ids=["said", "raised", "exit", "ended", "signal", "late", "no JSON"],
)
def test_a_fork_that_says_nothing_is_told_with_its_reason(
    say: Callable[[], Any], said: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "SECONDS", 0.05 if "SIGKILL" in reason else 60.0)
    fork = opened._Fork(say, tmp_path / "report.json")
    while not fork.ended():
        time.sleep(0.001)
    assert fork.answer() == (said, reason)
    if reason:
        assert opened._read(fork)[0].unidentified == f"its import or a call {reason}"
