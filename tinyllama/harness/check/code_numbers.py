"""The integers that a candidate's code compares with: there it may take another branch."""

import ast
import inspect
import operator
import sys
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
LIBRARIES = {"torch", "triton", "numpy", *sys.stdlib_module_names}
Scope = dict[str, Any]


def thresholds(call: Callable[..., Any]) -> list[int]:
    """The integers in comparisons of a function, of the functions and classes that it names, and of
    those that these name in their files; sorted. If the code computes a remainder ``x % n``, the
    next multiple of n is added for each."""
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
    """The parts of the code of a function, of those that it names, of those of their files that
    these name, and so on; each with what the names around it stand for."""
    first = _undecorated(call)
    read, waiting = set[Any](), [first]
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
        names = (*code.co_names, *code.co_freevars)
        callees = [_undecorated(part) for name in names for part in _with_methods(scope.get(name))]
        waiting += [
            callee
            for callee in callees
            if getattr(getattr(callee, "__code__", None), "co_filename", None) == code.co_filename
            or (function is first and not _of_library(callee))
        ]
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):  # it was typed in, or is a part of an expression
            continue
        yield from ((node, scope) for node in ast.walk(tree))


def _of_library(value: Any) -> bool:
    module = str(getattr(value, "__module__", ""))
    return module.partition(".")[0] in LIBRARIES or f"{module}.".startswith("tinyllama.harness.")


def _with_methods(value: Any) -> list[Any]:
    """The value; of a class, as a ``torch.autograd.Function``, its functions too."""
    methods = vars(value).values() if isinstance(value, type) else ()
    return [value, *(getattr(method, "__func__", method) for method in methods)]


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
