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


def thresholds(call: Callable[..., Any]) -> list[int]:
    """The integers in comparisons of a function, and of the functions of its file that it names,
    sorted. If the code computes a remainder ``x % n``, the next multiple of n is added for each."""
    compared, divisors = set[int](), set[int]()
    for function, names in _reached(call).items():
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Compare):
                compared |= {*_numbers(node, names)}
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                divisors |= {*_numbers(node.right, names)}
    multiples = {-(-number // divisor) * divisor for number in compared for divisor in divisors}
    return sorted(number for number in compared | multiples if number <= MOST)


def compared_with(call: Callable[..., Any], name: str) -> list[int | float]:
    """The positive numbers in comparisons with a variable of this name, in the same functions."""
    numbers = set[int | float]()
    for function, names in _reached(call).items():
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Compare):
                parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
                if any(isinstance(part, ast.Name) and part.id == name for part in parts):
                    values = (_value(part, names) for part in parts)
                    numbers |= {
                        value for value in values if type(value) in (int, float) and value > 0
                    }
    return sorted(numbers)


def _reached(call: Callable[..., Any]) -> dict[Any, dict[str, Any]]:
    """A function, those of its file that it names, those that these name, and so on; each with what
    the names around it stand for."""
    functions: dict[Any, dict[str, Any]] = {}
    waiting = [_plain(call)]
    while waiting:
        function = waiting.pop()
        code = getattr(function, "__code__", None)
        if code is not None and function not in functions:
            functions[function] = names = {**function.__globals__, **_enclosed(function)}
            names = (*code.co_names, *code.co_freevars)
            named = (_plain(names.get(name)) for name in names)
            waiting += [function for function in named if _file(function) == code.co_filename]
    return functions


def _plain(value: Any) -> Any:
    """The function that a decorated or jitted one stands for."""
    value = inspect.unwrap(value) if callable(value) else value
    return getattr(value, "fn", value)


def _file(function: Any) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables of the functions around this one that it names."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return variables


def _tree(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # it was typed in, or is a part of an expression
        return ast.Module(body=[], type_ignores=[])


def _numbers(node: ast.AST, names: dict[str, Any]) -> Iterator[int]:
    """The integers in an expression: literals, and names that are bound to integers."""
    for part in ast.walk(node):
        value = _value(part, names)
        if type(value) is int and LEAST <= value <= MOST:
            yield value


def _value(node: ast.AST, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(names.get(node.id), "value", names.get(node.id))  # of tl.constexpr
    if isinstance(node, ast.BinOp) and (compute := OPERATORS.get(type(node.op))) is not None:
        left, right = _value(node.left, names), _value(node.right, names)
        return compute(left, right) if type(left) is type(right) is int else None
    return None
