"""Finding ops: every module of a package, entry points, and files named by a user.

All three use `Registry.add`, which refuses duplicates: a verdict is about one op of a name.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import DeclarationError
from tinyllama.harness.kernels.tuned import adopted
from tinyllama.harness.machine.errors import UsageError

ENTRY_POINTS = "tinyllama.ops"


class Registry(dict[str, Op]):
    """Ops by name, in the order in which they were found."""

    def __missing__(self, name: str) -> Op:
        raise KeyError(f"no op {name!r}: use one of {', '.join(self)}")

    def add(self, op: Op) -> None:
        """Register a declaration that is complete; raise DeclarationError when it is not."""
        if op.name in self:
            text = f"is declared in {self[op.name].module} already"
            fix = "rename one, or register a provider on the first"
            raise DeclarationError(f"op {op.name!r} from {op.module} {text}: {fix}")
        if "eager" not in op.providers:
            raise DeclarationError(f"op {op.name!r} from {op.module} has no reference: add one")
        self[op.name] = op

    def add_module(self, module: ModuleType) -> None:
        """Register each op that a module declares (ops it imported belong to other files)."""
        if getattr(module.__spec__, "_initializing", False):
            text = "is still being imported: import the package that discovers its ops first"
            raise DeclarationError(f"{module.__name__} {text}")
        # Two names of one object declare one op.
        for value in {id(value): value for value in vars(module).values()}.values():
            if isinstance(value, Op) and value.module == module.__name__:
                self.add(value)


def discover(package: str, *, plugins: bool = True) -> Registry:
    """The ops of every module in a package, then those of installed plugins.

    A plugin names a module, or an op in it, in the entry point group ``tinyllama.ops``: all ops of
    that module are found, and importing it may also register providers on ops that exist. Kernels
    under ``triton.jit`` are adopted, as in `load_file`, except those of a module that was imported
    before.
    """
    registry = Registry()
    folders = importlib.import_module(package).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folders, f"{package}."))
    if plugins:
        names += [point.module for point in entry_points(group=ENTRY_POINTS)]
    for name in names:
        with adopted():
            module = importlib.import_module(name)
        registry.add_module(module)
    return registry


@contextlib.contextmanager
def providers_restored(ops: Iterable[Op]) -> Iterator[None]:
    """In this context, providers may be registered on these ops; at the end they are restored."""
    before = [(op, dict(op.providers)) for op in ops]
    try:
        yield
    finally:
        _restore(before)


def _restore(before: Iterable[tuple[Op, dict[str, Provider]]]) -> None:
    for op, providers in before:
        op.providers.clear()
        op.providers.update(providers)


def load_file(path: str | Path, registry: Registry) -> ModuleType:
    """Import a user's file and register what it declares.

    Its kernels, those under ``triton.jit`` too, are interpreted on a CPU and can be compiled for
    any chip. Raises ValueError when there is no such file, DeclarationError when a declaration in
    it is wrong.

    A provider for an op that exists is registered on that op, in the whole process: a caller that
    needs it for a while only uses `providers_restored`.
    """
    path = Path(path).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"no file {str(path)!r} of Python: name one with an op declaration")
    name = f"tinyllama_ops_file_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name += f"_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # of another folder
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [(op, dict(op.providers)) for op in registry.values()]
    sys.modules[name] = module
    try:
        with adopted():
            spec.loader.exec_module(module)
        registry.add_module(module)
    except BaseException:
        _restore(before)
        del sys.modules[name]
        raise
    return module


def import_name(file: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and its module's name there: outside of the
    packages that it belongs to."""
    folder, names = file.resolve().parent, [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def load_about(declaration: str | Path, file: str | Path, registry: Registry) -> ModuleType:
    """As `load_file` for a declaration that imports ``file`` by its name.

    Raises UsageError where another module has that name.
    """
    folder, name = import_name(Path(file))
    sys.path.insert(0, str(folder))
    module = load_file(declaration, registry)
    imported = getattr(sys.modules[name], "__file__", None)
    if imported is None or Path(imported).resolve() != Path(file).resolve():
        raise UsageError(f"{str(file)!r}: another module is named {name!r}: rename the file")
    return module
