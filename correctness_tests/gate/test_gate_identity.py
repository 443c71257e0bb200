"""Equal source is IDENTICAL only where what an op opens is equal, and nothing changes torch for it.

The observer is a real one, in a process of its own; the trees are folders of files of ops.
"""

from __future__ import annotations

import py_compile
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gate_fakes import SIDES, Script, outcomes
from correctness_tests.support.own_repository import OP
from tinyllama import ops
from tinyllama.harness.gate import identity, opened
from tinyllama.harness.gate.opened import HARNESS, Group, Seen
from tinyllama.harness.gate.own import Own
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.gate.registered import Registered
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.sources import Sources
from tinyllama.harness.machine.worker import Worker
from tinyllama.harness.measure.op_contender import Timed
from tinyllama.harness.records.verdict import Outcome

LOCK = threading.Lock()
HEAD = "import importlib.util, json, os, pathlib, runpy, subprocess, torch\n"
HEAD += "HERE = pathlib.Path(__file__).parent.parent\n"
AT_IMPORT = {
    "json": "TABLE = json.loads((HERE / 'elsewhere/x.json').read_text())",
    "runpy": "FOUND = runpy.run_path(str(HERE / 'elsewhere/x.py'))",
    "importlib": "spec = importlib.util.spec_from_file_location('x', HERE / 'elsewhere/x.py')\n"
    "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    "os": "os.close(os.open(HERE / 'elsewhere/x.json', os.O_RDONLY))",
    "torch": "torch.load(HERE / 'elsewhere/x.pt', weights_only=True)",
}
IN_A_CALL = {
    "open": "(open(HERE / 'elsewhere/x.json').close(), x + x)[1]",
    "runpy": "(runpy.run_path(str(HERE / 'elsewhere/x.py')), x + x)[1]",
}
UNIDENTIFIED = {
    "process": ("subprocess.run(['true'])", "it starts a process (subprocess.Popen)"),
    "system": ("os.system('true')", "it starts a process (os.system)"),
    "library": ("import ctypes; ctypes.CDLL('libm.so.6')", "it loads the library libm.so.6"),
    "raises": ("raise KeyError('no')", "KeyError: 'no'"),
    "ends": ("os._exit(0)", "ended the process"),
}
PATCHES = {
    "torch.add = torch.sub": "torch.add",
    "torch.Tensor.norm = lambda self: self": "torch.Tensor.norm",
    "torch.nn.Linear.forward = lambda self, x: x": "torch.nn.modules.linear.Linear.forward",
    "torch.set_default_dtype(torch.float64)": "torch.get_default_dtype()",
    "torch.backends.cuda.matmul.allow_tf32 = True": "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark",
    "torch.use_deterministic_algorithms(True)": "torch.get_deterministic_debug_mode()",
    "torch.set_num_threads(3)": "torch.get_num_threads()",
    "torch.set_float32_matmul_precision('high')": "torch.get_float32_matmul_precision()",
    "torch.set_flush_denormal(True)": "denormals",
    "torch.manual_seed(3)": "state of the random generator",
    "torch.set_grad_enabled(False)": "torch.is_grad_enabled()",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch.backends.cuda.flash_sdp_enabled()",
    "import torch._inductor.config as c\n"
    "c.max_autotune = True": "torch._inductor.config.max_autotune",
    "os.environ['MKL_NUM_THREADS'] = '1'": "environment MKL_NUM_THREADS",
    "LIB = torch.library.Library('aten', 'IMPL')\n"
    "LIB.impl('mul.Tensor', torch.add, 'CPU')": "operator aten/mul.Tensor/CPU",
    "import time\ntime.perf_counter = time.time": "time.perf_counter",
    "from tinyllama.harness.correct import compare as rule\n"
    "rule.compare = print": "tinyllama.harness.correct.compare.compare",
    "import gc\ngc.disable()": "garbage collection",
}


@pytest.fixture(scope="module")
def observer() -> Iterator[Worker]:
    with Worker("observer", cwd=ROOT, env={"OMP_NUM_THREADS": "1"}) as worker:
        worker.make("observer", identity.FACTORY, device="cpu")
        yield worker


@pytest.fixture
def seen(observer: Worker) -> Callable[[Tree, Sequence[Group]], list[Seen]]:
    """In the place of `observed`: one process for all trees, which gets whole paths."""

    def observe(tree: Tree, groups: Sequence[Group]) -> list[Seen]:
        whole = [
            replace(one, modules=tuple(str(tree.root / name) for name in one.modules))
            for one in groups
        ]
        with LOCK:  # both sides ask at once
            found: list[Seen] = observer.call("observer", "seen", whole)
        return found

    return observe


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def op_file(name: str, line: str = "", body: str = "x + x") -> str:
    return f"{HEAD}{line}\n{OP.format(name=name, body=body)}"


def benchmark(op: str) -> Benchmark:
    file = f"kernels/{op}.py"
    return Benchmark(f"{op}-sum", Timed(op, "sum", 0, "fp32"), file, registered=file)


def judged(
    folder: Path,
    names: Sequence[str],
    seen: Callable[[Tree, Sequence[Group]], Sequence[Seen]],
) -> Mapping[str, str]:
    return differences(folder, names, seen).whole


def differences(
    folder: Path,
    names: Sequence[str],
    seen: Callable[[Tree, Sequence[Group]], Sequence[Seen]],
) -> identity.Differs:
    trees = [Tree(n, folder / n, sys.executable, n, folder / "caches") for n in (BASE, CANDIDATE)]
    return identity.differs(
        trees,
        [benchmark(name) for name in names],
        registered=Registered(ops, own=Own(("kernels/*.py",))),
        sources=Sources,
        observe=seen,
    )


def pair(folder: Path, files: dict[str, str], changed: dict[str, str]) -> None:
    """Two trees that differ in some files."""
    write(folder / BASE, files)
    write(folder / CANDIDATE, {**files, **changed})


def test_a_file_that_an_op_opens_anywhere_in_the_tree_is_its_own(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    named = {f"at_{name}": op_file(f"at_{name}", line) for name, line in AT_IMPORT.items()}
    named |= {f"in_{name}": op_file(f"in_{name}", "", body) for name, body in IN_A_CALL.items()}
    named["alone"] = op_file("alone")
    files = {f"kernels/{name}.py": text for name, text in named.items()}
    before = {"elsewhere/x.json": "[1]", "elsewhere/x.py": "x = 1\n", "other.json": "1"}
    after = {"elsewhere/x.json": "[2]", "elsewhere/x.py": "x = 2\n", "other.json": "2"}
    pair(tmp_path, {**files, **before}, after)
    for number, side in enumerate((BASE, CANDIDATE)):
        torch.save(torch.tensor(number), tmp_path / side / "elsewhere/x.pt")
    found = judged(tmp_path, list(named), seen)
    assert set(found) == {f"{name}-sum" for name in named if name != "alone"}
    assert {reason.partition(" opens ")[2] for reason in found.values()} == {
        f"elsewhere/x.{kind}, which differs" for kind in ("json", "py", "pt")
    }
    write(tmp_path / CANDIDATE, {**before, "elsewhere/x.py": "# a comment\nx = 1\n"})
    torch.save(torch.tensor(0), tmp_path / CANDIDATE / "elsewhere/x.pt")
    assert judged(tmp_path, list(named), seen) == {}


def test_a_file_that_only_one_side_has_is_a_difference(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    line = "FOUND = [p.read_text() for p in sorted((HERE / 'elsewhere').glob('*.json'))]"
    pair(
        tmp_path,
        {"kernels/one.py": op_file("one", line), "elsewhere/x.json": "1"},
        {"elsewhere/y.json": "2"},
    )
    assert judged(tmp_path, ["one"], seen) == {
        "one-sum": "it opens elsewhere/y.json, which differs"
    }


def test_what_files_cannot_tell_is_unidentified(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    files = {f"kernels/{n}.py": op_file(n, line) for n, (line, _) in UNIDENTIFIED.items()}
    hidden = "import sys; sys.path.insert(0, str(HERE / 'elsewhere')); import zz_hidden"
    files |= {"kernels/sourceless.py": op_file("sourceless", hidden), "zz_hidden.py": "x = 1\n"}
    files["kernels/alone.py"] = op_file("alone")
    pair(tmp_path, files, {})
    for side in (BASE, CANDIDATE):
        (tmp_path / side / "elsewhere").mkdir()
        compiled = tmp_path / side / "elsewhere/zz_hidden.pyc"
        py_compile.compile(str(tmp_path / side / "zz_hidden.py"), str(compiled), doraise=True)
    found = judged(tmp_path, [*UNIDENTIFIED, "sourceless", "alone"], seen)
    assert set(found) == {f"{name}-sum" for name in (*UNIDENTIFIED, "sourceless")}
    for name, (_, reason) in UNIDENTIFIED.items():
        assert reason in found[f"{name}-sum"]
    assert "imports zz_hidden without source" in found["sourceless-sum"]


def test_what_an_import_changes_for_every_op_is_seen_by_its_name(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    write(tmp_path, {"patches.py": op_file("patches", "\n".join(PATCHES))})
    write(tmp_path, {"right.py": op_file("right", "import torch._dynamo, torch._inductor.config")})
    tree = Tree(BASE, tmp_path, sys.executable, "main", tmp_path)
    patches, right = seen(tree, [Group(("patches.py",)), Group(("right.py",))])
    assert set(PATCHES.values()) <= set(patches.changed)
    assert right.changed == {}, "torch changes itself when some of its modules are loaded first"


@pytest.mark.parametrize("where", ["candidate", "both", "both, differently"])
def test_a_patch_unidentifies_every_op_and_is_named(
    tmp_path: Path, seen: Callable[..., list[Seen]], where: str
) -> None:
    patch = op_file("patching", "torch.add = torch.sub")
    before = op_file("patching") if where == "candidate" else patch
    after = patch if where != "both, differently" else patch + "\nONE = 1\n"
    files = {"kernels/alone.py": op_file("alone"), "kernels/patching.py": before}
    pair(tmp_path, files, {"kernels/patching.py": after})
    found = judged(tmp_path, ["alone", "patching"], seen)
    if where == "both":  # the same, from the same source
        assert found == {}
        return
    assert set(found) == {"alone-sum", "patching-sum"}
    side = "candidate" if where == "candidate" else "base"
    assert found["alone-sum"].startswith(
        f"kernels/patching.py of the {side} changes for every op: torch.add ("
    )


def test_a_file_without_benchmarks_may_patch_too(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    files = {"kernels/alone.py": op_file("alone")}
    pair(tmp_path, files, {"kernels/new.py": op_file("new", "torch.add = torch.sub")})
    assert "kernels/new.py of the candidate" in judged(tmp_path, ["alone"], seen)["alone-sum"]


def test_files_of_an_environment_and_of_elsewhere_are_not_of_the_tree(tmp_path: Path) -> None:
    write(tmp_path, {"a/b.py": "", "env/pyvenv.cfg": "", "env/lib/c.py": ""})
    seen = Seen([str(tmp_path / n) for n in ("a/b.py", "env/lib/c.py", "../d.py")])
    tree = Tree(BASE, tmp_path, sys.executable, "main", tmp_path)
    side = identity._Side(tree, Sources(tmp_path), {Group(("a",)): seen})
    assert side.files(["a"], every=False) == {"a/b.py"}


# -- functions that differ -----------------------------------------------------------------------

SHARED = """
import torch


def changed(x):
    return x + x{more}


def kept(x):
    return x + x


class Table:
    def changed_method(self, x):
        return x + x{more}

    def kept(self, x):
        return x + x


def build():
    return [1]{or_more}
"""
USES = {  # of a file whose functions differ; of the op, a line and the body of its provider
    "nothing": ("", "x + x"),
    "kept": ("", "shared.kept(x)"),
    "kept_method": ("TABLE = shared.Table", "x + x"),
    "named": ("", "shared.changed(x)"),
    "maybe": ("", "shared.changed(x) if x.numel() > 2**30 else x + x"),
    "by_text": ("", "getattr(shared, 'chan' + 'ged')(x)"),
    "by_globals": ("from shared import changed", "globals()['chan' + 'ged'](x)"),
    "in_a_table": ("TABLE = {'x': shared.changed}", "TABLE['x'](x)"),
    "by_method": ("ONE = shared.Table()", "ONE.changed_method(x)"),
    "of_a_class": ("ONE = shared.Table()", "ONE.kept(x)"),
    "at_import": ("TABLE = shared.build()", "x + x"),
}
ALIKE = {"nothing", "kept", "kept_method"}
needs_its_observers = pytest.mark.usefixtures("forked")  # one for each tree, in its folder


def observed(tree: Tree, groups: Sequence[Group]) -> list[Seen]:
    return identity.observed(tree, groups, device=torch.device("cpu"))


def shared(more: str = "", or_more: str = "") -> dict[str, str]:
    return {"shared.py": SHARED.format(more=more, or_more=or_more)}


@needs_its_observers
def test_a_file_counts_for_what_could_run_its_functions_that_differ(tmp_path: Path) -> None:
    head = "import shared\n"
    files = {f"kernels/{n}.py": op_file(n, head + line, body) for n, (line, body) in USES.items()}
    del files["kernels/at_import.py"]
    names = [name for name in USES if name != "at_import"]
    pair(tmp_path, {**files, **shared()}, shared(more=" + 0"))
    found = judged(tmp_path, names, observed)
    assert set(found) == {f"{name}-sum" for name in names if name not in ALIKE}
    assert set(found.values()) == {"it opens shared.py, which differs"}


@needs_its_observers
def test_a_function_that_an_import_ran_counts_for_all_that_import_its_file(tmp_path: Path) -> None:
    """What it returned may be anywhere."""
    head, names = "import shared\n", ("nothing", "kept", "named", "at_import")
    ops_of = {name: op_file(name, head + USES[name][0], USES[name][1]) for name in names}
    files = {f"kernels/{name}.py": text for name, text in ops_of.items()}
    pair(tmp_path, {**files, **shared()}, shared(or_more=" + [2]"))
    assert set(judged(tmp_path, names, observed)) == {f"{name}-sum" for name in names}


@needs_its_observers
def test_a_file_that_differs_in_more_than_functions_counts_for_all(tmp_path: Path) -> None:
    more = {
        "a_name": "\nX = 1\n",
        "defined_again": "\n\ndef changed(x):\n    return x\n",
        "decorated": "\n\n@torch.no_grad()\ndef more():\n    pass\n",
        "nothing": "",
    }
    text = shared()["shared.py"]
    files = {f"kernels/{name}.py": op_file(name, f"import of_{name}") for name in more}
    before = {f"of_{name}.py": text for name in more}
    pair(tmp_path, {**files, **before}, {f"of_{n}.py": text + after for n, after in more.items()})
    found = judged(tmp_path, list(more), observed)
    assert set(found) == {f"{name}-sum" for name in more if name != "nothing"}


# Of a file beside those of the ops: a launcher of each of two kernels, one of which another calls.
KERNELS = """
from tinyllama.harness.kernels import jit, tl


@jit
def added(x, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + place, mask=place < n){kernel}


@jit
def changed_kernel(x, y, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = added(x, n, BLOCK)
    tl.store(y + place, value + value, mask=place < n)


@jit
def kept_kernel(x, y, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < n)
    tl.store(y + place, value + value, mask=place < n)


def changed(x, y):
    changed_kernel[(1,)](x, y, x.numel(), BLOCK=4096){host}


def kept(x, y):
    kept_kernel[(1,)](x, y, x.numel(), BLOCK=4096)
"""
WITH_KERNELS = """
import torch

import shared_kernels
from tinyllama.harness import Case, Op, Tensor

{name} = Op(
    "{name}",
    inputs={{"x": Tensor("N", grad=True)}},
    outputs={{"y": "N"}},
    cases=[Case(N=4), Case(N=64, why="more")],
    timed=[Case(N=4096)],
)


@{name}.reference
def eager(x):
    return x + x


@{name}.provider("sum", requires=("triton",))
class Sum:
    @staticmethod
    def forward(x):
        y = torch.empty_like(x)
        {body}
        return y

    @staticmethod
    def backward(grads, kept, saved, needs):
        return {{"x": 2 * grads[0]}}
"""
LAUNCHES = {
    "nothing": "y.copy_(x + x)",
    "kept": "shared_kernels.kept(x, y)",
    "named": "shared_kernels.changed(x, y)",
    "maybe": "(shared_kernels.changed if x.is_cuda else shared_kernels.kept)(x, y)",
    "late": "(__import__('late'), y.copy_(x + x))[1]",
    "later": "import late_launcher\n        late_launcher.launch(x, y)",
}
LATE = "import shared_kernels\n\n\ndef launch(x, y):\n    shared_kernels.changed(x, y)\n"


@pytest.mark.parametrize("which", ["kernel", "host"])
def test_a_launcher_or_kernel_that_differs_counts_for_what_could_launch_it(
    tmp_path: Path, which: str
) -> None:
    def shared_kernels(**more: str) -> dict[str, str]:
        return {"shared_kernels.py": KERNELS.format(**({"kernel": "", "host": ""} | more))}

    files = {
        f"kernels/{name}.py": WITH_KERNELS.format(name=name, body=body)
        for name, body in LAUNCHES.items()
    }
    files |= {"late_launcher.py": LATE, "late.py": ""}
    more = {"kernel": " + 0", "host": "\n    x.numel()"}
    pair(tmp_path, {**files, **shared_kernels()}, shared_kernels(**{which: more[which]}))
    found = judged(tmp_path, list(LAUNCHES), observed)
    assert set(found) == {f"{name}-sum" for name in ("named", "maybe", "late", "later")}
    assert set(found.values()) == {"it opens shared_kernels.py, which differs"}


def test_the_table_of_a_chip_counts_for_what_the_harness_launches(tmp_path: Path) -> None:
    """It may give the same configurations; whoever reads it without the harness is measured."""
    table, read = "kernels/tuned/sm_90.json", "(HERE / 'kernels/tuned/sm_90.json').read_text()"
    bodies = {"kept": LAUNCHES["kept"], "reads": f"({read}, y.copy_(x + x))"}
    files = {f"kernels/{n}.py": WITH_KERNELS.format(name=n, body=b) for n, b in bodies.items()}
    files |= {f"kernels/{n}.py": HEAD + files[f"kernels/{n}.py"] for n in bodies}
    files["kernels/imports.py"] = (
        HEAD
        + f"TABLE = {read}\n"
        + files["kernels/kept.py"]
        .replace("kept = Op", "imports = Op")
        .replace('"kept"', '"imports"')
        .replace("@kept.", "@imports.")
    )
    files["shared_kernels.py"] = KERNELS.format(kernel="", host="")
    pair(tmp_path, {**files, table: "1", "kernels/limits.toml": "a = 1"}, {table: "2"})
    found = differences(tmp_path, ["kept", "reads", "imports"], observed)
    assert set(found.whole) == set(found.host) == {"kept-sum", "reads-sum", "imports-sum"}
    assert found.tables == {"kept-sum"}
    write(tmp_path / CANDIDATE, {table: "1", "kernels/limits.toml": "a = 2"})
    assert "kept-sum" not in differences(tmp_path, ["kept"], observed).whole, "it is not read"


@pytest.mark.parametrize(
    ("choices", "outcome"),
    [
        (({"a": "BLOCK=1"},) * 2, Outcome.IDENTICAL),
        (({"a": "BLOCK=1"}, {"a": "BLOCK=2"}), Outcome.SAME),
        (({"a": "BLOCK=1"}, {}), Outcome.SAME),
        (({}, {}), Outcome.SAME),
    ],
)
def test_equal_choices_of_tables_that_differ_are_identical(choices: Any, outcome: Outcome) -> None:
    script = Script("a", "b")
    for side, given in zip(SIDES, choices, strict=True):
        script.on(side, "choices", given)
    reasons = dict.fromkeys("ab", "it opens tuned/sm_90.json, which differs")
    found = script.run(differs=lambda *_: identity.Differs(reasons, reasons, frozenset("a")))
    assert outcomes(found) == {"a": outcome, "b": Outcome.SAME}


def test_the_harness_counts_for_what_it_launches() -> None:
    modules, name = ("ops.a",), f"{HARNESS}kernels/launch.py"
    trees = [Tree(n, ROOT, sys.executable, n, ROOT) for n in SIDES]
    one = replace(benchmark("a"), module="ops.a", registered="")
    for launched in ([], ["a-sum"]):
        seen = Seen([str(ROOT / name)], reached={"a-sum": []}, launched=launched)
        sides = [identity._Side(tree, Sources(ROOT), {Group(modules): seen}) for tree in trees]
        assert identity._apart(sides, one, name) is not bool(launched)


@needs_its_observers
def test_data_counts_for_what_could_read_it(tmp_path: Path) -> None:
    read = "def table():\n    return json.loads((HERE / 'kernels/x.json').read_text())\n"
    files = {
        "kernels/plain.py": op_file("plain"),
        "kernels/reads.py": op_file("reads", read, "(table(), x + x)[1]"),
        "kernels/may.py": op_file("may", read, "table() if x.numel() > 2**30 else x + x"),
        "kernels/imports.py": op_file("imports", f"{read}\nTABLE = table()"),
    }
    pair(tmp_path, {**files, "kernels/x.json": "1"}, {"kernels/x.json": "2"})
    found = judged(tmp_path, ["plain", "reads", "may", "imports"], observed)
    assert set(found) == {"reads-sum", "may-sum", "imports-sum"}


# -- what a comparison makes of it --------------------------------------------------------------


def test_what_is_unidentified_is_measured_and_reported() -> None:
    script = Script("a", "b", "c")
    for name in "abc":
        script.alike(name, host_only=name == "c")
    asked: list[list[str]] = []

    def differs(trees: Sequence[Tree], every: Sequence[Benchmark]) -> identity.Differs:
        asked.append([one.name for one in every])
        reasons = {"a": "it opens x.json, which differs", "c": "likewise"}
        return identity.Differs(reasons, reasons)

    found = script.run(differs=differs)
    assert outcomes(found) == {"a": Outcome.SAME, "b": Outcome.IDENTICAL, "c": Outcome.SAME}
    assert asked == [["a", "b", "c"]]
    assert script.session.report()["unidentified"]["a"] == "it opens x.json, which differs"


def test_nothing_is_observed_where_it_could_not_matter() -> None:
    """No source is the same, and a step may run anything."""
    script = Script("a")
    step = Benchmark("a", None, "ops.a", dict(script.slowdowns[BASE]), factory="m:Step")
    for side in SIDES:
        script.on(side, "benchmarks", [step])
    assert set(script.run(differs=lambda *_: pytest.fail("it was asked"))) == {"a"}


def test_native_code_of_python_and_of_known_libraries_may_run() -> None:
    noted: list[str] = []
    events: Any = SimpleNamespace(trusted=tuple(opened._folders()), native=noted)
    here = Path(torch.__file__).parent
    for file in (here / "_C.so", Path(numpy.__file__).parent / "core/x.so", "/elsewhere/x.so"):
        opened._Events._foreign(events, str(file), f"it loads {file}")
    assert noted == ["it loads /elsewhere/x.so"]
