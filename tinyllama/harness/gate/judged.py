"""What of a candidate would change its own verdict, and is the base's in it.

Files that judge: those of the harness that no timed op runs, the modules that time what is
registered, conftests, configuration and the workflows. So do modules that Python takes in the place
of others when a worker starts (`shadowing`), and bytecode, which it takes in the place of source.
`tinyllama.harness.kernels` and `declare` are run by ops: they are compared like these. Of an op
that the base has: its reference, cases, slack and limits.

A change of these is accepted by name in the accepted file, with a digest of what it became.
"""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.gate.sources import digest
from tinyllama.harness.machine.parsed import toml_of

# Of the harness: what is put into both trees, so that both are measured with one instrument.
_INSTRUMENT = ("check", "gate", "measure", "records")
INSTRUMENT = tuple(f"tinyllama/harness/{name}/" for name in _INSTRUMENT)
_OF_MACHINE = ("worker", "wire", "parsed")
INSTRUMENT_FILES = tuple(f"tinyllama/harness/machine/{name}.py" for name in _OF_MACHINE)
FOLDERS = (*INSTRUMENT, "tinyllama/harness/plugins/", "tinyllama/suites/", ".github/", ".ci/")
BYTECODE = "__pycache__"
_OF_PYTEST = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg")
NAMES = ("conftest.py", "pyproject.toml", *_OF_PYTEST)
TABLES = (("tool", "pytest"), ("tool", "tinyllama"), ("project", "entry-points"))
GONE = "removed"
SHOWN = 12  # digits of a digest


@dataclass(frozen=True)
class Change:
    """Something that judges. name: of a file, or ``op: part``. digest: of what it became."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


def changed_files(
    base: Mapping[str, Path], candidate: Mapping[str, Path], modules: Iterable[str] = ()
) -> list[Change]:
    """Of two trees' files by name, those that judge and differ. modules: further ones."""
    named = {name for name in {**base, **candidate} if _judges(name) or name in {*modules}}
    found = []
    for name in sorted(named):
        if _same_bytes(base.get(name), candidate.get(name)):
            continue  # parsing both takes 20 times as long
        before, after = (_digest(tree.get(name)) for tree in (base, candidate))
        if before != after:
            found.append(Change(name, after))
    return found


def shadowing(names: Collection[str], loaded: Collection[str], base: Iterable[str]) -> set[str]:
    """The candidate's files that Python would load in the place of another module: of one of
    Python's, of one that the judge has loaded, or of one that `site` imports.

    loaded: the first parts of module names. base: the base's files by name; the modules at its
    top hide nothing.
    """
    own = _modules(base) - {*sys.stdlib_module_names, *_OF_SITE}
    hidden = _modules(names) & ({*sys.stdlib_module_names, *_OF_SITE, *loaded} - own)
    return {name for name in names if _top(name) in hidden}


_OF_SITE = ("sitecustomize", "usercustomize")
_CODE = (".py", ".pyc", ".so", ".pyd")


def _top(name: str) -> str:
    """The module or package at the top of a tree, or of its ``src``, that a file is or is in."""
    path = name.removeprefix("src/")
    first, inside, _ = path.partition("/")
    code = path.endswith(_CODE)
    return first if inside else first.partition(".")[0] if code else ""


def _modules(names: Iterable[str]) -> set[str]:
    """The modules and packages at the top of a tree; a folder without ``__init__`` is neither."""
    found = set()
    for name in names:
        inside = name.removeprefix("src/").partition("/")[2]
        if not inside or (inside.startswith("__init__.") and inside.endswith(_CODE)):
            found.add(_top(name))
    return found - {""}


def _same_bytes(one: Path | None, other: Path | None) -> bool:
    if one is None or other is None or not (one.is_file() and other.is_file()):
        return False
    return one.read_bytes() == other.read_bytes()


def _judges(name: str) -> bool:
    of_harness = name in INSTRUMENT_FILES or name.startswith(FOLDERS)
    return of_harness or name.rpartition("/")[2] in NAMES or name.endswith(".pyc")


def _digest(path: Path | None) -> str:
    if path is None or not path.is_file():
        return GONE
    if path.suffix == ".py":
        try:
            return digest(path)[:SHOWN]
        except RevisionError:
            pass  # no Python: its bytes
    if path.name == "pyproject.toml":
        try:
            return _hash(repr(_tables(toml_of(path.read_text(encoding="utf-8")))))
        except ValueError:
            pass  # no TOML: its bytes
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN]


def _tables(content: dict[str, Any]) -> list[Any]:
    return [content.get(first, {}).get(second) for first, second in TABLES]


def changed_declarations(
    base: Mapping[str, str] | None, candidate: Mapping[str, str] | None
) -> list[Change]:
    """Of `declarations` of both sides, the parts of ops of the base that differ."""
    before, after = base or {}, candidate or {}
    ops = {name.partition(":")[0] for name in after}
    return [
        Change(name, after.get(name, GONE))
        for name in sorted(before)
        if name.partition(":")[0] in ops and after.get(name, GONE) != before[name]
    ]


def declarations(ops: Iterable[Op]) -> dict[str, str]:
    """By ``op: part``, a digest of what an op declares that decides on its providers."""
    found: dict[str, str] = {}
    for op in ops:
        parts: dict[str, Any] = {
            "reference": _source(op.providers["eager"].call),
            "cases": [_case(case) for case in (*op.cases, *op.timed)],
            "extremes": sorted(op.extremes),
            "limits": (op.slowdowns, op.layouts, op.tolerances),
        }
        for provider in op.providers.values():
            stated = (provider.slack, provider.deterministic, provider.overwrites)
            parts[f"slack of {provider.name}"] = stated
        found |= {f"{op.name}: {part}": _hash(_plain(value)) for part, value in parts.items()}
    return found


def _case(case: Case) -> tuple[Any, ...]:
    return case.dims, case.params, sorted(case.values)


def _source(function: Any) -> str:
    """The code of a function, without comments and docstrings."""
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _plain(value: Any) -> str:
    """A text of plain values that is the same in every process."""
    if isinstance(value, Mapping):
        return repr(sorted((_plain(key), _plain(each)) for key, each in value.items()))
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_plain, value)))
    if isinstance(value, (list, tuple)):
        return repr([_plain(each) for each in value])
    return repr(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN]
