"""Equal source is IDENTICAL only where what an op opens is equal, and nothing changes torch for it.

The observer is a real one, in a process of its own; the trees are folders of files of ops.
"""

import py_compile
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from correctness_tests.support.gate_fakes import SIDES, Script, outcomes
from correctness_tests.support.two_trees import judged, op_file, pair, write
from tinyllama.harness.gate import identity
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.opened import Group, Seen
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.records.verdict import Outcome

BY_PATH = """spec = importlib.util.spec_from_file_location('x', HERE / 'elsewhere/x.py')
MODULE = importlib.util.module_from_spec(spec)
spec.loader.exec_module(MODULE)"""
AT_IMPORT = {
    "json": "TABLE = json.loads((HERE / 'elsewhere/x.json').read_text())",
    "runpy": "FOUND = runpy.run_path(str(HERE / 'elsewhere/x.py'))",
    "importlib": BY_PATH,
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
    "loaded": (
        "import shutil; LIB = str(HERE / 'lib.so'); shutil.copy(torch._C.__file__, LIB)\n"
        "try:\n    torch.ops.load_library(LIB)\nexcept OSError:\n    pass",
        "it loads the library",
    ),
    "spawned": (
        "import multiprocessing\n"
        "multiprocessing.get_context('spawn').Process(target=print).start()",
        "it starts a process (multiprocessing)",
    ),
    "raises": ("raise KeyError('no')", "KeyError: 'no'"),
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
    "from tinyllama.harness.check import compare as rule\n"
    "rule.compare = print": "tinyllama.harness.check.compare.compare",
    "import gc\ngc.disable()": "garbage collection",
    "gc.callbacks.append(lambda *of: None)": "calls of the garbage collector",
    "import signal, sys, threading, tracemalloc\ntracemalloc.start()": "traced memory",
    "threading.Thread(target=threading.Event().wait, daemon=True).start()": "threads of Python",
    "sys.settrace(lambda *of: None)": "tracing",
    "signal.signal(signal.SIGUSR1, print)": "signals",
    "signal.setitimer(signal.ITIMER_VIRTUAL, 900, 900)": "timers",
    "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})": "processors",
    "os.nice(1)": "priority",
    "import resource\n"
    "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))": "limits",
    "import numpy\nnumpy.seterr(over='raise')": "errors of numpy",
    "import statistics\nstatistics.median = max": "statistics.median",
    "import contextlib\ncontextlib.nullcontext.__enter__ = len": "contextlib.nullcontext.__enter__",
    "torch.nn.functional.silu.__code__ = "
    "(lambda input, inplace=False: input).__code__": "torch.nn.functional.silu, inside",
    "torch.nn.functional.rms_norm.__defaults__ = "
    "(None, None, 1.0)": "torch.nn.functional.rms_norm, inside",
    "torch.optim.SGD.__init__.__kwdefaults__['foreach'] = "
    "False": "torch.optim.sgd.SGD.__init__, inside",
    "torch.nn.modules.module.register_module_forward_hook("
    "lambda *of: None)": "torch.nn.modules.module._global_forward_hooks",
    "HOOKS = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)\n"
    "HOOKS.__enter__()": "hooks of saved tensors",
    "torch.utils.deterministic.fill_uninitialized_memory = False": "what fills memory",
    "import torch._inductor.config as c\n"
    "c.pre_grad_fusion_options = {'x': {}}": "torch._inductor.config.pre_grad_fusion_options",
    "torch.compiler.set_stance('force_eager')": "stance of the compiler",
    "sys.addaudithook(lambda *of: None)": "audit hooks",
    "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))": "priority",
    "KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)\n"
    "KEPT = torch._C._ExcludeDispatchKeyGuard(KEYS)\n"
    "KEPT.__enter__()": "_dispatch_tls_local_exclude_set",
    "from tinyllama.harness.kernels import launch_cache\n"
    "launch_cache.MOST_CACHED = 0": "tinyllama.harness.kernels.launch_cache.MOST_CACHED",
    "from tinyllama.harness.gate import benchmarks\n"
    "benchmarks.ON_CPU['device_seconds'] = 9.0": "tinyllama.harness.gate.benchmarks.ON_CPU",
    "os.chdir('..')": "folder",
}


@pytest.mark.long
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


@pytest.mark.long
def test_what_is_read_as_a_text_counts_with_comments_docstrings_and_spaces(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    """Of source too, which others compile or run without an import of it."""
    exec_ = "def again(f):\n    text = inspect.getsource(f).partition('\\n')[2]\n"
    exec_ += "    space = {'torch': torch}\n"
    exec_ += "    exec(text, space)\n    return space['made']\n\n\n"
    made = "made(x: torch.Tensor):\n    return x + x{more}"
    lines = {
        "of_module": ("N = len(__doc__ or '')", "{doc}", "{doc}, longer"),
        "of_function": ("def f():\n    '{doc}'\nN = len(f.__doc__)", "a", "b"),
        "comments": ("# {doc}\nN = len(open(__file__).read())", "a", "b"),
        "lines": ("\n" * 3 + "{doc}N = sys._getframe().f_lineno", "", "\n\n"),
        "scripted": (f"@torch.jit.script\ndef {made}", "", "  # more"),
        "handed_on": (f"def {made}\nsecond = torch.jit.script(made)", "", "  # more"),
        "compiled": (f"{exec_}@again\ndef {made}", "", "  # more"),
        "of_json": ("N = len((HERE / 'elsewhere/x.json').read_text())", "", ""),
        "alone": ("# {doc}\nN = json.loads('1')", "a", "b"),
    }
    trees = []
    for place in (1, 2):
        files = {"elsewhere/x.json": "[1]" if place == 1 else "[1 ]"}
        for name, each in lines.items():
            text = op_file(
                name, each[0].replace("{doc}", each[place]).replace("{more}", each[place])
            )
            files[f"kernels/{name}.py"] = f'"""{each[place]}"""\nimport inspect, sys\n{text}'
        trees.append(files)
    pair(tmp_path, *trees)
    found = dict(judged(tmp_path, list(lines), seen))
    assert set(found) == {f"{name}-sum" for name in lines if name != "alone"}
    assert found.pop("of_json-sum") == "it reads the text of elsewhere/x.json, which differs"
    assert found == {
        f"{name}-sum": f"it reads the text of kernels/{name}.py, which differs"
        for name in lines
        if name not in ("alone", "of_json")
    }


@pytest.mark.long
@pytest.mark.parametrize("to", ["one", "two", "no link"])
def test_a_link_that_leads_elsewhere_unidentifies_every_op(
    to: str, tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    """Both trees have both targets, so each file that is opened is the same in the other tree."""
    line = "N = len((HERE / 'table').resolve().read_bytes())"
    pair(tmp_path, {"kernels/a.py": op_file("a", line), "one": "1", "two": "12"}, {})
    (tmp_path / BASE / "table").symlink_to("one")
    if to == "no link":
        (tmp_path / CANDIDATE / "table").write_text("1")
    else:
        (tmp_path / CANDIDATE / "table").symlink_to(to)
    reason = "table leads elsewhere, or is a link on one side alone"
    assert judged(tmp_path, ["a"], seen) == ({} if to == "one" else {"a-sum": reason})


@pytest.mark.long
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


@pytest.mark.long
def test_the_names_in_a_folder_that_is_listed_are_of_what_lists_it(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    """Where nothing in it is opened. To look for a module is not to list."""
    lines = {
        "listed": "SLOW = 'slow' in str(os.listdir(HERE / 'elsewhere'))",
        "globbed": "SLOW = len([*(HERE / 'elsewhere').glob('*')]) > 1",
        "scanned": "SLOW = len([*os.scandir(HERE / 'elsewhere')]) > 1",
        "alone": "import sys; sys.path.insert(0, str(HERE / 'elsewhere')); import zz_found",
    }
    files = {f"kernels/{name}.py": op_file(name, line) for name, line in lines.items()}
    pair(tmp_path, {**files, "elsewhere/zz_found.py": ""}, {"elsewhere/slow.txt": ""})
    found = judged(tmp_path, list(lines), seen)
    reason = "it opens elsewhere, which differs"
    assert found == {f"{name}-sum": reason for name in lines if name != "alone"}


@pytest.mark.long
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


@pytest.mark.long
def test_what_an_import_changes_for_every_op_is_seen_by_its_name(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    write(tmp_path, {"patches.py": op_file("patches", "\n".join(PATCHES))})
    write(tmp_path, {"right.py": op_file("right", "import torch._dynamo, torch._inductor.config")})
    tree = Tree(BASE, tmp_path, sys.executable, "main", tmp_path)
    (right,) = seen(tree, [Group(("right.py",))])  # first: for the other they are loaded then
    assert right.changed == {}, "torch changes itself when some of its modules are loaded first"
    (patches,) = seen(tree, [Group(("patches.py",))])
    assert set(PATCHES.values()) <= set(patches.changed)


@pytest.mark.long
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


@pytest.mark.long
def test_a_file_without_benchmarks_may_patch_too(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    files = {"kernels/alone.py": op_file("alone")}
    pair(tmp_path, files, {"kernels/new.py": op_file("new", "torch.add = torch.sub")})
    assert "kernels/new.py of the candidate" in judged(tmp_path, ["alone"], seen)["alone-sum"]


def test_files_of_an_environment_are_not_of_the_tree(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    """Git may track a file that is named as that of an environment: it hides nothing."""
    read = "TABLE = (HERE / '{}/x.json').read_text()"
    places = ("env", "named")
    files = {f"kernels/{name}.py": op_file(name, read.format(name)) for name in places}
    files |= {f"{name}/pyvenv.cfg": "" for name in places} | {"named/bin/python": ""}
    before, after = ({f"{name}/x.json": text for name in places} for text in ("1", "2"))
    pair(tmp_path, {**files, **before}, after)
    for side in SIDES:
        (tmp_path / side / "env/bin").mkdir()
        (tmp_path / side / "env/bin/python").symlink_to(sys.executable)
    assert judged(tmp_path, places, seen) == {"named-sum": "it opens named/x.json, which differs"}


def observed(tree: Tree, groups: Sequence[Group]) -> list[Seen]:
    """By a process of each tree, in its folder."""
    return identity.observed(tree, groups, device=torch.device("cpu"))


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_any_difference_in_a_file_that_an_op_imports_counts(tmp_path: Path) -> None:
    """Also in a function that its calls do not run."""
    shared = "def used(x):\n    return x + x\n\n\ndef unused(x):\n    return {}\n"
    files = {
        "kernels/imports.py": op_file("imports", "from shared import used", "used(x)"),
        "kernels/late.py": op_file("late", "", "__import__('shared').used(x)"),
        "kernels/by_path.py": op_file("by_path", BY_PATH, "MODULE.call(x)"),
        "elsewhere/x.py": "def call(x):\n    if x.numel() > 2**30:\n        import shared\n"
        "    return x + x\n",
        "kernels/alone.py": op_file("alone"),
        "shared.py": shared.format(1),
    }
    pair(tmp_path, files, {"shared.py": shared.format(2)})
    names = ("imports", "late", "by_path")
    found = judged(tmp_path, [*names, "alone"], observed)
    assert found == {f"{name}-sum": "it opens shared.py, which differs" for name in names}


def test_a_table_of_a_chip_counts_for_the_ops_beside_it(
    tmp_path: Path, seen: Callable[..., list[Seen]]
) -> None:
    files = {f"{name}/op.py": op_file(name) for name in ("kernels", "other")}
    pair(tmp_path, {**files, "kernels/tuned/sm_90.json": "1"}, {"kernels/tuned/sm_90.json": "2"})
    found = judged(tmp_path, ["kernels"], seen, "op")
    assert found == {"kernels-sum": "it opens kernels/tuned/sm_90.json, which differs"}


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("differs", [True, False])
def test_a_function_that_an_import_adds_to_a_library_counts_for_every_op(
    differs: bool, tmp_path: Path
) -> None:
    """A call of another op may find it there, though its file imports nothing of the tree."""
    puts = "def zz_method(x):\n    return x + x{}\n\n\ntorch.Tensor.zz_method = zz_method"
    asks = op_file("asks", "", "x.zz_method() if hasattr(x, 'zz_method') else x + x")
    before, after = (op_file("puts", puts.format(more)) for more in ("", " + 0" * differs))
    pair(
        tmp_path,
        {"kernels/puts.py": before, "kernels/asks.py": asks},
        {"kernels/puts.py": after},
    )
    found = judged(tmp_path, ["asks", "puts"], observed)
    said = "kernels/puts.py of the base changes for every op: torch.Tensor.zz_method (zz_method)"
    assert found == (dict.fromkeys(("asks-sum", "puts-sum"), said) if differs else {})


@pytest.mark.long
def test_a_module_in_the_place_of_one_that_the_harness_loads_counts_for_every_op(
    tmp_path: Path,
) -> None:
    """What its import changed is there before an op is observed."""
    pair(tmp_path, {"kernels/alone.py": op_file("alone")}, {"sympy.py": ""})
    found = judged(tmp_path, ["alone"], observed)
    assert "changes for every op: module sympy" in found["alone-sum"]


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
