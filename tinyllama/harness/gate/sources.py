"""The files of a tree that a benchmark runs: those that its modules import, transitively, and the
data beside them. Two trees in which these have equal digests run the same code.
"""

import ast
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.machine.parsed import json_of, toml_of

_FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+):\w+")  # "module:name", which a worker imports
_JIT = {
    "triton.jit",
    "triton.runtime.jit.jit",
    "tinyllama.harness.kernels.jit",
    "tinyllama.harness.kernels.launch.jit",
}
_SEARCHES = {"discover", "iter_modules", "walk_packages"}  # calls that import a package's modules
# What tells comments, docstrings or lines of code that runs.
_ASKS = re.compile(
    rb"\b(__doc__|getdoc|f_lineno|tb_lineno|lineno|co_\w*line\w*|co_positions|co_lnotab)\b"
)
_NO_DATA = {".py", ".pyc", ".md"}  # of the files beside a module, which may read all others


def closure(
    root: Path, modules: Sequence[str], read: dict[str, list[str]] | None = None
) -> list[Path]:
    """The files under ``root`` that modules import, transitively; nothing is imported to find them.

    Imports inside functions count, and so do a package's ``__init__``, a literal argument of
    `import_module`, and a factory's name, "module:name".

    `tinyllama.ops` imports its other modules when any of it is imported (`discover`). They are
    not followed for that alone: a benchmark of an op runs what its file imports and no other op.
    They are followed for a file that imports the package itself, which may use any of them. (For a
    provider that another file registers, name that file too.)

    read: what modules of this tree ask for; those that are not there yet are added.
    """
    read = {} if read is None else read
    for name in modules:
        if module_file(root, name) is None:
            raise RevisionError(f"no module {name!r} in {root}: renamed, or not there yet?")
    files: set[Path] = set()
    done: set[tuple[str, bool]] = set()
    waiting = [(name, True) for name in modules]  # and whether the module itself is asked for
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) in done:
            continue
        done.add((name, asked))
        if package := name.rpartition(".")[0]:
            waiting.append((package, False))
        path = module_file(root, name)
        if path is None:
            continue
        files.add(path)
        if name not in read:
            read[name] = imports_of(root, name)
        waiting += [(found, True) for found in read[name]]
        if asked and path.name == "__init__.py" and _called(parsed(path)) & _SEARCHES:
            waiting += [(f"{name}.{module}", True) for module in _modules(path.parent)]
    return sorted(files)


class Sources:
    """The files that benchmarks of one tree run; each is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._imports: dict[str, list[str]] = {}
        self._digests: dict[Path, tuple[str, str]] = {}
        self._asks: dict[Path, bool] = {}
        self._found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, str]]] = {}

    def of(self, *modules: str) -> tuple[dict[str, str], dict[str, str]]:
        """The fingerprints of what these modules run, whole and of the host alone."""
        if modules not in self._found:
            files = closure(self.root, modules, self._imports)
            folders = {path.parent for path in files}
            beside = {path for folder in folders for path in _data(folder)}
            named = {p.relative_to(self.root).as_posix(): p for p in sorted({*files, *beside})}
            whole = {name: self._both(path)[0] for name, path in named.items()}
            self._found[modules] = whole, {n: self._both(p)[1] for n, p in named.items()}
        return self._found[modules]

    def imported(self, *modules: str) -> set[str]:
        """The files that these modules import, transitively; without data."""
        files = closure(self.root, modules, self._imports)
        return {path.relative_to(self.root).as_posix() for path in files}

    def digest(self, path: Path, *, host: bool = False) -> str:
        """Of any file of the tree; of code that is no Python, its bytes; of a folder, the names in
        it; empty where it is not. host: without the bodies of kernels."""
        if path.is_dir():
            names = (one.name for one in path.iterdir())
            return _hash(repr(sorted(n for n in names if n[0] != "." and n != "__pycache__")))
        if not path.is_file():
            return ""
        try:
            return self._both(path)[1 if host else 0]
        except RevisionError:
            return hashlib.sha256(path.read_bytes()).hexdigest()

    def text(self, path: Path) -> bytes:
        """All of a file; empty where it is none."""
        return path.read_bytes() if path.is_file() else b""

    def asks_for_text(self, path: Path) -> bool:
        """Whether code names what tells docstrings, or the numbers of lines."""
        if path not in self._asks:
            self._asks[path] = bool(_ASKS.search(self.text(path)))
        return self._asks[path]

    def _both(self, path: Path) -> tuple[str, str]:
        if path not in self._digests:
            code = path.suffix == ".py"
            self._digests[path] = (
                (digest(path), host_digest(path)) if code else (_data_digest(path),) * 2
            )
        return self._digests[path]


def digest(path: Path) -> str:
    """A digest of a file's code, without comments, docstrings and formatting."""
    return _hash(plain(parsed(path)))


def plain(tree: ast.AST) -> str:
    """A text of code without comments, docstrings and formatting. It removes them from the tree.

    Raises RevisionError for code that is too deep."""
    return _dumped(tree, _Plain())


def host_digest(path: Path) -> str:
    """`digest` without the bodies of kernels, of which signature and decorators remain."""
    tree = parsed(path)
    return _hash(_dumped(tree, _Plain(_imported_names(tree))))


def _dumped(tree: ast.AST, changed: ast.NodeTransformer) -> str:
    try:
        return ast.dump(changed.visit(tree))
    except RecursionError as error:
        raise RevisionError("this code is too deep to be compared") from error


class _Plain(ast.NodeTransformer):
    """Drops statements that do nothing; with a file's imported names, kernels' bodies too."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = names or {}

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if any(map(self._is_jit, node.decorator_list)):
            node.body = []
        return self.generic_visit(node)

    def _is_jit(self, decorator: ast.expr) -> bool:
        """By what the name was imported as: another library's `jit` runs on the host."""
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        first, _, rest = ast.unparse(called).partition(".")
        known = self.names.get(first, "")
        return (f"{known}.{rest}" if rest else known) in _JIT


def parsed(path: Path) -> ast.Module:
    """The code of a file. Raises RevisionError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spellings that are to become errors
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RevisionError(f"{path} cannot be read as Python: {error}") from error


def module_file(root: Path, module: str) -> Path | None:
    """Where a module is; None for one of elsewhere, or a folder without ``__init__``."""
    if module.endswith(".py"):  # a file of ops, by its path
        return root / module if (root / module).is_file() else None
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for place in (above.joinpath(*parts) for above in roots(root)):
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


def roots(root: Path) -> list[Path]:
    """The folders of a tree in which modules are found."""
    return [root, *(path for path in [root / "src"] if path.is_dir())]


def imports_of(root: Path, module: str) -> list[str]:
    """The modules that a module of a tree asks for, those of elsewhere too."""
    path = module_file(root, module)
    return [] if path is None else list(_imported(parsed(path), root, _package(path, module)))


def _package(path: Path, module: str) -> str:
    """The package that a file's relative imports start from."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def modules_of(root: Path, package: str) -> list[str]:
    """The names of the modules and packages that are directly in a package of a tree."""
    path = module_file(root, package)
    return [] if path is None else _modules(path.parent)


def _modules(folder: Path) -> list[str]:
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return sorted(files | {path.parent.name for path in folder.glob("*/__init__.py")})


def _imported(tree: ast.Module, root: Path, package: str) -> Iterator[str]:
    """The modules that a file asks for, those of elsewhere too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if alias.asname is None:  # the name that is bound is the first of these
                    parts = alias.name.split(".")
                    yield from (".".join(parts[:n]) for n in range(1, len(parts)))
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, root, package)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            yield from (_text(argument) for argument in node.args[:1])
        elif match := _FACTORY.fullmatch(_text(node)):
            yield match[1]


def _imported_from(node: ast.ImportFrom, root: Path, package: str) -> Iterator[str]:
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return  # from above the tree
    above = parts[: len(parts) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if alias.name == "*" and (path := module_file(root, base)) and path.name == "__init__.py":
            yield from (f"{base}.{module}" for module in _modules(path.parent))
        yield base if module_file(root, inner) is None else inner


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What names stand for, by a file's absolute imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _called(tree: ast.Module) -> set[str]:
    return {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _name(function: ast.expr) -> str:
    """The last part of a function's name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _data(folder: Path) -> Iterator[Path]:
    """The files that are no code in a folder and in those inside it that are no packages; what is
    hidden is an editor's or a tool's."""
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if is_environment(path, folder):
            continue
        if path.is_dir() and not (path / "__init__.py").is_file():
            yield from _data(path)
        elif path.is_file() and path.suffix not in _NO_DATA:
            yield path


def is_environment(folder: Path, root: Path) -> bool:
    """Whether a folder of a tree is a virtual environment: its Python is elsewhere. Not a folder
    that only has its file, since git could track that, and what is in it would not be compared."""
    python = folder / "bin/python"
    inside = Path(os.path.realpath(python)).is_relative_to(os.path.realpath(root))
    return (folder / "pyvenv.cfg").is_file() and python.exists() and not inside


def _data_digest(path: Path) -> str:
    """Of what JSON and TOML say; of anything else, and what is neither, its bytes."""
    raw = path.read_bytes()
    readers = {".json": json_of, ".toml": toml_of}
    try:
        return _hash(repr(readers[path.suffix](raw.decode())))
    except (KeyError, ValueError):
        return hashlib.sha256(raw).hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
