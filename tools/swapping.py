"""A function of a module that is imported runs changed code: no process has to import it anew."""

import functools
import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


class NotSwappedError(Exception):
    """No imported function has the code that changes. It may run only at import, for instance."""


class Functions:
    """The functions of the files in a folder that this process has imported, and its caches."""

    def __init__(self, folder: Path) -> None:
        gc.unfreeze()  # else they are not among the objects
        self._of: dict[str, list[FunctionType]] = {}
        self._caches: list[Any] = []
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(f"{folder}/"):
                self._of.setdefault(one.__code__.co_filename, []).append(one)
            elif type(one) is functools._lru_cache_wrapper:
                self._caches.append(one)
        mine = {id(one) for some in self._of.values() for one in some}
        self._caches = [one for one in self._caches if id(inspect.unwrap(one)) in mine]
        gc.freeze()

    def empty_caches(self) -> None:
        for cache in self._caches:
            cache.cache_clear()

    def swap(self, file: Path, text: str) -> None:
        """Make the functions of a file run the code that they have in this text of it."""
        swapped = False
        original = compile(file.read_text(encoding="utf-8"), file, "exec")
        for old, new in _differing(original, compile(text, file, "exec")):
            for function in self._of.get(str(file), []):
                if function.__code__ == old:
                    if function.__code__.co_freevars != new.co_freevars:
                        raise NotSwappedError(f"{old.co_name} reads other variables around it")
                    function.__code__ = new
                    swapped = True
        if not swapped:
            raise NotSwappedError(f"no function of {file.name} has the code that changes")


def _differing(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The codes of functions that differ, with those in them."""
    if old == new:
        return
    if old.co_flags & inspect.CO_OPTIMIZED:  # a function's; not that of a module or a class
        yield old, new
    before, after = (
        [one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)
    )
    if len(before) == len(after):  # else it is not known which of them is which
        for pair in zip(before, after, strict=True):
            yield from _differing(*pair)
