"""Functions that the import of a tree puts among those of other libraries are found there."""

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from tinyllama import harness
from tinyllama.harness.gate import placed
from tinyllama.harness.gate.events import HERE
from tinyllama.harness.gate.placed import Spaces
from tinyllama.harness.gate.reach import UnboundedError

ROOT = Path("/tree")
Put = Callable[[Any, Any], object]  # of a module and a function


def function(name: str, file: str = f"{ROOT}/a.py") -> FunctionType:
    space: dict[str, Any] = {}
    exec(compile(f"def {name}(): pass", file, "exec"), space)
    found: FunctionType = space[name]
    return found


def module(name: str, file: str = "/lib/lib.py", **values: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(__file__=file, **values)
    return made


def library(name: str) -> ModuleType:
    """A module with functions of the tree that were there before, as far as is known."""
    old = function("old")
    base = type("Base", (), {"old": [old], "registry": {}})
    return module(name, old=[old], Base=base, nested=([{"old": [old], "more": {}}],), registry={})


class Reached:
    def __init__(self, root: Path, found: FunctionType) -> None:
        assert root == ROOT
        if found.__name__ == "unbounded":
            raise UnboundedError("anything")
        self.places = {found.__name__}


def found(spaces: Spaces) -> Any:
    return spaces.placed(ROOT)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of a process that has imported two libraries."""
    made = {name: library(name) for name in ("first", "last")}
    monkeypatch.setattr(placed, "sys", SimpleNamespace(modules=made))
    monkeypatch.setattr(placed, "Reached", Reached)
    return made


SEEN: dict[str, Put] = {
    "an attribute": lambda lib, new: setattr(lib, "new", new),
    "a method": lambda lib, new: setattr(lib.Base, "new", new),
    "a static method": lambda lib, new: setattr(lib.Base, "new", staticmethod(new)),
    "a method of a class": lambda lib, new: setattr(lib.Base, "new", classmethod(new)),
    "a registry": lambda lib, new: lib.registry.update(new=new),
    "a registry of a class": lambda lib, new: lib.Base.registry.update(new=new),
    "containers that were there": lambda lib, new: lib.nested[0].append(new),
    "three containers": lambda lib, new: lib.registry.update(new=([{"new": new}],)),
    "a set": lambda lib, new: lib.registry.update(new={1, new}),
    "a new class": lambda lib, new: lib.registry.update(new=([type("New", (), {"new": new})],)),
    "three containers of a new class": lambda lib, new: lib.registry.update(
        new=([[type("New", (), {"new": {"new": ([new],)}})]],)
    ),
}
UNSEEN: dict[str, Put] = {
    "four containers": lambda lib, new: lib.registry.update(new=([[[new]]],)),
    "three containers in one that was there": lambda lib, new: lib.nested[0][0]["more"].update(
        new=[new]
    ),
}


@pytest.mark.parametrize("name", ["first", "last"])
@pytest.mark.parametrize("where", [*SEEN, *UNSEEN])
def test_a_function_of_the_tree_is_found_among_those_of_others(
    where: str, name: str, modules: dict[str, Any]
) -> None:
    spaces = Spaces()
    {**SEEN, **UNSEEN}[where](modules[name], function("new"))
    assert found(spaces) == ({"new"} if where in SEEN else set(), {})


@pytest.mark.parametrize(
    ("name", "file", "seen"),
    [
        ("later", "/lib/later.py", True),
        ("later", "", True),
        ("ours", f"{ROOT}/ours.py", False),
        (f"{harness.__name__}.x", "/lib/x.py", False),
        (f"{harness.__name__}s", "/lib/x.py", True),
    ],
)
def test_modules_that_are_imported_later_are_looked_at_unless_they_are_of_the_tree(
    name: str, file: str, seen: bool, modules: dict[str, Any]
) -> None:
    modules["first"].old = function("old")
    spaces = Spaces()
    modules["no module"] = SimpleNamespace(new=function("new"))
    modules[name] = module(name, file, of=[function("new")])
    assert found(spaces) == ({"new"} if seen else set(), {})


@pytest.mark.parametrize("file", ["<string>", f"{HERE}values.py", "/trees/a.py", "/lib/a.py"])
def test_functions_of_others_are_none_of_the_tree(file: str, modules: dict[str, Any]) -> None:
    spaces = Spaces()
    modules["first"].new = [function("new", file), len, None]
    assert found(spaces) == (set(), {})


def test_a_function_that_may_run_anything_is_named(modules: dict[str, Any]) -> None:
    spaces = Spaces()
    modules["first"].new = [function("unbounded"), function("new")]
    assert found(spaces) == ({"new"}, {"function unbounded": "anything"})
