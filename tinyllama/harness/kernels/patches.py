"""What Triton's interpreter changes in the language, found once and then made at once.

The interpreter replaces the builtins of ``triton.language`` before each launch, and before the
first call of a module's functions. What it replaces depends on which modules of the language a
kernel's module sees, and on nothing else, so it is found by the first launch and repeated. What it
puts there is made anew each time, but depends on what was there alone: the first one is kept, so
that a kernel and a function that it calls, which see other modules, want the same language. All is
put back after a launch: the same process also compiles.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as stock

_MISSING = object()
_LATER = ("condition", "tensor_descriptor_base")  # which triton 3.3 may lack
_OWNERS = [tl, tl.core, tl.math, tl.tensor, tl.dtype]
_OWNERS += [getattr(tl.core, name) for name in _LATER if hasattr(tl.core, name)]
# An owner, a name, its member before and after; and what gives the owner's member by its name.
Change = tuple[Any, str, Any, Any, Callable[..., Any]]
_KNOWN: "dict[tuple[bool, bool], _Changes]" = {}  # by the modules that are seen
# By the ids of an owner and of its member, and the name: the member, and the first in its place.
_INSTEAD: dict[tuple[int, str, int], tuple[Any, Any]] = {}
_MADE: "list[_Changes]" = []
_INSIDE: list[None] = []


class Index(int):
    """A loop variable of an interpreted kernel, or what is computed from it: a number that can be
    cast, since a compiled kernel has a tensor there."""

    dtype = tl.int32

    def to(self, dtype: Any, *rest: Any, **named: Any) -> Any:
        return tl.cast(int(self), dtype, *rest, **named)


def _of_indices(usual: Callable[[int, Any], Any]) -> Callable[[Index, Any], Any]:
    def computed(self: Index, other: Any) -> Any:
        found = usual(self, other)
        return found if found is NotImplemented else Index(found)

    return computed


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Index, _method, _of_indices(getattr(int, _method)))


def counted(numbers: Callable[..., Iterable[int]], *args: Any, **named: Any) -> Iterator[Any]:
    """The variable of a loop, of 64 bits where a bound is: compiled, it has their widest type."""
    types = (one.dtype for one in (*args, *named.values()) if isinstance(one, tl.tensor))
    wide = next((one for one in types if one.primitive_bitwidth > 32), None)
    each = map(Index, numbers(*args, **named))
    return (one.to(wide) for one in each) if wide else each


class _Scope:
    """In the place of the stock one, which undoes what `put_back` undoes."""

    def restore(self) -> None:
        pass


class _Changes:
    """Changes of different members, made and undone for each owner at once."""

    def __init__(self, each: Iterable[Change]) -> None:
        self.each = list(each)
        by_owner: dict[int, list[Change]] = {}
        for change in self.each:
            by_owner.setdefault(id(change[0]), []).append(change)
        self._owners = [_OfOwner(changes) for changes in by_owner.values()]

    def make(self) -> None:
        """Where every member is as it was found."""
        for one in self._owners:
            one.put(one.after)
        _MADE.append(self)

    def undo(self) -> None:
        for one in self._owners:
            one.put(one.before)

    def untouched(self) -> bool:
        """Whether every member is as it was found."""
        return all(one.is_before() for one in self._owners)


class _OfOwner:
    """Changes of an owner: the members before and after them, by name."""

    def __init__(self, changes: list[Change]) -> None:
        self._owner = changes[0][0]
        self._members: Any = vars(self._owner)  # of a class they are read alone
        self.before = {name: before for _, name, before, *_ in changes}
        self.after = {name: after for _, name, _, after, _ in changes}

    def is_before(self) -> bool:
        now = map(self._members.get, self.before, repeat(_MISSING))
        return all(map(operator.is_, now, self.before.values()))

    def put(self, members: dict[str, Any]) -> None:
        if isinstance(self._owner, ModuleType):
            self._members.update(members)
            for name in [name for name, member in members.items() if member is _MISSING]:
                del self._members[name]
            return
        for name, member in members.items():
            if member is _MISSING:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, member)


def _undo() -> None:
    while _MADE:
        _MADE.pop().undo()


def _do(changes: _Changes) -> bool:
    """Whether every member was as it was found, or is as it is wanted. If not, nothing is done."""
    if changes.untouched():
        changes.make()
        return True
    wanted = []
    for change in changes.each:
        _, name, before, after, member = change
        now = member(name, _MISSING)
        if now is before:
            wanted.append(change)
        elif now is not after:
            return False
    _Changes(wanted).make()
    return True


def _found(patch: Callable[..., Any], function: Callable[..., Any]) -> list[Change]:
    was = [dict(vars(owner)) for owner in _OWNERS]
    patch(function)
    changes = []
    for owner, old in zip(_OWNERS, was, strict=True):
        for name, member in list(vars(owner).items()):
            before = old.get(name, _MISSING)
            if before is not member:
                if name == "range":
                    member = functools.partial(counted, member)
                key = id(owner), name, id(before)
                _, after = _INSTEAD.setdefault(key, (before, member))
                setattr(owner, name, after)
                changes.append((owner, name, before, after, vars(owner).get))
    return changes


def patched(function: Callable[..., Any], patch: Callable[..., Any]) -> _Scope:
    """Change the language as the module of a function sees it, until `put_back` ends. ``patch``:
    Triton's own way to do so, for what was not found before or was changed since."""
    seen = list(function.__globals__.values())
    key = any(one is tl for one in seen), any(one is tl.core for one in seen)
    if key in _KNOWN and _do(_KNOWN[key]):
        return _Scope()
    made = [change for changes in _MADE for change in changes.each]
    _undo()  # what is found is then all that has to be changed
    _KNOWN[key] = changes = _Changes(_found(patch, function))
    _MADE.append(changes)  # which Triton's own way has made
    _do(_Changes(one for one in made if one[4](one[1], _MISSING) is one[2]))
    return _Scope()


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Undo afterwards what was changed meanwhile; inside of another one, that one undoes it."""
    _INSIDE.append(None)
    try:
        yield
    finally:
        _INSIDE.pop()
        if not _INSIDE:
            _undo()


def signatures_once() -> None:
    """From now on: the stock executor takes a function's signature apart twice in each launch."""
    known = functools.cache(inspect.getfullargspec)

    def spec_of(function: Any) -> Any:
        plain = type(function) is FunctionType
        return known(function) if plain else inspect.getfullargspec(function)

    def called_with(function: Any, *args: Any, **named: Any) -> dict[str, Any]:
        spec = spec_of(function)
        given = {**dict(zip(spec.args, args, strict=False)), **named}
        positional = spec.varargs is spec.varkw is None and not spec.kwonlyargs
        if positional and len(args) + len(named) == len(given) and given.keys() == {*spec.args}:
            return given
        return inspect.getcallargs(function, *args, **named)  # defaults, and what is an error

    own = {"getfullargspec": spec_of, "getcallargs": called_with}
    stock.inspect = SimpleNamespace(**{**vars(inspect), **own})
