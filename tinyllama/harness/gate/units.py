"""Which functions of a file differ between two trees, where nothing else of it does."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.gate.sources import parsed, plain

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Changed(NamedTuple):
    """names: of functions whose bodies differ. base, candidate: their lines in either file, from
    the first decorator to the end."""

    names: tuple[str, ...]
    base: tuple[range, ...]
    candidate: tuple[range, ...]


def changed(base: Path, candidate: Path) -> Changed | None:
    """The functions and methods that differ; None where more than bodies of functions differs, so
    that the file's own statements do: imports, constants, decorators, defaults, classes."""
    try:
        trees = [parsed(path) for path in (base, candidate)]
        functions = [list(_functions(tree)) for tree in trees]
        texts = [[plain(one) for _, one in each] for each in functions]
        lines = [[_lines(one) for _, one in each] for each in functions]
        for each in functions:
            for _, one in each:
                one.body = []
        if plain(trees[0]) != plain(trees[1]):
            return None
    except RevisionError:
        return None
    places = [n for n, (then, now) in enumerate(zip(*texts, strict=True)) if then != now]
    before, after = (tuple(each[n] for n in places) for each in lines)
    return Changed(tuple(functions[1][n][0] for n in places), before, after)


def _functions(node: ast.Module | ast.ClassDef, above: str = "") -> Iterator[tuple[str, Function]]:
    """The functions of a file and the methods of its classes; what is inside of these is theirs."""
    for one in node.body:
        if isinstance(one, Function):
            yield f"{above}{one.name}", one
        elif isinstance(one, ast.ClassDef):
            yield from _functions(one, f"{above}{one.name}.")


def _lines(function: Function) -> range:
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    return range(first, (function.end_lineno or function.lineno) + 1)
