"""JSON and TOML of files that others may have written: whatever is wrong in one is a ValueError.

Python's readers raise RecursionError for what is nested too deep.
"""

import json
from collections.abc import Callable
from typing import Any

from tinyllama.harness.machine.toml import tomllib


def json_of(text: str | bytes) -> Any:
    return _parsed(json.loads, text)


def toml_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = _parsed(tomllib.loads, text)
    return found


def _parsed(read: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return read(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
