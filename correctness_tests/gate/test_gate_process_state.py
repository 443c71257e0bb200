"""What a process is seen to have, part by part, in this process and in ones that are made up."""

import functools
import gc
import os
import resource
import signal
import sys
import threading
import tracemalloc
import types
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tinyllama.harness.gate import process_state as state


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snapshots see in place of ``sys.modules``."""
    modules: dict[str, Any] = {}
    made = SimpleNamespace(modules=modules, stdlib_module_names=frozenset({"json", "os"}))
    monkeypatch.setattr(state, "sys", made)
    return modules


NAMES = {
    **dict.fromkeys(("torch", "torch.nn", "triton.language", "numpy", "tinyllama.harness.a"), True),
    **dict.fromkeys(("torchvision", "tinyllama", "tinyllama.ops", "tinyllama.harnessed"), False),
}


def test_the_harness_and_what_it_rests_on_are_watched_and_pythons_own_modules(
    loaded: dict[str, Any],
) -> None:
    loaded.update({name: module(name) for name in (*NAMES, "json.decoder", "os", "ops", "json_")})
    loaded["torch.gone"] = None  # as Python notes a module that must not be imported
    watched = {name for name, expected in NAMES.items() if expected}
    assert state.loaded() == watched | {"torch.gone"}
    assert set(state.code()) == {f"module {name}" for name in (*watched, "json.decoder", "os")}


def plain(a: int, b: int = 1, *, c: int = 2) -> int:
    return a + b + c


def test_functions_and_classes_are_snapped_with_all_inside(loaded: dict[str, Any]) -> None:
    class Own:
        value = 3
        shown = property(plain)
        made: Any = classmethod(lambda cls: cls)
        fixed = staticmethod(plain)

        def method(self) -> None:
            pass

    class Other(Own):
        def hidden(self) -> None:
            pass

    class Foreign(Own):
        def hidden(self) -> None:
            pass

    Own.__module__, Own.__qualname__ = "json.inner", "Own"  # of Python: where it is made, once
    Other.__module__, Other.__qualname__ = "torch.deep", "Other"
    Foreign.__module__ = "elsewhere"
    Own.last = lambda self: None  # type: ignore[attr-defined]
    of_torch = {"plain": plain, "three": 3, "text": "x", "Other": Other, "Foreign": Foreign}
    loaded["torch.a"] = module("torch.a", **of_torch, Own=Own)
    loaded["json.inner"] = module("json.inner", Own=Own, partial=functools.partial(plain))
    found = state.code()
    assert found["torch.a.Foreign"] is Foreign
    assert not any("hidden" in name for name in found if "torch.deep" not in name)
    members = ("value", "shown", "made", "fixed", "method", "last")
    seen = {
        name for name in found if name.startswith("json.inner.Own.") and not name.endswith("__")
    }
    told = {f"json.inner.Own.{name}" for name in members[1:]}
    assert seen == told | {f"json.inner.Own.{name}, inside" for name in ("method", "last")}
    assert found["torch.deep.Other.hidden"] is Other.hidden
    assert found["torch.a.Own"] is found["json.inner.Own"] is Own
    assert found["torch.a.plain"] is plain
    assert {"torch.a.three", "torch.a.text"}.isdisjoint(found)
    assert "json.inner.partial" in found
    assert "json.inner.partial, inside" not in found, "it is no function of Python's"
    inside = found["torch.a.plain, inside"]
    assert inside == state.Inside(plain.__code__, (1,), (("c", id(2)),))
    assert state._shown(inside) == "plain"


@pytest.mark.parametrize("what", ["code", "defaults", "keywords"])
def test_a_function_that_stays_may_run_something_else(what: str) -> None:
    def one(a: int, b: int = 1, *, c: int = 2) -> int:
        return a

    before = state._function("f", one)
    assert state.changes(before, state._function("f", one)) == {}
    if what == "code":
        one.__code__ = plain.__code__
    elif what == "defaults":
        one.__defaults__ = (7,)
    else:
        one.__kwdefaults__ = {"c": 7}
    assert list(state.changes(before, state._function("f", one))) == ["f, inside"]
    texts = [{"a setting": "".join(["th", "ree"])} for _ in range(2)]
    assert state.changes(*texts) == {}, "each is made anew"
    assert state.changes(before, {"f": one, "f, inside": "gone"}) == {"f, inside": "gone"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("text", "text"),
        (plain, f"{__name__}.plain"),
        (dict, "builtins.dict"),
        (torch.nn.ReLU(), "torch.nn.modules.activation.ReLU"),
        (SimpleNamespace(__module__="a", __qualname__="b"), "a.b"),
    ],
)
def test_what_is_shown_names_no_address(value: Any, shown: str) -> None:
    assert state._shown(value) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (None, "None"),
        ([1, "a"], '[1, "a"]'),
        ({"b": (1,)}, '{"b": [1]}'),
        ({"b", "a"}, '["a", "b"]'),
        ([plain], "list"),
    ],
)
def test_plain_values_of_a_configuration_are_texts(value: Any, text: str) -> None:
    assert state._plain(value) == text


def test_what_torch_lacks_says_nothing_and_what_raises_its_error() -> None:
    def wrong(error: type[Exception]) -> None:
        raise error

    assert state._told(None) == ""
    assert state._told(lambda: 0) == "0"
    for error in (AttributeError, RuntimeError, TypeError):
        assert state._told(functools.partial(wrong, error)) == error.__name__
    with pytest.raises(KeyError):
        state._told(functools.partial(wrong, KeyError))


def test_what_runs_in_the_place_of_something_is_told(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> dict[str, str]:
        return dict(state._hooks())

    monkeypatch.setattr(torch.nn.modules.module, "_global_last", {}, raising=False)
    before = now()
    assert (before["decompositions"], before["stance of the compiler"]) == ("", "")
    loaded["torch._decomp"] = module("torch._decomp", decomposition_table={"a": 1, "b": 2})
    stance = SimpleNamespace(stance="force_eager")
    loaded["torch._dynamo.eval_frame"] = module("torch._dynamo.eval_frame", _stance=stance)
    global_forward = "_global_forward_hooks_always_called"
    monkeypatch.setitem(getattr(torch.nn.modules.module, global_forward), 1, True)
    monkeypatch.setattr(torch.nn.modules.module, "_global_last", {1: 1, 2: 2})
    with (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
        monkeypatch.context() as other,
    ):
        other.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        other.setattr(torch.autograd, "_profiler_enabled", lambda: True, raising=False)
        after = now()
    assert before.keys() == after.keys()
    assert {name: text for name, text in after.items() if text != before[name]} == {
        f"torch.nn.modules.module.{global_forward}": "1",
        "torch.nn.modules.module._global_last": "2",
        "hooks of saved tensors": "False",
        "the profiler": "True",
        "what fills memory": "False",
        "decompositions": "2",
        "stance of the compiler": "force_eager",
    }
    del loaded["torch._dynamo.eval_frame"]._stance
    assert now()["stance of the compiler"] == ""


class Flags(types.ModuleType):
    """As torch's: of the type, and one that raises."""

    on_type = 0.5

    @property
    def lacking(self) -> bool:
        raise RuntimeError("not built")


def test_flags_and_configurations_of_modules_are_told(loaded: dict[str, Any]) -> None:
    flags = Flags("torch.backends.a")
    many = {f"n{number}": number for number in range(2000)}  # they come in no order
    vars(flags).update(yes=True, three=3, text="x", _own=True, made=len, **many)
    loaded["torch.backendsb"] = module("torch.backendsb", yes=True)
    loaded["torch.backends.a"] = flags
    found = dict(state._backends())
    own = {name: text for name, text in found.items() if name.startswith("torch.backends.a.")}
    expected = {"yes": "True", "three": "3", "text": "x", "on_type": "0.5"}
    expected |= {name: str(number) for name, number in many.items()}
    assert own == {f"torch.backends.a.{name}": text for name, text in expected.items()}
    assert not any(name.startswith("torch.backendsb") for name in found)
    cuda = {name for name in found if name.startswith("torch.backends.cuda.")}
    asked = {*(f"{n}()" for n in state._OF_CUDA), *(f"matmul.{n}" for n in state._OF_PRODUCTS)}
    assert cuda == {f"torch.backends.cuda.{name}" for name in asked}

    class Config(types.ModuleType):
        def get_config_copy(self) -> dict[str, Any]:
            return {"deep.a": 1, "none": None, "made": len, "names": {"b", "a"}}

    loaded.update({name: Config(name) for name in ("other.config", "torch._own.config")})
    assert dict(state._configurations()) == {
        "torch._own.config.deep.a": "1",
        "torch._own.config.none": "None",
        "torch._own.config.names": '["a", "b"]',
    }


class Posed:
    """A module of which some functions are others."""

    def __init__(self, real: types.ModuleType, **others: Any) -> None:
        self._real = real
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


TOOLS = ["debugger", *[None] * 4, "last"]
PROCESS: list[tuple[types.ModuleType, str, Any, str, str]] = [
    (sys, "gettrace", lambda: print, "tracing", "(False, True, [])"),
    (threading, "gettrace", lambda: print, "tracing", "(True, False, [])"),
    (sys, "monitoring", SimpleNamespace(get_tool=TOOLS.__getitem__), "tracing", f"{TOOLS}"),
    (sys, "getprofile", lambda: print, "profiling", "(False, True)"),
    (threading, "getprofile", lambda: print, "profiling", "(True, False)"),
    (sys, "getswitchinterval", lambda: 7, "switch interval, recursion", "(7, 1)"),
    (sys, "path_hooks", [len], "import hooks", "builtins.abs, builtins.len"),
    (threading, "enumerate", lambda: "abc", state.THREADS, "3"),
    (os, "getpriority", lambda which, who: (which, who, 5), "priority", "((0, 0, 5), 0)"),
    (os, "sched_getscheduler", lambda who: (who, 3), "priority", "(0, 3))"),
    (os, "sched_getaffinity", lambda who: {3, who}, "processors", "[0, 3]"),
    (signal, "getitimer", lambda which: (which, 10 * which), "timers", "[0, 10, 20]"),
    (signal, "getsignal", lambda one: print, "signals", "[(1, 'builtins.print'), (2, 'builtins"),
    (resource, "getrlimit", lambda which: which, "limits", str(state._LIMITS)),
    (gc, "callbacks", [1, 2], "calls of the garbage collector", "2"),
    (tracemalloc, "is_tracing", lambda: True, "traced memory", "True"),
    (numpy, "getbufsize", lambda: 77, "errors of numpy", "77)"),
]


@pytest.mark.parametrize("row", range(len(PROCESS)))
def test_what_a_process_has_is_told_apart(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"gettrace": lambda: None, "getprofile": lambda: None}
    own = {"getrecursionlimit": lambda: 1, "meta_path": [abs], "path_hooks": [], "monitoring": None}
    signals = {"valid_signals": lambda: [1, 2], "getsignal": str, "getitimer": lambda one: (0, 0)}
    made: dict[types.ModuleType, Posed] = {
        sys: Posed(sys, **usual, **own),
        threading: Posed(threading, **usual),
        signal: Posed(signal, **signals),
        gc: Posed(gc, get_freeze_count=lambda: 0),  # conftest freezes objects, which may end here
    }
    which, name, value, key, text = PROCESS[row]
    for one in {*made, which}:
        made.setdefault(one, Posed(one))
        monkeypatch.setattr(state, one.__name__, made[one])
    before = state.process()
    vars(made[which])[name] = value
    after = state.process()
    assert [one for one in after if after[one] != before[one]] == [key]
    assert text in after[key]
    if key == "signals":
        assert after[key].count("builtins.print") == 2


def test_every_limit_of_a_process_is_read() -> None:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    assert set(state._LIMITS) == {getattr(resource, name) for name in names}


def test_settings_name_what_an_import_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = dict.fromkeys(("aten/mul/CPU", "own/mul/CPU", "prims/abs/CPU"))
    monkeypatch.setattr(torch.library, "_impls", replaced)
    monkeypatch.setenv("ZZ_LAST", "1")
    found = state.settings()
    once = {"multithreaded backward", state.GENERATOR, state.THREADS, "the profiler"}
    once |= {"_len_torch_function_stack", "_len_torch_dispatch_stack"}
    devices = {f"autocast{of} of {on}" for of in ("", " dtype") for on in ("cpu", "cuda")}
    asked = {f"torch.{name}()" for name in state._GETTERS}
    assert once | devices | asked | {f"environment {name}" for name in os.environ} <= set(found)
    assert {name for name in found if name.startswith("operator ")} == {
        "operator aten/mul/CPU",
        "operator prims/abs/CPU",
    }
    assert found["denormals"] == "2e-310"
    with torch.autocast("cpu", torch.float16):
        other = state.settings()
    apart = {name for name in found if found[name] != other[name]}
    assert {"autocast of cpu", "autocast dtype of cpu"} <= apart
