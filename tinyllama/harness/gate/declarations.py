"""What ops declare that decides on their providers: a change is shown, and the base's holds."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from tinyllama.harness.declare.op import Op


def declarations(ops: Iterable[Op]) -> dict[str, str]:
    """By ``op: part``, a digest of the reference, cases, limits, slack and coverage of each op."""
    digests: dict[str, str] = {}
    for op in ops:
        cases = [(case.dims, case.params, sorted(case.values)) for case in (*op.cases, *op.timed)]
        parts: dict[str, Any] = {
            "reference": _source(op.providers["eager"].call),
            "cases": cases,
            "extremes": sorted(op.extremes),
            "limits": (op.slowdowns, op.layouts),
        }
        for provider in op.providers.values():
            stated = (provider.slack, provider.deterministic, provider.overwrites)
            parts[f"slack of {provider.name}"] = stated
            covered = (provider.dtypes, provider.requires, provider.frozen, provider.contiguous)
            parts[f"coverage of {provider.name}"] = (*covered, _source(provider.supports))
        for part, value in parts.items():
            digest = hashlib.sha256(_text_of(value).encode()).hexdigest()
            digests[f"{op.name}: {part}"] = digest
    return digests


def changed_declarations(base: Mapping[str, str], candidate: Mapping[str, str]) -> list[str]:
    """The parts of ops of both sides that differ; what one side lacks has verdicts of its own."""
    return [name for name in sorted(base) if candidate.get(name, base[name]) != base[name]]


def _source(function: Any) -> str:
    """The code of a function, without comments and docstrings."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ""
    if function.__name__ == "<lambda>":  # else the whole decorated function is its source
        return " ".join(ast.dump(n) for n in ast.walk(tree) if isinstance(n, ast.Lambda))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _text_of(value: Any) -> str:
    """A text of plain values that is the same in every process."""
    if isinstance(value, Mapping):
        return repr(sorted((_text_of(key), _text_of(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_text_of, value)))
    if isinstance(value, (list, tuple)):
        return repr([_text_of(item) for item in value])
    return repr(value)
