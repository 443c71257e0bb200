"""Imports run one way: harness <- ops <- model <- training <- bench <- cli."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tinyllama

ROOT = Path(tinyllama.__file__).parent

LAYERS = [
    {"__init__", "harness"},
    {"ops"},
    {"model"},
    {"training"},
    {"bench"},
    {"cli"},
    {"__main__"},
]


def layer(module: str) -> int:
    part = module.split(".")[1] if "." in module else "__init__"
    for level, names in enumerate(LAYERS):
        if part in names:
            return level
    raise AssertionError(f"{module} has no place in the order of imports: give it one")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_what_lies_below(path: Path) -> None:
    name = ".".join(("tinyllama", *path.relative_to(ROOT).with_suffix("").parts))
    own = layer(name.removesuffix(".__init__"))
    for node in ast.walk(ast.parse(path.read_text())):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            imported = [node.module]
        for target in imported:
            if target.startswith("tinyllama."):
                assert layer(target) <= own, f"{name} imports {target}, which lies above it"


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*(m for m in sys.modules if m.startswith('tiny')))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    return set(run.stdout.split())


def test_the_harness_loads_no_model() -> None:
    loaded = loaded_by(
        "import tinyllama.harness, tinyllama.harness.plugins.suite, tinyllama.harness.correct.cases"
    )
    assert "tinyllama.harness.declare.op" in loaded
    above = {name for name in loaded if layer(name) > 0}
    assert not above


def test_the_package_itself_loads_nothing() -> None:
    assert loaded_by("import tinyllama") == {"tinyllama"}
