"""What a process had, changed and opened is told by name."""

import json
import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tinyllama.harness.gate import (
    identity,
    process_state,
    reach,
)
from tinyllama.harness.gate.process_state import changes


def test_what_a_process_had_and_changed_is_told_and_of_what_is_added_what_counts() -> None:
    one, other = len, max
    before = {"torch.a": one, "torch.b": one, "torch.c": one, "setting": "x", "environment A": "1"}
    after = {
        **{"torch.a": one, "torch.b": other, "setting": "y", "environment A": "1"},
        **{"torch.new": other, "environment B": "2", "operator aten.c": "3"},
    }
    same = {"torch.b": "builtins.max", "torch.c": "removed", "setting": "y"}
    added = {"environment B": "2", "operator aten.c": "3"}
    assert changes(before, after) == {**same, **added}
    assert changes(after, {**after}) == {}
    assert changes(before, dict(reversed(after.items()))) == {**same, **added}


CHANGED_CODE = {
    "module.f = len": ["torch.a.f", "torch.a.f, inside"],
    "module.f.__code__ = module.g.__code__": ["torch.a.f, inside"],
    "module.f.__defaults__ = (3,)": ["torch.a.f, inside"],
    "module.f.__kwdefaults__['c'] = 'other'": ["torch.a.f, inside"],
    "module.f.__kwdefaults__ = None": ["torch.a.f, inside"],
    "module.Kind.f = module.g": ["torch.a.Kind.f", "torch.a.Kind.f, inside"],
    "del module.Kind.f": ["torch.a.Kind.f", "torch.a.Kind.f, inside"],
    "module.Kind.shown = property(module.g)": ["torch.a.Kind.shown"],
    "del module.f": ["torch.a.f", "torch.a.f, inside"],
    "module.f = 3": ["torch.a.f", "torch.a.f, inside"],
    "module.Kind = dict": ["torch.a.Kind"],
    "modules['torch.a'] = dict": ["module torch.a"],
    "del modules['torch.a']": ["module torch.a"],
    "module.new = len; module.Kind.new = len": [],
}


@pytest.mark.parametrize("change", CHANGED_CODE)
def test_code_that_is_another_is_found_where_it_was(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torch.a")
    exec(
        "def f(a, b=2, *, c='one'): return a\n"
        "def g(a): return 2\n"
        "class Kind:\n"
        "    def f(self): return 1\n"
        "    shown = property(g)\n"
        "Kind.__module__ = 'torch.a'\n",
        vars(module),
    )
    modules = {"torch.a": module, "torch.b": ModuleType("torch.b"), "other": ModuleType("other")}
    vars(modules["torch.b"])["Alias"] = vars(module)["Kind"]
    made = SimpleNamespace(modules=modules, stdlib_module_names=frozenset())
    monkeypatch.setattr(process_state, "sys", made)
    before = process_state.code()
    assert before.changes() == {}
    exec(change, {"module": module, "modules": modules})
    found = before.changes()
    assert sorted(found) == CHANGED_CODE[change]
    if not change.startswith(("modules", "del modules", "module.Kind = ")):
        assert found == changes(before, process_state.code()), "as by a list of all there is"
    for name, became in found.items():
        removed = change in ("del module.f", "module.f = 3", "del module.Kind.f")
        assert (became == process_state.GONE) >= (removed and "Kind" not in name)


def test_what_a_value_is_of_is_the_package_of_a_module_or_function() -> None:
    bare = eval("lambda: 0", {})  # as of a namespace without a name
    bare.__module__ = None
    values = [json, signal.default_int_handler, json.dumps, json.decoder, bare, 3, "json", Path]
    assert [reach._of_module(value) for value in values] == [
        *("json", "_signal", "json", "json"),
        *("", "", "", ""),
    ]


def test_each_file_of_the_tree_that_a_group_opened_is_named(tmp_path: Path) -> None:
    class Opened(NamedTuple):
        modules: tuple[str, ...]

    def seen(*names: str) -> Any:
        return SimpleNamespace(files=[str(tmp_path / name) for name in names], imported=[])

    groups = {Opened(("a",)): seen("one.py", "two.py"), Opened(("b",)): seen("../away", "three.py")}
    tree: Any = SimpleNamespace(name="base", root=tmp_path)
    sources: Any = None
    side = identity._Side(tree, sources, groups)  # type: ignore[arg-type]
    assert side.files(["a"], every=False) == {"one.py", "two.py"}
    assert side.files(["b"], every=False) == {"three.py"}
    assert side.files(["b"], every=True) == {"one.py", "two.py", "three.py"}
