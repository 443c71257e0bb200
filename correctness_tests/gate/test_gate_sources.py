"""What a benchmark runs is found whole, and what does not change it changes no fingerprint."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from correctness_tests.support.commands import ENVIRONMENT
from tinyllama.harness.gate import comparison
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.pair import Tree
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.gate.sources import Sources, closure, digest, host_digest

pytestmark = pytest.mark.usefixtures("each_file_is_read_once")
ROOT = Path(__file__).resolve().parents[2]
NORM = "tinyllama.ops.rms_norm"
KERNELS = "tinyllama/ops/rms_norm/kernels.py"
TABLE = "tinyllama/ops/rms_norm/tuned/sm_90.json"


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A copy of this project's package."""
    leave = shutil.ignore_patterns("__pycache__", "gate", "page")
    root = tmp_path_factory.mktemp("unchanged")
    shutil.copytree(ROOT / "tinyllama", root / "tinyllama", ignore=leave)
    return Sources(root)


@pytest.fixture
def tree(unchanged: Sources, tmp_path: Path) -> Path:
    """Another copy, to be changed."""
    return Path(shutil.copytree(unchanged.root, tmp_path / "tree"))


def write(root: Path, files: dict[str, str]) -> Path:
    """A made-up tree of Python files."""
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(root: Path, *modules: str) -> set[str]:
    return {path.relative_to(root).as_posix() for path in closure(root, modules)}


def change(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert old in text, f"{name} has no {old!r}"
    (root / name).write_text(text.replace(old, new, 1), encoding="utf-8")


def differing(before: Sources, after: Path, module: str = NORM) -> list[str]:
    """What is not the same in two trees: "whole", "host", both or nothing."""
    pairs = zip(("whole", "host"), before.of(module), Sources(after).of(module), strict=True)
    return [name for name, then, now in pairs if then != now]


# -- this project's tree ----------------------------------------------------------------------


@pytest.mark.long
def test_an_op_runs_what_its_file_imports_and_no_other_op() -> None:
    ops = {name for name in names(ROOT, NORM) if "/ops/" in name}
    files = ("__init__", "rms_norm/__init__", "rms_norm/kernels")
    assert ops == {f"tinyllama/ops/{name}.py" for name in files}
    assert {"tinyllama/harness/kernels/launch.py", "tinyllama/__init__.py"} <= names(ROOT, NORM)
    lazily = "tinyllama/harness/kernels/interpreter.py"
    assert lazily in names(ROOT, NORM), "imported inside a function"
    assert "tinyllama/ops/rope/__init__.py" in names(ROOT, "tinyllama.ops.block")


@pytest.mark.long
def test_who_imports_the_package_of_ops_may_use_any_of_them() -> None:
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tinyllama/ops").rglob("*.py")}
    every = {name for name in every if not name.endswith("/offsets.py")}  # imported by tests alone
    assert every <= names(ROOT, "tinyllama.ops")
    assert every <= names(ROOT, "tinyllama.model.tiers"), "`from tinyllama.ops import OPS`"


@pytest.mark.long
def test_nothing_is_imported_that_was_not_found() -> None:
    code = "import json, sys, tinyllama.bench.measure\n"
    code += "print(json.dumps([getattr(m, '__file__', 0) for m in sys.modules.values()]))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, check=True
    )
    files = [Path(file) for file in json.loads(run.stdout) if file]
    own = [path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT)]
    imported = {path.as_posix() for path in own if not path.parts[0].startswith(".")}  # no .venv
    assert "tinyllama/ops/rope/__init__.py" in imported
    assert imported <= names(ROOT, "tinyllama.bench.measure")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "old", "new", "differ"),
    [
        (KERNELS, "tl.rsqrt(tl.sum", "2 * tl.rsqrt(tl.sum", ["whole"]),
        (KERNELS, "other=0.0", "other=1.0", ["whole"]),
        (KERNELS, "WIDEST = 16384", "WIDEST = 8192", ["whole", "host"]),
        (KERNELS, "AHEAD: tl.constexpr,", "AHEAD: tl.constexpr = 1,", ["whole", "host"]),
        (KERNELS, "@jit", "@jit\n@profiled", ["whole", "host"]),
        (KERNELS, "cdiv(n_rows, 8)", "cdiv(n_rows, 4)", ["whole", "host"]),
        ("tinyllama/harness/kernels/layout.py", "return ", "return 0 or ", ["whole", "host"]),
        (TABLE, '"num_warps": ', '"num_warps": 1', ["whole", "host"]),
        ("tinyllama/ops/silu_mul/tuned/sm_90.json", '"num_warps": ', '"num_warps": 1', []),
        ("tinyllama/ops/rope/__init__.py", "import torch", "import torch, os", []),
        ("tinyllama/model/llama.py", "import torch", "import torch, os", []),
    ],
)
def test_a_change_of_what_runs_differs(
    unchanged: Sources, tree: Path, name: str, old: str, new: str, differ: list[str]
) -> None:
    change(tree, name, old, new)
    assert differing(unchanged, tree) == differ


@pytest.mark.long
def test_a_changed_op_differs_where_it_is_used(unchanged: Sources, tree: Path) -> None:
    change(tree, "tinyllama/ops/rope/__init__.py", "import torch", "import torch, os")
    assert differing(unchanged, tree, "tinyllama.ops.block") == ["whole", "host"]


@pytest.mark.long
def test_a_table_says_the_same_in_any_format(unchanged: Sources, tree: Path) -> None:
    path = tree / TABLE
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    for path in tree.rglob("*.toml"):
        path.write_text("# a remark\n\n" + path.read_text())
    assert differing(unchanged, tree) == []


def test_a_new_file_beside_a_module_differs(tmp_path: Path) -> None:
    """Of any content: what cannot be parsed counts by its bytes."""
    root = write(tmp_path, {"ops/a": "", "ops/tuned/b": ""})
    names = ("tuned/sm_80.json", "more.toml", "kernel.cu", "csrc/v2/helper.h", "table.npz", "x.so")
    for name in names:
        for text in ("{", "{ "):
            before = Sources(root)
            before.of("ops.a")
            (root / "ops" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "ops" / name).write_text(text)
            assert differing(before, root, "ops.a") == ["whole", "host"], name


def test_what_no_module_reads_beside_it_is_left_aside(tmp_path: Path) -> None:
    root = write(tmp_path, {"ops/a": "", "ops/other/b": "", "ops/other/__init__": ""})
    before = Sources(root)
    before.of("ops.a")
    for name in ("README.md", ".swp", ".cache/x", "__pycache__/a.pyc", "other/data.json"):
        (root / "ops" / name).parent.mkdir(exist_ok=True)
        (root / "ops" / name).write_text("x")
    assert differing(before, root, "ops.a") == []


def test_a_provider_of_another_file_runs_that_file_too(tmp_path: Path) -> None:
    """Else it would be IDENTICAL, whatever is done to it."""
    text = {"ops/__init__": "", "ops/norm": "OP = 1", "ops/fast": "from ops.norm import OP"}
    roots = [write(tmp_path / name, text) for name in ("before", "after")]
    trees = [Tree(r.name, r, sys.executable, r.name, r / "caches") for r in roots]
    own = Benchmark("norm-eager", None, "ops.norm", {}, registered="ops.norm")
    fast = Benchmark("norm-fast", None, "ops.norm", {}, registered="ops.fast")
    assert comparison.sources(trees[0], fast) == comparison.sources(trees[1], fast)
    roots[1] = write(tmp_path / "later", {**text, "ops/fast": "from ops.norm import OP; f = 2"})
    trees[1] = Tree("later", roots[1], sys.executable, "later", roots[1] / "caches")
    assert comparison.sources(trees[0], own) == comparison.sources(trees[1], own)
    assert comparison.sources(trees[0], fast) != comparison.sources(trees[1], fast)


def test_what_neither_tree_has_is_not_identical(tmp_path: Path) -> None:
    gone = Benchmark("gone", None, "ops.gone", {})
    trees = [Tree(side, tmp_path, "", "", tmp_path) for side in ("base", "candidate")]
    base, candidate = (comparison.sources(tree, gone) for tree in trees)
    assert base[0] != candidate[0]
    assert base[1] != candidate[1]


# -- ways to import ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import p.sub.used",
        "import p.sub.used as u",
        "from p.sub import used",
        "from p.sub.used import x",
        "from .sub import used",
        "from .sub.used import *",
        "from . import sub\nfrom .sub import *",
        "def f():\n    class C:\n        from .sub import used",
        "if TYPE_CHECKING:\n    import p.sub.used",
        "import importlib\nimportlib.import_module('p.sub.used')",
        "__import__('p.sub.used')",
        "worker.make('key', 'p.sub.used:Class')",
    ],
)
def test_every_way_to_import_is_followed(tmp_path: Path, statement: str) -> None:
    files = {
        "p/start": statement,
        "p/__init__": "from os import path",
        "p/sub/__init__": "import q",
        "p/sub/used": "import torch.nn\nfrom p.deep import x",
        "p/deep": "from ....beyond import x\nimport q.none",
        "q": "",
    }
    root = write(tmp_path, {**files, "p/other": "", "other": "", "beyond": ""})
    assert names(root, "p.start") == {f"{name}.py" for name in files}


def test_modules_that_import_each_other_and_folders_without_init(tmp_path: Path) -> None:
    files = {"a": "import space.inner.b", "space/inner/b": "import a", "space/c": ""}
    assert names(write(tmp_path, files), "a") == {"a.py", "space/inner/b.py"}


def test_a_package_that_searches_itself_is_followed_for_who_asks_for_it(tmp_path: Path) -> None:
    files = {
        "ops/__init__": "from registry import discover\nOPS = discover(__name__)",
        "ops/one": "",
        "ops/two/__init__": "import deep",
        "registry": "",
        "deep": "",
        "uses": "import ops",
        "also": "import ops.one",
        "named": "import ops.one as one",
    }
    root = write(tmp_path, files)
    alone = {"ops/__init__.py", "ops/one.py", "registry.py"}
    every = {*alone, "ops/two/__init__.py", "deep.py"}
    assert names(root, "ops.one") == alone
    assert names(root, "named") == {*alone, "named.py"}
    assert names(root, "uses") == {*every, "uses.py"}
    assert names(root, "also") == {*every, "also.py"}, "its name `ops` is the package's"
    assert names(root, "ops.one", "ops") == every


def test_what_cannot_be_followed_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path, {"a": "import broken", "broken": "def f(:"})
    with pytest.raises(RevisionError, match=r"broken\.py cannot be read as Python"):
        closure(root, ["a"])
    for name in ("gone", "a.gone", "", "..a", "/etc"):
        with pytest.raises(RevisionError, match="no module"):
            Sources(root).of(name)


def test_files_of_elsewhere_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"inside/a": "import b\nfrom .. import b", "b": ""})
    assert names(tmp_path / "inside", "a") == {"a.py"}


# -- digests ----------------------------------------------------------------------------------

BODY = "def kernel(x, N: int = 4):\n    return x + {}\n"


@pytest.mark.parametrize(
    ("head", "is_kernel"),
    [
        ("from tinyllama.harness.kernels import jit\n@jit\n", True),
        ("from tinyllama.harness.kernels import jit as made\n@made\n", True),
        ("from tinyllama.harness import kernels\n@kernels.jit\n", True),
        ("import tinyllama.harness.kernels as k\n@k.jit\n", True),
        ("import tinyllama.harness.kernels\n@tinyllama.harness.kernels.jit\n", True),
        ("import triton\n@triton.jit\n", True),
        ("import triton as t\n@t.jit\n", True),
        ("import triton\n@triton.jit(do_not_specialize=['x'])\n", True),
        ("import triton\n@triton.autotune([1], key=[])\n@triton.jit\n", True),
        ("from triton import jit\n@jit()\n", True),
        ("from numba import jit\n@jit\n", False),
        ("import torch\n@torch.jit.script\n", False),
        ("import jax\n@jax.jit\n", False),
        ("def jit(f): return f\n@jit\n", False),
        ("", False),
    ],
)
def test_only_bodies_of_kernels_are_left_to_their_compiled_code(
    tmp_path: Path, head: str, is_kernel: bool
) -> None:
    path = tmp_path / "a.py"
    found = []
    for body in (BODY.format(1), BODY.format(2)):
        path.write_text(head + body)
        found.append((digest(path), host_digest(path)))
    assert found[0][0] != found[1][0]
    assert (found[0][1] == found[1][1]) is is_kernel


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("def f():\n    pass", 'def f():\n    "words"', True),
        ("def f(): ...", "def f():\n    'a'\n    'b'", True),
        ("x = (1 +\n  2)  # three", "x = 1 + 2", True),
        ("x = 1", "x = 1.0", False),
        ("x = 'a'", "x = 'b'", False),
        ("f('a')", "f('b')", False),
        ("def f(): return 'a'", "def f(): return 'b'", False),
        ("a = 1\nb = 2", "b = 2\na = 1", False),
        ("f'{x}'", "f'{y}'", False),
    ],
)
def test_what_a_file_does_is_told_from_how_it_is_written(
    tmp_path: Path, one: str, other: str, same: bool
) -> None:
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "other.py").write_text(other)
    for found in (digest, host_digest):
        assert (found(tmp_path / "one.py") == found(tmp_path / "other.py")) is same


@pytest.mark.parametrize("terms", [600, 3000])
def test_what_is_too_deep_to_be_compared_counts_by_its_bytes(terms: int, tmp_path: Path) -> None:
    """Python runs the shorter one."""
    deep = tmp_path / "deep.py"
    deep.write_text(f"x = {' + '.join(['1'] * terms)}\n")
    data = tmp_path / "deep.json"
    data.write_text("[" * 100_000)
    for ask in (digest, host_digest):
        with pytest.raises(RevisionError, match=r"too deep|cannot be read as Python"):
            ask(deep)
    made = Sources(tmp_path)
    for path in (deep, data):
        assert made.digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
