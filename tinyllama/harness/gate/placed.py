"""Functions of a tree that its import put among those of other libraries, as a method of torch's
Tensor, or in one of torch's registries: a call may find it there, whichever op put it."""

import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinyllama.harness import __name__ as HARNESS
from tinyllama.harness.gate.events import HERE
from tinyllama.harness.gate.reach import Place, Reached, UnboundedError, below

_CONTAINERS = (dict, list, tuple, set)
_DEPTH = 3  # of containers in each other: registries hold tuples of functions


class Spaces:
    """The modules, classes and containers of this process in which functions may be put."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        modules = list(sys.modules.items())
        every = (each for name, one in modules for each in self._of_module(name, one, ""))
        self._before = [(each, len(each)) for each in every]

    def placed(self, root: Path) -> tuple[set[Place], dict[str, str]]:
        """What the functions of a tree that were put there since may run, and, by name, those that
        may run anything. root: of the tree, resolved."""
        places, unbounded = set[Place](), dict[str, str]()
        for function in self._found(f"{root}/"):
            try:
                places |= Reached(root, function).places
            except UnboundedError as error:
                unbounded[f"function {function.__qualname__}"] = str(error)
        return places, unbounded

    def _found(self, root: str) -> Iterator[types.FunctionType]:
        grown = [each for each, size in self._before if len(each) != size]
        for name, module in list(sys.modules.items()):
            grown += self._of_module(name, module, root)
        for each in grown:
            for value in (one for space in [each, *self._new(each)] for one in _values(space)):
                method = issubclass(type(value), (staticmethod, classmethod))
                function = value.__func__ if method else value
                if type(function) is types.FunctionType:
                    file = function.__code__.co_filename
                    if not file.startswith(("<", HERE)) and below(file, root):
                        yield function

    def _of_module(self, name: str, module: Any, root: str) -> Iterator[Any]:
        """The spaces of a module that is none of the tree's or the harness's, once."""
        if id(module) in self._seen or not isinstance(module, types.ModuleType):
            return
        self._seen.add(id(module))
        file = getattr(module, "__file__", None)
        if not (f"{name}.".startswith(f"{HARNESS}.") or (root and file and below(file, root))):
            yield vars(module)
            yield from self._new(vars(module))

    def _new(self, space: Any, depth: int = _DEPTH) -> Iterator[Any]:
        """The spaces in a space that were not seen before."""
        for value in _values(space):
            kind = issubclass(type(value), type)  # deprecated objects warn where they are asked
            holds = kind or (depth and issubclass(type(value), _CONTAINERS))
            if holds and id(value) not in self._seen:
                self._seen.add(id(value))
                inside = vars(value) if kind else value
                yield inside
                yield from self._new(inside, _DEPTH if kind else depth - 1)


def _values(space: Any) -> Iterable[Any]:
    return list(space.values() if isinstance(space, dict | types.MappingProxyType) else space)
