"""What the import of one file of ops changes of others: their functions, and their providers.

Whoever imports one op alone does not see it, since what is changed may not be there yet. So all are
imported in one process, one after the other, and what was there before each is compared with what
is there after it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType

from tinyllama.harness.declare.op import Op
from tinyllama.harness.gate.process_state import Code, note_module, of_others


def replaced(names: Iterable[str], load: Callable[[str], object]) -> dict[str, dict[str, str]]:
    """By module, what its import changes. ``load`` imports one; those that fail change nothing,
    and whoever observes them alone says so."""
    found = {}
    others: dict[str, ModuleType] = {}
    for name in names:
        before = _code(others)
        with suppress(Exception, SystemExit):
            load(name)
        if changes := before.changes():
            found[name] = changes
    return found


def _code(others: dict[str, ModuleType]) -> Code:
    """Of all loaded modules but the installed ones, Python's and the harness's. ``others``: these,
    which are not looked at again; more of them are entered."""
    found, classes = Code(), set[int]()
    for name, module in list(sys.modules.items()):
        if module is others.get(name) or not isinstance(module, ModuleType):
            continue
        if of_others(name, module):
            others[name] = module
        else:
            note_module(found, name, module, classes, name.__eq__)
            for value in list(vars(module).values()):
                if type(value) is Op:
                    _note_op(found, value)
    return found


def _note_op(found: Code, op: Op) -> None:
    for name, provider in op.providers.items():
        found.note(f"provider {op.name}-{name}", op.providers, name, provider)
        for part in filter(None, (provider, provider.derived)):
            _note_parts(found, f"{op.name}-{name}", vars(part))


def _note_parts(found: Code, name: str, space: Mapping[str, object]) -> None:
    for key, value in list(space.items()):
        if callable(value):
            found.note(f"{name}: {key}", space, key, value)
