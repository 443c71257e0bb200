"""Which functions of a tree a call may run, by the objects that it can reach.

From a provider's callable every object is followed that its code can get hold of: the globals and
attributes that it names, closures, defaults, elements of containers, whole classes. What a function
merely could name counts as called, so the result has all that a call runs, and more.

Some code gets hold of objects by other ways: `exec`, `globals`, `sys.modules`, torch's table of
operators, frames. A call that reaches such code reaches everything (`UnboundedError`).

`Executed` notes what really ran. It is held to what was reached: a function that ran and was not
reached means that there is another way, and everything counts too.
"""

import builtins
import contextvars
import dis
import gc
import importlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinyllama.harness.gate.sources import module_file

Place = tuple[str, int]  # a file, and the first line of a function in it

# Names with which code gets hold of what it does not name.
_UNBOUNDED = frozenset(
    [
        "globals",
        "locals",
        "eval",
        "exec",
        "import_module",
        "__import__",
        "modules",
        "__subclasses__",
        "_getframe",
        "__globals__",
        "f_globals",
        "f_locals",
        "__builtins__",
        "__code__",
        "get_type_hints",
    ]
)
_BY_NAME = frozenset(
    ["getattr", "vars", "dir", "__dict__", "attrgetter", "methodcaller", "getmembers"]
)
_OF_IMPORT = frozenset(("__loader__", "__spec__", "__builtins__"))  # of any module
_OPERATORS = ("torch._ops", "torch._library", "torch.library")  # they find functions by name
_READS = frozenset(
    ["open", "read_text", "read_bytes", "read", "load", "loads", "fromfile", "memmap"]
)
_FINDERS = frozenset(
    ("gc", "importlib", "inspect", "marshal", "pickle", "pkgutil", "runpy", "timeit")
) | {"atexit", "copyreg", "_signal", "signal"}  # they run what somebody gave them
_BUILTINS = frozenset(vars(builtins))  # before a tree adds to them
_ENVIRONMENT = os.path.join(os.path.realpath(sys.prefix), "")  # before a tree changes it
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_ENDLESS = (types.GeneratorType, types.CoroutineType, types.FrameType, types.AsyncGeneratorType)


class UnboundedError(ValueError):
    """A call may run anything."""


class Reached:
    """What an object reaches in a tree. root: its folder, resolved. around: folders of it whose
    functions are not searched; the caller must let any difference in them count for the call.

    Raises UnboundedError.
    """

    def __init__(self, root: Path, start: Any, around: tuple[str, ...] = ()) -> None:
        self.root, self.around = f"{root}{os.sep}", around
        self.places: set[Place] = set()
        self.names: set[str] = set()
        self._read = False
        self._kernels: set[types.CodeType] = set()
        self._modules: dict[int, types.ModuleType] = {}
        self._whole = False  # modules are taken with all that is in them
        self._seen: dict[int, Any] = {}  # kept, so that no other object takes an address
        self._namespaces = {
            id(vars(one)): one
            for one in list(sys.modules.values())
            if isinstance(one, types.ModuleType)
        }
        self._waiting = [start]
        while self._waiting:
            while self._waiting:
                self._visit(self._waiting.pop())
            for module in list(self._modules.values()):  # by the names that any function has
                inside = vars(module)
                names = inside.keys() - _OF_IMPORT if self._whole else self.names & inside.keys()
                self._push(*(inside[name] for name in list(names)))

    @property
    def reads_files(self) -> bool:
        return self._read

    def _push(self, *values: Any) -> None:
        self._waiting += [one for one in values if id(one) not in self._seen]

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        if _of_module(value) in _FINDERS:
            raise UnboundedError(f"it uses {_of_module(value)}")
        if isinstance(value, types.ModuleType):
            if self._followed(value):
                self._modules[id(value)] = value
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            if self._own(value):
                self._push(*vars(value).values(), *value.__mro__, type(value))
        elif any(one.__module__ == "triton.runtime.jit" for one in kind.__mro__):
            self._kernel(value)
        elif isinstance(value, _ENDLESS):
            raise UnboundedError(f"it holds a {kind.__name__}")
        elif isinstance(value, types.CodeType):
            if self._inside(value.co_filename):
                raise UnboundedError(f"it holds the code of {value.co_name}")
        elif kind.__module__.startswith(_OPERATORS):
            raise UnboundedError("it calls a registered operator")
        elif id(value) in self._namespaces:
            module = self._namespaces[id(value)]
            if self._inside(getattr(module, "__file__", None)):
                raise UnboundedError(f"it holds all of {module.__name__}")
        else:
            self._push(*(one for one in gc.get_referents(value) if one is not kind))
            self._push(*_refers(value))
            if self._own(kind):
                self._push(kind)

    def _function(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        held = [cell.cell_contents for cell in cells if _filled(cell)]
        named = (function.__kwdefaults__ or {}).values()
        self._push(*held, *(function.__defaults__ or ()), *named, *vars(function).values())
        code = function.__code__
        if self._looked_into(code.co_filename):
            self._code(code, function.__globals__)

    def _kernel(self, kernel: Any) -> None:
        """A function of Triton's. In the interpreter, it begins at a line after its decorators."""
        function = kernel.fn
        self._push(function, *kernel.pre_run_hooks)
        code = function.__code__
        self._kernels.add(code)
        body = (line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
        lines = range(code.co_firstlineno, min(body, default=code.co_firstlineno))
        self.places |= {(code.co_filename, line) for line in lines}

    def _code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        self.places.add((code.co_filename, code.co_firstlineno))
        names = set(code.co_names)
        if found := names & _UNBOUNDED:
            raise UnboundedError(f"{code.co_name} uses {min(found)}")
        if "ops" in names and "torch" in names:
            raise UnboundedError(f"{code.co_name} calls a registered operator")
        self._whole |= bool(names & _BY_NAME)
        self.names |= names
        self._read |= code not in self._kernels and bool(names & _READS)
        package, last = str(namespace.get("__package__") or ""), ""
        for one, after in pairwise(dis.get_instructions(code)):  # the last one loads nothing
            if one.opname in _GLOBAL and one.argval in namespace:
                self._global(namespace[one.argval], after)
            elif one.opname in _GLOBAL and one.argval in vars(builtins).keys() - _BUILTINS:
                self._global(vars(builtins)[one.argval], after)
            elif one.opname == "IMPORT_NAME":
                last = str(one.argval)
                self._import(last, package)
            elif one.opname == "IMPORT_FROM":  # a module, perhaps
                self._load(f"{last}.{one.argval}".lstrip("."), package)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._code(inner, namespace)

    def _global(self, value: Any, after: dis.Instruction) -> None:
        """A global that a function names. Of a module of which it takes an attribute at once, it
        gets that attribute alone."""
        taken = after.argval if after.opname in _ATTRIBUTE else None
        if isinstance(value, types.ModuleType) and taken in vars(value):
            if self._followed(value):
                self._push(vars(value)[taken])
            elif _of_module(value) in _FINDERS:
                self._push(value)
        else:
            self._push(value)

    def _import(self, name: str, package: str) -> None:
        """What an import inside a function may give. A module from outside the tree that is not
        loaded yet could run anything."""
        self._load(name, package)
        if not any(one in sys.modules for one in _meant(name, package)):
            raise UnboundedError(f"it imports {name} when it is called")

    def _load(self, name: str, package: str) -> None:
        """A module that an import may mean. If it is one of the tree it is loaded, and what its
        import runs counts as reached."""
        for one in _meant(name, package):
            if one not in sys.modules and module_file(Path(self.root), one) is not None:
                executed = Executed(Path(self.root))
                try:
                    with executed.noting():
                        found = importlib.import_module(one)
                except Exception as error:
                    raise UnboundedError(f"it imports {one} when it is called") from error
                self.places |= executed.places
                self._namespaces[id(vars(found))] = found
            if one in sys.modules:
                self._push(sys.modules[one])

    def _own(self, kind: type) -> bool:
        """Whether a class is of the tree."""
        module = sys.modules.get(kind.__module__)
        if self._inside(getattr(module, "__file__", None)):
            return True
        values = [getattr(one, "__func__", one) for one in vars(kind).values()]
        codes = [getattr(one, "__code__", None) for one in values]
        return any(self._inside(code.co_filename) for code in codes if code is not None)

    def _followed(self, module: types.ModuleType) -> bool:
        """Whether a module is of the tree, or was made by hand."""
        made = module.__spec__ is None and module.__name__ not in sys.modules
        return made or self._looked_into(getattr(module, "__file__", None))

    def _looked_into(self, file: str | None) -> bool:
        return self._inside(file) and not os.path.realpath(str(file)).startswith(self.around)

    def _inside(self, file: str | None) -> bool:
        if not file or file.startswith("<"):  # generated code: a dataclass's, a named tuple's
            return bool(file)
        return below(file, self.root)


def below(file: str, root: str) -> bool:
    """Whether a file is of the tree: below its root, and not of an environment that lies there."""
    path = os.path.realpath(file)
    installed = _ENVIRONMENT.startswith(root) and path.startswith(_ENVIRONMENT)
    return path.startswith(root) and not installed


def _refers(value: Any) -> list[Any]:
    """What an object refers to without the knowledge of `gc`."""
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, weakref.finalize):
        return [value.peek()]
    return [value.get(None)] if isinstance(value, contextvars.ContextVar) else []


def _meant(name: str, package: str) -> list[str]:
    """The modules that an import in a package may mean."""
    parts = package.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return [name, *(f"{one}.{name}".rstrip(".") for one in above)]


def _of_module(value: Any) -> str:
    """The package that a module or a function is of; empty for what is neither."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return ""
    name = value.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class Executed:
    """The functions of a tree that run, by their places. root: its folder, resolved. replaced: what
    ran has set another profile function, so that others may have run."""

    def __init__(self, root: Path) -> None:
        self.root = f"{str(root).rstrip(os.sep)}{os.sep}"
        self.replaced = False
        self.places: set[Place] = set()
        self._known: dict[types.CodeType, bool] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what runs in a `with` block, in all threads that begin in it too."""
        before = sys.getprofile()
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            self.replaced |= sys.getprofile() != self._called
            sys.setprofile(before)
            threading.setprofile(None)

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        inside = self._known.get(code)
        if inside is None:
            file = code.co_filename
            inside = not file.startswith("<") and below(file, self.root)
            self._known[code] = inside
        if inside and code.co_name != "<module>":
            self.places.add((code.co_filename, code.co_firstlineno))
