"""Imports run one way, as docs/design.md says, without circles; nothing imports a test."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tinyllama
from correctness_tests.support.commands import python
from tinyllama.ops import OPS

pytestmark = pytest.mark.quick

ROOT = Path(tinyllama.__file__).parents[1]
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
# Each folder of the package may import those before it.
(ABOVE,) = re.findall("^above it: +(.+) <- perf_tests$", DESIGN, re.M)
PACKAGE = ABOVE.split(" <- ")
BASE = ("machine",)
CORE = (*BASE, "kernels", "declare", "check")
HARNESS = {  # what each folder may import beside itself
    "machine": (),
    "kernels": BASE,
    "declare": (*BASE, "kernels"),
    "check": CORE,
    "records": BASE,
    "measure": (*CORE, "records"),
    "gate": (*CORE, "records", "measure"),
    "report": (*BASE, "records", "gate"),
    "plugins": (*CORE, "records", "measure", "gate", "report"),
}
LAZY = ("harness", "model")  # they load what they hand on when it is asked for
PUBLIC = {"tinyllama", "tinyllama.harness", "tinyllama.harness.values", "tinyllama.__main__"}


@cache
def modules() -> dict[str, Path]:
    """Every Python file of the project, by module."""
    files = [ROOT / "conftest.py"]
    for folder in ("tinyllama", "perf_tests", "correctness_tests", "tools", "field"):
        files += sorted((ROOT / folder).rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return dict(zip((name.removesuffix(".__init__") for name in names), files, strict=True))


@cache
def imported(name: str) -> frozenset[str]:
    """The project's modules that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in modules() else str(node.module))
    return frozenset(names & modules().keys())


def allowed(name: str) -> set[str]:
    """The folders that a module of the package may import, as ``harness.machine`` or ``ops``."""
    top, *rest = name.split(".")[1:]
    if top != "harness":
        below = PACKAGE[: PACKAGE.index(top) + 1]
        return {*below[1:], *(f"harness.{room}" for room in HARNESS)}
    room = rest[0]
    assert room in HARNESS, f"{name} has no place in the order of imports: give it one"
    return {f"harness.{lower}" for lower in (room, *HARNESS[room])}


def folder(name: str) -> str:
    top, *rest = name.split(".")[1:]
    return f"harness.{rest[0]}" if top == "harness" else top


def packaged() -> list[str]:
    return [name for name in modules() if name.startswith("tinyllama") and name not in PUBLIC]


def test_a_folder_imports_only_what_lies_below() -> None:
    wrong = {
        f"{name} imports {module}, which lies above it"
        for name in packaged()
        for module in imported(name) - PUBLIC
        if folder(module) not in allowed(name)
    }
    assert not wrong


@pytest.mark.long
def test_there_are_no_circles() -> None:
    """A package's ``__init__`` hands names on, and is no file of the circle."""
    graph = {name: imported(name) - PUBLIC for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(error.args[1])}") from None


def test_nothing_imports_a_test() -> None:
    for name in modules():
        tests = {
            module for module in imported(name) if module.rpartition(".")[2].startswith("test_")
        }
        assert not tests, f"{name} imports {', '.join(tests)}: move what is shared into support"


def words(path: Path) -> Iterator[str]:
    """The strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


GENERAL = {"attention", "linear", "transpose"}  # kinds of work, and words of torch, too


@pytest.mark.long
def test_the_harness_names_no_op_no_tier_and_no_layer_above() -> None:
    above = tuple(f"tinyllama.{name}." for name in PACKAGE[2:])
    names = {*OPS.keys() - GENERAL, "v1", "v2", "v3", "v4"}
    for name in packaged():
        if name.startswith("tinyllama.harness."):
            for word in words(modules()[name]):
                assert word not in names, f"{name} knows {word!r} by name: make it a trait or data"
                assert not word.startswith((*above, "perf_tests")), f"{name} names {word!r}"


def loaded_by(statement: str) -> list[str]:
    """What a statement prints, and the modules that it loads of this package and of torch's
    compiler."""
    loaded = "m for m in sys.modules if m.startswith(('tiny', 'torch._dynamo'))"
    code = f"{statement}; import sys; print(*({loaded}))"
    return python("-c", code, cwd=ROOT, check=True).stdout.split()


@pytest.mark.long
def test_the_harness_loads_no_model() -> None:
    rooms = "tinyllama.harness, tinyllama.harness.plugins.suite, tinyllama.harness.check.cases"
    statement = "with tinyllama.harness.check.guards.PoisonedMemory(): print(torch.empty(1).item())"
    nan, *modules = loaded_by(f"import torch, {rooms}\n{statement}\n1")
    loaded = set(modules)
    assert nan == "nan"
    assert "tinyllama.harness.declare.op" in loaded
    assert "torch._dynamo" not in loaded, "a dispatch mode loads the compiler, 0.7 s a process"
    assert not {name for name in loaded - PUBLIC if not name.startswith("tinyllama.harness")}


@pytest.mark.parametrize("names", [["tinyllama"], *(["tinyllama", f"tinyllama.{n}"] for n in LAZY)])
def test_the_packages_themselves_load_nothing(names: list[str]) -> None:
    assert loaded_by(f"import {names[-1]}") == names
