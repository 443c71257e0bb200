"""Changes of a function or a module in one place.

Operators, numbers and comparisons change in both. A kernel's masks, calls and ranges change, and
one of its arguments is read as another of its kind. In a module conditions are negated, calls
are dropped, sequences lose their last element, a parameter is read as another of its type, and
a setting as its default.
"""

import ast
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
OF_MODULES: dict[type, type] = {
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "exp": "exp2", "exp2": "exp"}
LOWEST = -10.0  # that the clamped argument of an exponential may be

Alike = Mapping[str, str]  # a name, and another of its kind
Rule = Callable[[ast.AST, ast.AST, Alike], Iterator[ast.AST]]  # of a node, its parent and names


@dataclass(frozen=True)
class Change:
    """One node of a source text replaced.

    function: the one that it is in, if any; statement: the one that it is in; new: the code in the
    node's stead.
    """

    original: str
    function: "Function | None"
    statement: ast.stmt
    node: ast.expr | ast.stmt
    new: ast.AST

    @property
    def place(self) -> str:
        return self.function.name if self.function else ""

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def text(self) -> str:
        """The change, as "old -> new"."""
        return f"{self._said(self.node)} -> {self._said(self.new)}".replace("\n", " ")

    @property
    def source(self) -> str:
        """The whole text, changed; its other lines have the numbers that they had."""
        lines = self.original.encode().splitlines(keepends=True)
        last = (self.node.end_lineno or self.node.lineno) - 1
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.node.col_offset]
        tail = lines[last][self.node.end_col_offset :] + b"".join(lines[last + 1 :])
        new = ast.unparse(self.new)
        new += "\n" * (last + 1 - self.line - new.count("\n"))
        if isinstance(self.node, ast.expr):
            new = f"({new})"  # it binds as the node did
        return (head + new.encode() + tail).decode()

    @functools.cached_property
    def gives(self) -> str:
        """The changed line, which tells the change from the same one elsewhere; of a call that is
        dropped, which call it was."""
        if isinstance(self.new, ast.Pass):
            return f"pass  # {self._said(self.node)}".partition("\n")[0]
        own = self.statement
        for block in ("body", "orelse", "finalbody"):  # their first lines are not asked for
            if hasattr(own, block):
                own = _with(own, **{block: [ast.Pass()] if block == "body" else []})
        if hasattr(own, "handlers"):
            own = _with(own, handlers=[ast.ExceptHandler(None, None, [ast.Pass()])])
        changed = self.new if self.node is self.statement else _replaced(own, self.node, self.new)
        return self._said(changed).partition("\n")[0]

    def _said(self, tree: Any) -> str:
        """The code of a tree, with formatted strings as they are written: how they are unparsed
        depends on the version of Python."""
        if any(isinstance(node, ast.JoinedStr) for node in ast.walk(tree)):
            tree = _AsWritten(self.original).visit(copy.deepcopy(tree))
        return ast.unparse(tree)


class _AsWritten(ast.NodeTransformer):
    def __init__(self, source: str) -> None:
        self.source = source

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Name:
        written = ast.get_source_segment(self.source, node) or ""
        return ast.Name(" ".join(written.split()))


@dataclass(frozen=True)
class Mutant:
    """A change of a kernel's function. line: in the kernel's file."""

    kernel: str
    line: int
    text: str
    gives: str
    source: str

    @property
    def name(self) -> tuple[str, str]:
        return self.kernel, self.gives


def mutants_of(kernel: Kernel) -> list[Mutant]:
    """Every change of a function's body; its signature and docstring stay."""
    first = kernel.fn.__code__.co_firstlineno
    found = _changes(kernel.src, _of_kernels)  # from its `def` on, without decorators
    return [
        Mutant(identity(kernel), first + one.line, one.text, one.gives, one.source) for one in found
    ]


def changes_of(source: str, settings: Mapping[str, Any]) -> list[Change]:
    """Every change of a module's statements. settings: the defaults of the attributes that one may
    be forgotten of."""
    return _changes(source, functools.partial(_of_modules, settings))


def defaults(sources: Iterable[str]) -> dict[str, Any]:
    """The numbers that the fields of classes have by default, by the field's name."""
    return {
        field.target.id: field.value.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.value, ast.Constant)
        and type(field.value.value) in (int, float)
    }


# -- where ----------------------------------------------------------------------------------------


def _changes(source: str, rule: Rule) -> list[Change]:
    found = []
    for function, statement in _statements(ast.parse(source).body):
        alike = _alike(function) if function else {}
        for node, parent in _places(statement):
            new = [*_operators(node), *rule(node, parent, alike)]
            found += [Change(source, function, statement, node, one) for one in new]
    return found


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _statements(
    body: list[ast.stmt], inside: Function | None = None
) -> Iterator[tuple[Function | None, ast.stmt]]:
    """The statements that may be changed, in the order of the source, and their functions."""
    for statement in body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or isinstance(statement, (ast.Import, ast.ImportFrom, ast.Raise)):
            continue
        function = statement if isinstance(statement, Function) else inside
        if not isinstance(statement, (Function, ast.ClassDef)):
            yield inside, statement
        for block in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, block, []), function)
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body, function)


def _places(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """The nodes of a statement, without those of the statements in it, and their parents."""
    yield statement, statement
    own: list[ast.AST] = [statement]
    while own:
        parent = own.pop()
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns"):
                continue
            for node in value if isinstance(value, list) else [value]:
                if not isinstance(node, ast.AST) or isinstance(node, (ast.stmt, ast.JoinedStr)):
                    continue  # a text's parts have no place of their own before Python 3.12
                own.append(node)
                if isinstance(node, ast.expr):
                    yield node, parent


def _alike(function: Function) -> dict[str, str]:
    """For each parameter the next one of its kind: of the same type, or where none is stated, of
    the same kind of name (a stride, a size in capitals, or else)."""
    arguments = function.args
    kinds: dict[tuple[str, ...], list[str]] = {}
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        stated = ast.unparse(one.annotation) if one.annotation else ""
        kind = (stated, "stride" if "stride" in one.arg else "", str(one.arg.isupper()))
        if one.arg != "self":
            kinds.setdefault(kind, []).append(one.arg)
    return {
        name: names[(place + 1) % len(names)]
        for names in kinds.values()
        if len(names) > 1
        for place, name in enumerate(names)
    }


# -- what -----------------------------------------------------------------------------------------


def _with(node: ast.AST, **fields: Any) -> Any:
    """A copy of a node with other fields."""
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _replaced(tree: Any, node: ast.AST, new: ast.AST) -> Any:
    """A copy of a tree with another node in the place of one."""
    if tree is node:
        return new
    if isinstance(tree, list):
        return [_replaced(one, node, new) for one in tree]
    if not isinstance(tree, ast.AST):
        return tree
    return _with(tree, **{name: _replaced(one, node, new) for name, one in ast.iter_fields(tree)})


def _swapped(node: ast.AST, operators: Mapping[type, type]) -> Iterator[ast.AST]:
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign, ast.BoolOp)):
        if type(node.op) in operators:
            yield _with(node, op=operators[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in operators:
        yield _with(node, ops=[operators[type(node.ops[0])](), *node.ops[1:]])


def _operators(node: ast.AST) -> Iterator[ast.AST]:
    yield from _swapped(node, SWAPPED)
    if isinstance(node, ast.Constant):
        value: Any = node.value
        if type(value) in (int, float) and value + 1 != value:  # which large floats are
            yield ast.Constant(value + 1)


def _of_kernels(node: ast.AST, parent: ast.AST, alike: Alike) -> Iterator[ast.AST]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in alike:
        yield ast.Name(alike[node.id])
    if not isinstance(node, ast.Call):
        return
    if isinstance(called := node.func, ast.Attribute):
        if called.attr in CALLS:
            yield _with(node, func=_with(called, attr=CALLS[called.attr]))
        if called.attr in ("exp", "exp2"):
            lowest = ast.Call(
                _with(called, attr="maximum"), [node.args[0], ast.Constant(LOWEST)], []
            )
            yield _with(node, args=[lowest])
        if called.attr == "where":
            yield _with(node, args=[node.args[0], node.args[2], node.args[1]])
    elif isinstance(called, ast.Name) and called.id == "range":
        place = min(1, len(node.args) - 1)
        args = list(node.args)
        args[place] = ast.BinOp(args[place], ast.Sub(), ast.Constant(1))
        yield _with(node, args=args)
    if any(word.arg == "mask" for word in node.keywords):
        kept = [word for word in node.keywords if word.arg not in ("mask", "other")]
        yield _with(node, keywords=kept)


def _of_modules(
    settings: Mapping[str, Any], node: ast.AST, parent: ast.AST, alike: Alike
) -> Iterator[ast.AST]:
    yield from _swapped(node, OF_MODULES)
    if isinstance(node, ast.Constant) and type(value := node.value) is float and value:
        yield ast.Constant(10 * value)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in alike:
        yield ast.Name(alike[node.id])
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in settings:
        yield ast.Constant(settings[node.attr])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and node is parent.test and not negated:
        yield ast.UnaryOp(ast.Not(), node)
    if isinstance(parent, (ast.For, ast.comprehension)) and node is parent.iter:
        shorter = ast.Slice(None, ast.Constant(-1))
        yield ast.Subscript(ast.Call(ast.Name("list"), [node], []), shorter)
