"""The integers that a candidate's code compares with: there it may take another branch."""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

LEAST, MOST = 4, 2**16  # smaller ones are dimensions of tensors; larger ones take too long
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: lambda base, power: base ** min(power, MOST.bit_length()),
}
Scope = dict[str, Any]


def thresholds(call: Callable[..., Any]) -> list[int]:
    """The integers in comparisons of a function, and of the functions of its file that it names,
    sorted. If the code computes a remainder ``x % n``, the next multiple of n is added for each."""
    compared, divisors = set[int](), set[int]()
    for node, scope in _nodes(call):
        if isinstance(node, ast.Compare):
            compared |= {*_integers(node, scope)}
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            divisors |= {*_integers(node.right, scope)}
    multiples = {-(-number // divisor) * divisor for number in compared for divisor in divisors}
    return sorted(number for number in compared | multiples if number <= MOST)


def compared_with(call: Callable[..., Any], name: str) -> list[int | float]:
    """The positive numbers in comparisons with a variable of this name, in the same functions."""
    numbers = set[int | float]()
    for node, scope in _nodes(call):
        if isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            if any(isinstance(part, ast.Name) and part.id == name for part in parts):
                values = [_value(part, scope) for part in parts]
                numbers |= {x for x in values if type(x) in (int, float) and x > 0}
    return sorted(numbers)


def _nodes(call: Callable[..., Any]) -> Iterator[tuple[ast.AST, Scope]]:
    """The parts of the code of a function, of those of its file that it names, and so on; each with
    what the names around it stand for."""
    read, waiting = set[Any](), [_undecorated(call)]
    while waiting:
        function = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is None or function in read:
            continue
        read.add(function)
        try:
            scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        except ValueError:  # a variable around it has no value yet
            scope = function.__globals__
        callees = [_undecorated(scope.get(n)) for n in (*code.co_names, *code.co_freevars)]
        waiting += [
            callee
            for callee in callees
            if getattr(getattr(callee, "__code__", None), "co_filename", None) == code.co_filename
        ]
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):  # it was typed in, or is a part of an expression
            continue
        yield from ((node, scope) for node in ast.walk(tree))


def _undecorated(value: Any) -> Any:
    """The function that a decorated or jitted one stands for."""
    value = inspect.unwrap(value) if callable(value) else value
    return getattr(value, "fn", value)


def _integers(node: ast.AST, scope: Scope) -> Iterator[int]:
    """The integers in an expression: literals, and names that are bound to integers."""
    for part in ast.walk(node):
        value = _value(part, scope)
        if type(value) is int and LEAST <= value <= MOST:
            yield value


def _value(node: ast.AST, scope: Scope) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(scope.get(node.id), "value", scope.get(node.id))  # of tl.constexpr
    if isinstance(node, ast.BinOp) and (compute := OPERATORS.get(type(node.op))) is not None:
        left, right = _value(node.left, scope), _value(node.right, scope)
        return compute(left, right) if type(left) is type(right) is int else None
    return None
