"""The functions that a Python file defines, read without importing it."""

import ast
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError


def definitions(file: Path) -> dict[str, Any]:
    """What a file defines at its top that Python calls: functions that are no kernels, and
    ``name = Class.apply``; the nodes by name.

    Raises UsageError for a file that cannot be read as Python.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{str(file)!r} cannot be read as Python: {error}") from error
    nodes: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                nodes[node.name] = node
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".apply"):
            nodes |= {name.id: node for name in node.targets if isinstance(name, ast.Name)}
    return nodes


def public_functions(file: Path) -> dict[str, Any]:
    """Those of `definitions` whose names do not begin with ``_``."""
    return {name: node for name, node in definitions(file).items() if name[0] != "_"}


def parameters_of(node: Any, *, required: bool = False) -> list[str] | None:
    """The names of a function's parameters; None where they are not known. required: only those
    without defaults."""
    if not isinstance(node, ast.FunctionDef) or node.args.vararg or node.args.kwarg:
        return None
    places = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if required:
        return places[: len(places) - len(node.args.defaults)]
    return places + [argument.arg for argument in node.args.kwonlyargs]
