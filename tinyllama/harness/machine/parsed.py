"""JSON and TOML of files that others may have written: whatever is wrong in one is a ValueError.

Python's readers raise RecursionError for what is nested too deep. `tomllib` is a module of Python
from 3.11 on, and before that the package tomli.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["json_of", "toml_of", "tomllib"]


def json_of(text: str | bytes) -> Any:
    return _parsed(json.loads, text)


def toml_of(text: str) -> dict[str, Any]:
    table: dict[str, Any] = _parsed(tomllib.loads, text)
    return table


def _parsed(read: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return read(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
