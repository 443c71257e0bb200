"""Values between processes as JSON: numbers, texts, containers, dataclasses, named tuples, enums.

Nothing is unpickled. An answer comes from a process that ran other people's code, and a pickle runs
whatever its sender likes. A class is named in the text. The reader of an answer knows it only if it
has loaded the module, and only a dataclass, a named tuple or an enum is made.
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any


class WireError(ValueError):
    """A value that cannot travel, or a text that is none of ours; the message names it."""


def encode(value: Any) -> bytes:
    """Raises WireError for a value of another kind, with the place at which it is."""
    return json.dumps(_sendable(value, "the value")).encode()


def decode(text: bytes, *, importing: bool = False) -> Any:
    """importing: a class may be of a module that is not loaded yet. Raises WireError."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"it is no JSON: {error}") from error
    return _valued(read, importlib.import_module if importing else _loaded)


def _sendable(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return {"enum": _name(type(value)), "is": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return _items(value, where)
    if isinstance(value, dict):
        pairs = [
            [_sendable(k, f"a key of {where}"), _sendable(v, f"{where}[{k!r:.60}]")]
            for k, v in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return {"of": _name(type(value)), "are": _items(value, where)}
        return {"tuple": _items(value, where)}
    if isinstance(value, (set, frozenset)):
        return {"set": _items(sorted(value, key=repr), where)}
    if isinstance(value, Path):
        return {"path": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field_of_class.name for field_of_class in fields(value) if field_of_class.init]
        are = {name: _sendable(getattr(value, name), f"{where}.{name}") for name in names}
        return {"of": _name(type(value)), "are": are}
    raise WireError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot go to "
        "another process: send numbers, texts, containers or dataclasses"
    )


def _items(values: Any, where: str) -> list[Any]:
    return [_sendable(item, f"{where}[{place}]") for place, item in enumerate(values)]


def _valued(read: Any, module_of: Callable[[str], ModuleType]) -> Any:
    if isinstance(read, list):
        return [_valued(item, module_of) for item in read]
    if not isinstance(read, dict):
        return read
    constructor: Any
    try:
        match read:
            case {"dict": pairs}:
                return {_valued(k, module_of): _valued(v, module_of) for k, v in pairs}
            case {"tuple": values}:
                return tuple(_valued(values, module_of))
            case {"set": values}:
                return set(_valued(values, module_of))
            case {"path": str(text)}:
                return Path(text)
            case {"enum": str(name), "is": str(member)}:
                return _class(name, module_of, lambda kind: issubclass(kind, Enum))[member]
            case {"of": str(name), "are": list(values)}:
                constructor = _class(name, module_of, lambda kind: hasattr(kind, "_fields"))
                return constructor(*_valued(values, module_of))
            case {"of": str(name), "are": dict(values)}:
                constructor = _class(name, module_of, is_dataclass)
                return constructor(**{n: _valued(v, module_of) for n, v in values.items()})
    except (TypeError, KeyError, AttributeError, ImportError) as error:
        raise WireError(f"{read!s:.120}: {type(error).__name__}: {error}") from error
    raise WireError(f"{read!s:.120} is nothing that is sent")


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, module_of: Callable[[str], ModuleType], good: Callable[[Any], bool]) -> Any:
    module, _, qualified = name.partition(":")
    value: Any = module_of(module)
    for part in qualified.split("."):
        value = getattr(value, part)
    if not (isinstance(value, type) and good(value)):
        raise WireError(f"{name} is no class of values")
    return value


def _loaded(module: str) -> ModuleType:
    if module not in sys.modules:
        raise ImportError(f"module {module!r} is not loaded in this process")
    return sys.modules[module]
