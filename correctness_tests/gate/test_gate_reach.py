"""What a call can reach in a tree is never less than what it runs."""

import importlib
import importlib.util
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.tried import FP32, MATRIX, small
from tinyllama.harness import Provider
from tinyllama.harness.gate import opened, reach
from tinyllama.harness.gate.opened import Seen
from tinyllama.harness.gate.reach import Executed, Reached, UnboundedError

Load = Callable[..., ModuleType]
NUMBER = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Modules of a tree, from their text; later ones may import earlier ones by name."""
    made = []

    def write(text: str, name: str = "") -> ModuleType:
        name = name or f"reach_{next(NUMBER)}"
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield write
    for name in made:
        sys.modules.pop(name, None)


def names(module: ModuleType, root: Path, *others: ModuleType) -> set[str]:
    """The functions that ``call`` of a module reaches, of these modules."""
    reached = Reached(root.resolve(), module.call)
    found = set()
    for one in (module, *others):
        lines = Path(str(one.__file__)).read_text().splitlines()
        places = [line for file, line in reached.places if file == one.__file__]
        found |= {lines[line - 1].split("(")[0].split()[-1].rstrip(":") for line in places}
    return found


HIDDEN = "def hidden():\n    return 1\n\n\n"
REACHING = {
    "by its name": "def call():\n    return hidden()",
    "through another": "def middle():\n    return hidden()\n\n\ndef call():\n    return middle()",
    "in a table": "TABLE = {1: [hidden]}\n\n\ndef call():\n    return TABLE[1][0]()",
    "as a default": "def call(f=hidden):\n    return f()",
    "as a default by name": "def call(*, f=hidden):\n    return f()",
    "in a closure": "def made(f):\n    return lambda: f()\n\n\ncall = made(hidden)",
    "in a partial": "from functools import partial\ncall = partial(hidden)",
    "under a cache": "from functools import lru_cache\nkept = lru_cache(hidden)\n\n\n"
    "def call():\n    return kept()",
    "under torch's decorator": "import torch\nkept = torch.no_grad()(hidden)\n\n\n"
    "def call():\n    return kept()",
    "as an attribute of a function": "def call():\n    return call.f()\n\n\ncall.f = hidden",
    "in a method": "class K:\n    def run(self):\n        return hidden()\n\n\n"
    "one = K()\n\n\ndef call():\n    return one.run()",
    "in a base class": "class B:\n    def run(self):\n        return hidden()\n\n\n"
    "class K(B):\n    pass\n\n\ndef call():\n    return K().run()",
    "in an object": "class K:\n    pass\n\n\none = K()\none.f = hidden\n\n\n"
    "def call():\n    return one.f()",
    "in slots": "class K:\n    __slots__ = ('f',)\n\n\none = K()\none.f = hidden\n\n\n"
    "def call():\n    return one.f()",
    "in a property": "class K:\n    run = property(lambda self: hidden())\n\n\n"
    "def call():\n    return K().run",
    "of a metaclass": "class M(type):\n    def __call__(cls):\n        return hidden()\n\n\n"
    "class K(metaclass=M):\n    pass\n\n\ndef call():\n    return K()",
    "in a function inside": "def call():\n    def inner():\n        return hidden()\n"
    "    return inner()",
    "in a comprehension": "def call():\n    return [hidden() for _ in range(2)]",
    "as a bound method": "class K:\n    def run(self):\n        return hidden()\n\n\n"
    "call = K().run",
    "as what it returns": "def call():\n    return hidden",
    "beside torch": "import torch\n\n\ndef call():\n    return torch.tensor(hidden())",
    "under the name of torch's operators": "class K:\n    ops = hidden\n\n\n"
    "def call():\n    return K.ops()",
    "beside a name that is nothing": "def call(x=0):\n    return nothing if x else hidden()",
    "in a branch that is not taken": "def call(x=0):\n    return hidden() if x else 0",
    "among Python's own": "import builtins\nbuiltins.zz_hidden = hidden\n\n\n"
    "def call():\n    return zz_hidden()",
    "by a weak reference": "import weakref\nkept = weakref.ref(hidden)\n\n\n"
    "def call():\n    return kept()()",
    "in a weak table": "import weakref\nkept = weakref.WeakValueDictionary(a=hidden)\n\n\n"
    "def call():\n    return kept['a']()",
    "of a method by a weak reference": "import weakref\n\n\nclass K:\n    def run(self):\n"
    "        return hidden()\n\n\none = K()\nkept = weakref.WeakMethod(one.run)\n\n\n"
    "def call():\n    return kept()()",
    "at the end of an object": "import weakref\n\n\nclass K:\n    pass\n\n\none = K()\n"
    "kept = weakref.finalize(one, hidden)\n\n\ndef call():\n    return kept()",
    "in a context": "import contextvars\nkept = contextvars.ContextVar('kept')\n"
    "kept.set(hidden)\n\n\ndef call():\n    return kept.get()()",
    "of a module made by hand": "import types\nmade = types.ModuleType('zz_made')\n"
    "made.f = hidden\n\n\ndef call():\n    return made.f()",
    "of an autograd function": "import torch\n\n\nclass F(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, x):\n        return x\n\n"
    "    @staticmethod\n    def backward(ctx, g):\n        return hidden()\n\n\n"
    "def call(x=None):\n    return F.apply(x)",
}


@pytest.mark.parametrize("way", REACHING)
def test_what_a_call_could_run_is_reached(way: str, load: Load, tmp_path: Path) -> None:
    assert "hidden" in names(load(HIDDEN + REACHING[way] + "\n"), tmp_path)


def test_what_a_kernel_calls_is_reached(load: Load, tmp_path: Path) -> None:
    """By the line of its ``def``, where the interpreter has it begin."""
    pytest.importorskip("triton")
    text = """\
        from tinyllama.harness.kernels import jit, tl

        @jit
        def hidden(x):
            return x + 1

        @jit
        def kernel(x):
            tl.store(x, hidden(tl.load(x)))

        @jit
        def other(x):
            tl.store(x, 1)

        def call(x):
            kernel[(1,)](x)
    """
    found = names(load(text), tmp_path)
    assert {"call", "kernel", "hidden"} <= found
    assert "other" not in found


@pytest.mark.parametrize(
    "body",
    ["return other.hidden()", "return getattr(other, 'hid' + 'den')()", "return vars(other)['x']"],
)
def test_what_is_of_a_module_is_reached(body: str, load: Load, tmp_path: Path) -> None:
    other = load(HIDDEN)
    module = load(f"import {other.__name__} as other\n\n\ndef call():\n    {body}\n")
    assert "hidden" in names(module, tmp_path, other)


def test_what_an_import_inside_gives_is_reached(load: Load, tmp_path: Path) -> None:
    other = load(HIDDEN)
    text = f"def call():\n    from {other.__name__} import hidden\n    return hidden()\n"
    assert "hidden" in names(load(text), tmp_path, other)


@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded"])
@pytest.mark.parametrize("init", [False, True], ids=["folder", "package"])
@pytest.mark.parametrize(
    "text",
    [
        "from {0} import late as other\n    return other.hidden()",
        "import {0}.late as late\n    return late.hidden()",
        "import {0}.late\n    return {0}.late.hidden()",
        "from {0}.late import hidden\n    return hidden()",
    ],
)
def test_what_an_import_inside_of_a_folder_gives_is_reached(
    text: str, init: bool, loaded: bool, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without ``__init__.py`` is a module without a file."""
    folder = f"reach_{next(NUMBER)}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "late.py").write_text(HIDDEN)
    if init:
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if loaded:
        importlib.import_module(f"{folder}.late")
    call = load(f"def call():\n    {text.format(folder)}\n").call
    if text.startswith("from {0} import") and not init and not loaded:
        with pytest.raises(UnboundedError, match=f"it imports {folder} when it is called"):
            Reached(tmp_path.resolve(), call)
        return
    reached = Reached(tmp_path.resolve(), call)
    assert (sys.modules[f"{folder}.late"].__file__, 1) in reached.places


@pytest.mark.parametrize(
    "text",
    [
        "from . import late as other\n    return other.hidden()",
        "from .late import hidden\n    return hidden()",
        "from .. import late as other\n    return other.hidden()",
        "from ..late import hidden\n    return hidden()",
    ],
)
def test_what_a_relative_import_inside_gives_is_reached(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"reach_{next(NUMBER)}"
    (tmp_path / folder / "inner").mkdir(parents=True)
    for package in (folder, f"{folder}/inner"):
        (tmp_path / package / "__init__.py").touch()
    late = tmp_path / folder / ("late.py" if ".." in text else "inner/late.py")
    late.write_text(HIDDEN)
    (tmp_path / folder / "inner/own.py").write_text(f"def call():\n    {text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"{folder}.inner.own")
    assert (str(late), 1) in Reached(tmp_path.resolve(), module.call).places


@pytest.mark.parametrize(
    "text", ["from {0} import late\n    return late", "import {0}.late as late\n    return late"]
)
def test_a_module_of_the_tree_that_a_call_would_load_is_loaded(
    text: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"reach_{next(NUMBER)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "late.py").write_text(f"{HIDDEN}AT_IMPORT = hidden()\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(package)
    module = load(f"def call():\n    {text.format(package)}.AT_IMPORT\n")
    reached = Reached(tmp_path.resolve(), module.call)
    late = sys.modules[f"{package}.late"]
    assert (late.__file__, 1) in reached.places, "its import ran that"


def test_of_a_module_a_function_gets_the_attributes_that_it_takes(
    load: Load, tmp_path: Path
) -> None:
    """Not those that others name, unless the module itself is handed on."""
    other = load(HIDDEN + "def shown():\n    return 1\n")
    head = f"import {other.__name__} as other\n\n\ndef call(x=None, get=None):\n    "
    assert names(load(f"{head}return other.shown() + x.hidden\n"), tmp_path, other) == {
        "call",
        "shown",
    }
    given = names(load(f"{head}return get(other).hidden\n"), tmp_path, other)
    assert given == {"call", "hidden"}


@pytest.mark.parametrize(
    "text",
    [
        "def call():\n    return 1",
        "import torch.nn.functional as F\n\n\ndef call(x):\n    return F.hidden(x)",
        "TABLE = [hidden]\n\n\ndef call(x):\n    return x.hidden",
        "import math\nNAMES = vars(math)\n\n\ndef call():\n    return NAMES['pi']",
    ],
)
def test_what_a_call_does_not_name_is_not_reached(text: str, load: Load, tmp_path: Path) -> None:
    assert "hidden" not in names(load(HIDDEN + text + "\n"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "def call():\n    exec('hidden()')",
        "def call():\n    return eval('hidden')()",
        "def call():\n    return globals()['hidden']()",
        "import sys\n\n\ndef call():\n    return sys.modules[__name__].hidden()",
        "import sys\n\n\ndef call():\n    return sys._getframe().f_globals['hidden']()",
        "import gc\n\n\ndef call():\n    return gc.get_objects()",
        "import inspect\n\n\ndef call():\n    return inspect.stack()",
        "from importlib import import_module\n\n\ndef call():\n    return import_module('x')",
        "import pickle\n\n\ndef call(x):\n    return pickle.loads(x)",
        "import torch\n\n\ndef call(x):\n    return torch.ops.ours.hidden(x)",
        "import torch\nadd = torch.ops.aten.add\n\n\ndef call(x):\n    return add(x)",
        "def call():\n    return call.__globals__['hidden']()",
        "class B:\n    pass\n\n\ndef call():\n    return B.__subclasses__()",
        "def call():\n    import not_loaded_before\n    return not_loaded_before.f()",
        "def made():\n    yield hidden\n\n\none = made()\n\n\ndef call():\n    return next(one)",
        "import types\nkind, code = types.FunctionType, hidden.__code__\n\n\n"
        "def call():\n    return kind(code, {})()",
        "import timeit\n\n\ndef call():\n    return timeit.timeit('hidden()')",
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *of: hidden())\n\n\n"
        "def call():\n    signal.raise_signal(signal.SIGUSR1)",
        "NAMES = globals()\n\n\ndef call():\n    return NAMES['hidden']()",
    ],
)
def test_a_call_that_may_run_anything_is_unbounded(text: str, load: Load, tmp_path: Path) -> None:
    module = load(HIDDEN + text + "\n")
    with pytest.raises(UnboundedError):
        Reached(tmp_path.resolve(), module.call)


def test_what_reads_files_is_told(load: Load, tmp_path: Path) -> None:
    reads = load("from pathlib import Path\n\n\ndef call(p):\n    return Path(p).read_text()\n")
    plain = load("def call(x):\n    return x + x\n")
    assert Reached(tmp_path.resolve(), reads.call).reads_files
    assert not Reached(tmp_path.resolve(), plain.call).reads_files


def test_what_runs_is_noted_in_other_threads_too(load: Load, tmp_path: Path) -> None:
    module = load(
        HIDDEN + "import threading\n\n\ndef call():\n    one = threading.Thread(target=hidden)\n"
        "    one.start()\n    one.join()\n"
    )
    executed = Executed(tmp_path.resolve())
    module.call()
    assert not executed.places
    with executed.noting():
        module.call()
    assert {line for _, line in executed.places} == {1, 8}


def test_an_environment_inside_a_tree_is_not_of_the_tree(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv").mkdir()
    installed = load("def call():\n    import absent_package\n", "venv/installed")
    module = load(
        "from importlib import import_module\n\ncall = import_module('venv/installed').call"
    )
    root = tmp_path.resolve()
    with pytest.raises(UnboundedError, match="absent_package"):
        Reached(root, module.call)
    executed = Executed(root)
    with executed.noting(), pytest.raises(ImportError):
        module.call()
    assert executed.places
    monkeypatch.setattr(reach, "_ENVIRONMENT", f"{tmp_path / 'venv'}/")
    assert not Reached(root, module.call).places
    executed = Executed(root)
    with executed.noting(), pytest.raises(ImportError):
        installed.call()
    assert not executed.places
    # A tree below an environment is one.
    monkeypatch.setattr(reach, "_ENVIRONMENT", f"{tmp_path.parent}/")
    with pytest.raises(UnboundedError):
        Reached(root, module.call)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("changes", "news"), [(True, True), (True, False), (False, True)])
def test_what_changes_torch_as_it_loads_modules_is_seen_again_with_these_loaded(
    place: int, changes: bool, news: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change may be that of the modules, whoever loads them first."""
    done: list[object] = []
    first = [Seen(files=[name]) for name in "abc"]
    loaded: list[set[str]] = [set(), set(), set()]
    if changes:
        first[place].changed = {"torch.add": "other"}
    if news:
        loaded[place] = {"torch.z", "torch.b"}
    each: list[Any] = [(list(first), loaded), ([Seen(files=["again"])], [set()])]
    observer = object.__new__(opened.Observer)
    groups = [opened.Group((f"{name}.py",)) for name in "abc"]
    monkeypatch.setattr(observer, "_load", done.extend)

    def observed(some: list[Any]) -> Any:
        done.append(list(some))
        return each.pop(0)

    monkeypatch.setattr(observer, "_each", observed)
    monkeypatch.setattr(observer, "_replaced", lambda names: {})
    monkeypatch.setattr(opened, "_of_tree", lambda: {})
    found = observer.seen(groups)
    if changes and news:
        assert done == [groups, "torch.b", "torch.z", [groups[place]]]
        first[place] = Seen(files=["again"])
    else:
        assert done == [groups]
    assert found == first
    each = [(first[:1], loaded)]
    done.clear()
    observer.seen([opened.Group(("a.package",))])
    assert done[0] == "scipy.stats", "a step's modules load it"


def test_a_caller_that_only_returns_is_not_what_a_call_executed() -> None:
    executed, here = Executed(Path(__file__).resolve().parent), sys._getframe()
    executed._called(here, "return", None)
    executed._called(here, "c_call", None)
    assert not executed.places
    executed._called(here, "call", None)
    assert executed.places == {(here.f_code.co_filename, here.f_code.co_firstlineno)}


def test_what_is_loaded_from_a_tree_before_its_ops_is_seen_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch loads sympy: what its import changed is there before an op is observed."""
    file, ours = (
        tmp_path / "zz_in_the_place_of_another.py",
        tmp_path / "tinyllama/zz_of_a_harness.py",
    )
    ours.parent.mkdir()
    for one in (file, ours):
        one.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ours.parent))
    importlib.import_module(ours.stem)  # under any name, as that of the main module
    assert list(opened._of_tree()) == []
    importlib.import_module(file.stem)
    try:
        observer = object.__new__(opened.Observer)
        monkeypatch.setattr(observer, "_each", lambda groups: ([Seen(), Seen()], [set(), set()]))
        monkeypatch.setattr(observer, "_replaced", lambda names: {})
        changed = {f"module {file.stem}": "loaded by the harness"}
        groups = [opened.Group((f"{name}.py",)) for name in "ab"]
        assert observer.seen(groups) == [Seen([str(file)], changed=changed)] * 2
        monkeypatch.chdir("/")
        monkeypatch.setattr(reach, "_ENVIRONMENT", "/")
        assert list(opened._of_tree()) == []
    finally:
        del sys.modules[file.stem], sys.modules[ours.stem]


@pytest.mark.parametrize("bounded", [True, False])
def test_a_call_is_made_and_what_it_opened_is_noted_where_it_is_bounded(
    bounded: bool, load: Load, tmp_path: Path
) -> None:
    files = "files" if bounded else "globals()['files']"
    module = load(f"files = set()\n\n\ndef call(x):\n    {files}.add('now')\n    return x + x\n")
    op = small("twice", lambda x: x + x, {"x": MATRIX}, {"y": "N D"})
    provider = Provider(op.name, "tried", module.call, dtypes=FP32)
    module.files.add("before")
    seen, events = Seen(), Mock(files=module.files)
    opened._observe_call(op, provider, torch.device("cpu"), tmp_path.resolve(), events, seen)
    assert module.files == {"before", "now"}
    place = [(str(module.__file__), 4)]
    assert seen == (
        Seen(opens={"twice-tried": ["now"]}, reached={"twice-tried": place}) if bounded else Seen()
    )


@pytest.mark.parametrize("length", [300, 301])
def test_of_an_error_of_a_group_one_line_is_told(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ValueError: ".ljust(length, "x")

    def fails(modules: object) -> None:
        raise ValueError(text.removeprefix("ValueError: ") + "\nand more")

    for name in ("pycache_prefix", "dont_write_bytecode"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(opened, "Events", lambda: Mock(files=set(), texts=(), unidentified=str))
    monkeypatch.setattr(opened, "_imported", fails)
    code: Any = Mock(changes=dict)
    seen, _ = opened._observed(opened.Group(("a",)), torch.device("cpu"), code, Mock())
    assert seen.unidentified == text[:300]
