"""Changes of a kernel's function in one place: operators, numbers, masks and functions called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyllama.harness.kernels.launch import Kernel, identity

SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.BitAnd: ast.BitOr,
    ast.USub: ast.UAdd,
}
CALLS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "exp": "exp2", "exp2": "exp"}


@dataclass(frozen=True)
class Mutant:
    """One change. line: in the kernel's file; text: the change, as "old -> new"; gives: the changed
    line, which tells the change from the same one elsewhere."""

    kernel: str
    line: int
    text: str
    gives: str
    source: str

    @property
    def name(self) -> tuple[str, str]:
        return self.kernel, self.gives


def changes(node: ast.AST) -> Iterator[dict[str, Any]]:
    """The fields of a node that each change replaces."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        yield {"op": SWAPPED[type(node.op)]()}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield {"ops": [SWAPPED[type(node.ops[0])]()]}
    if isinstance(node, ast.Constant):
        value: Any = node.value
        if type(value) in (int, float):
            yield {"value": value + 1}
    if isinstance(node, ast.Call):
        if isinstance(called := node.func, ast.Attribute):
            if called.attr in CALLS:
                yield {"func": ast.Attribute(called.value, CALLS[called.attr])}
            if called.attr == "where":
                yield {"args": [node.args[0], node.args[2], node.args[1]]}
        if any(word.arg == "mask" for word in node.keywords):
            kept = [word for word in node.keywords if word.arg not in ("mask", "other")]
            yield {"keywords": kept}


def mutants_of(kernel: Kernel) -> list[Mutant]:
    """Every change of a function's body; its signature and docstring stay."""
    first = kernel.fn.__code__.co_firstlineno
    tree = ast.parse(kernel.src)  # from its `def` on, without decorators
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    found = []
    for statement, place in _places(function.body):
        for change in changes(place):
            old, before = ast.unparse(place), dict(vars(place))
            vars(place).update(change)
            text = f"{old} -> {ast.unparse(place)}"
            gives, source = ast.unparse(statement).partition("\n")[0], ast.unparse(tree)
            vars(place).update(before)
            line = first + getattr(place, "lineno", 1)
            found.append(Mutant(identity(kernel), line, text, gives, source))
    return found


def _places(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """The nodes that may be changed, each with its statement, in the order of the source."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        own: list[ast.AST] = [statement]
        while own:
            place = own.pop()
            yield statement, place
            own += [n for n in ast.iter_child_nodes(place) if not isinstance(n, ast.stmt)]
        for block in ("body", "orelse"):
            yield from _places(getattr(statement, block, []))
