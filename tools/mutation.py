"""Changes of a kernel's function in one place: operators, numbers, masks and functions called."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
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


def changes(node: ast.AST) -> Iterator[Callable[[Any], ast.AST]]:
    """Functions that change a copy of a node."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        yield lambda new: _set(new, op=SWAPPED[type(new.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield lambda new: _set(new, ops=[SWAPPED[type(new.ops[0])]()])
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda new: _set(new, value=new.value + 1)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called in CALLS:
            yield lambda new: _set(new, func=_set(new.func, attr=CALLS[called]))
        if called == "where":
            yield lambda new: _set(new, args=[new.args[0], new.args[2], new.args[1]])
        if any(word.arg == "mask" for word in node.keywords):
            kept = [word for word in node.keywords if word.arg not in ("mask", "other")]
            yield lambda new: _set(new, keywords=kept)


def _set(node: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def mutants_of(kernel: Kernel) -> list[Mutant]:
    """Every change of a function's body; its signature and docstring stay."""
    first = kernel.fn.__code__.co_firstlineno
    tree = ast.parse(kernel.src)  # from its `def` on, without decorators
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    found = []
    for statement, place in _places(function.body):
        for change in changes(place):
            new, old = change(copy.deepcopy(place)), copy.deepcopy(place)
            text = f"{ast.unparse(old)} -> {ast.unparse(new)}"
            replace = _Replace(place, new)
            gives = ast.unparse(replace.visit(_copy_but(statement, place))).partition("\n")[0]
            source = ast.unparse(replace.visit(_copy_but(tree, place)))
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


def _copy_but(tree: ast.AST, place: ast.AST) -> ast.AST:
    """A copy of a tree that shares one node with it, so that the node can be found."""
    return copy.deepcopy(tree, {id(place): place})


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)
