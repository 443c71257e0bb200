"""Which benchmarks a change can reach: by the files that differ, and those that ops import.

    Python that the op imports                                 its benchmarks are timed
    matches `unrelated` of the base's pyproject.toml           nothing is timed
    data beside what the op imports, or in its package         its benchmarks are timed
    any other file that differs                                everything is timed

The instrument (`protected_files`) is the same in both trees. Python files are compared as syntax
trees without comments and docstrings. This is no proof: an op may open a file that it does not
import. So a few benchmarks that no file reaches, chosen at random, are timed all the same.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.snapshots import Difference, module_file

AUDITED = 6
# What is unrelated where a pyproject.toml names nothing.
UNRELATED = (
    *("*.md", "*.rst", "LICENSE*", ".gitignore", ".github/*", "docs/*", "results/*"),
    *("pyproject.toml", "accepted_slowdowns.toml"),  # their dependencies are looked at, and shown
    *("test_*.py", "*/test_*.py", "conftest.py", "*/conftest.py"),
)
_KERNEL_DECORATORS = ("jit", "triton.jit", "kernels.jit", "gluon.jit")
_FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+):\w+")  # "module:name", imported by its name


class Change:
    """What differs between two trees, and which benchmarks it reaches.

    unrelated: patterns of names of files. benchmarks: of both sides; set before anything is asked.
    """

    def __init__(
        self,
        base: Path,
        candidate: Path,
        differences: Sequence[Difference],
        unrelated: Sequence[str] = UNRELATED,
    ) -> None:
        self.trees = (base, candidate)
        self.unrelated = tuple(unrelated)
        self.benchmarks: list[Benchmark] = []
        counted = [e for e in differences if e.name.endswith(".py") or not self._unrelated(e.name)]
        self.differing = [
            difference.name for difference in counted if self._differs(difference, kernels=True)
        ]
        self._host = [
            difference.name for difference in counted if self._differs(difference, kernels=False)
        ]
        self.imported = cache(self._imported)
        self.everything = cache(self._everything)

    def why(self, benchmark: Benchmark, *, host: bool = False) -> str:
        """A file that differs and reaches a benchmark; empty where there is none.

        host: differences in the bodies of kernels do not count.
        """
        names = self._host if host else self.differing
        return next((name for name in names if self._reaches(name, benchmark)), "")

    def op_differs(self, benchmark: Benchmark) -> bool:
        """Whether a file of the op's own folder or file differs."""
        for root in self.trees:
            if path := module_file(root, benchmark.module):
                prefix = path.relative_to(root).as_posix().removesuffix("__init__.py")
                if any(name.startswith(prefix) for name in self.differing):
                    return True
        return False

    def files(self, benchmark: Benchmark) -> set[str]:
        """The files that a benchmark imports in either tree. A training step runs every op."""
        of = self.benchmarks if benchmark.factory else [benchmark]
        modules = {
            name
            for benchmark_of in [benchmark, *of]
            for name in (benchmark_of.module, benchmark_of.registered)
        }
        return set().union(*(self.imported(root, n) for root in self.trees for n in modules if n))

    def related(self, *, host: bool = False) -> list[str]:
        """The files that differ and that no pattern calls unrelated; host: as of `why`."""
        names = self._host if host else self.differing
        return [name for name in names if not self._unrelated(name)]

    def _unrelated(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unrelated)

    def _reaches(self, name: str, benchmark: Benchmark) -> bool:
        return name in self.everything() or self._is_read_by(name, self.files(benchmark))

    def _everything(self) -> frozenset[str]:
        """The differing files that no benchmark imports and no pattern calls unrelated."""
        imported = set[str]().union(*map(self.files, self.benchmarks))
        return frozenset(name for name in self.related() if not self._is_read_by(name, imported))

    def _is_read_by(self, name: str, imported: set[str]) -> bool:
        """Whether a file is among those that are imported, or data beside one of them."""
        if name.endswith(".py"):
            return name in imported
        folders = {str(Path(file).parent) for file in imported}
        return name in imported or self._package(name) in folders

    def _package(self, name: str) -> str:
        """The folder whose code reads a file of data: its own, or the package around it."""
        folder_of_file, *above = Path(name).parents
        for folder, code in [
            (folder_of_file, "*.py"),
            *((parent, "__init__.py") for parent in above),
        ]:
            if any(next((root / folder).glob(code), None) for root in self.trees):
                return str(folder)
        return name

    def _differs(self, difference: Difference, *, kernels: bool) -> bool:
        """Whether a file differs in what runs; not ``kernels``: their bodies aside."""
        paths = [root / difference.name for root in self.trees]
        code = difference.name.endswith(".py") and all(path.is_file() for path in paths)
        if difference.mode or not code:
            return True
        base, candidate = (code_of(path.read_bytes(), kernels=kernels) for path in paths)
        return base != candidate

    def _imported(self, root: Path, module: str) -> frozenset[str]:
        """The files of a tree that a module imports, also inside of functions."""
        files, waiting, done = set[str](), [module], set[str]()
        while waiting:
            name = waiting.pop()
            path = None if name in done else module_file(root, name)
            done.add(name)
            if path is None:
                continue
            files.add(path.relative_to(root).as_posix())
            package = ""
            if not name.endswith(".py"):
                above = name.rpartition(".")[0]
                package = name if path.name == "__init__.py" else above
                waiting.append(above)  # Python imports it first
            waiting += _imports(path, package)
        return frozenset(files)


@cache
def _imports(path: Path, package: str) -> tuple[str, ...]:
    """The names that a file imports, of which some may be attributes and no modules."""
    try:
        tree = parsed(path.read_bytes())
    except SyntaxError:
        return ()  # its import fails on that side, which says so
    return tuple(name for node in ast.walk(tree) for name in _names(node, package))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module, names, level):
            parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join(filter(None, [*parts, module]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Call(func, [ast.Constant(str(name)), *_]):
            if ast.unparse(func).rpartition(".")[2] in ("import_module", "__import__"):
                yield name
        case ast.Constant(str(text)) if match := _FACTORY.fullmatch(text):
            yield match[1]


def parsed(text: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of spellings that are to become errors
        return ast.parse(text)


def code_of(text: bytes, *, kernels: bool) -> str:
    """Code without comments, spaces and docstrings; not ``kernels``: and without their bodies.

    Docstrings count in a file that reads them.
    """
    try:
        tree = parsed(text)
    except (SyntaxError, ValueError, RecursionError):
        return repr(text)
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list) and b"__doc__" not in text:
                body[:] = [statement for statement in body if not _is_text(statement)]
        if isinstance(node, ast.FunctionDef) and not kernels and _is_kernel(node):
            node.body = []
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_kernel(function: ast.FunctionDef) -> bool:
    names = (ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list)
    return any(name in _KERNEL_DECORATORS for name in names)
