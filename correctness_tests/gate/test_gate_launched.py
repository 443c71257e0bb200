"""What differs in a file counts for the providers whose calls could run, launch or read it.

The observers are real ones, in processes of their own; the trees are folders of files of ops.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.commands import ROOT
from correctness_tests.support.gate_fakes import SIDES, Script, outcomes
from correctness_tests.support.own_repository import OP
from correctness_tests.support.two_trees import (
    HEAD,
    benchmark,
    differences,
    judged,
    op_file,
    pair,
    write,
)
from tinyllama.harness.gate import identity
from tinyllama.harness.gate.opened import HARNESS, Group, Seen
from tinyllama.harness.gate.pair import CANDIDATE, Tree
from tinyllama.harness.gate.sources import Sources
from tinyllama.harness.records.verdict import Outcome

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
    "kept_method": ("KEPT = shared.Table", "x + x"),
    "named": ("", "shared.changed(x)"),
    "maybe": ("", "shared.changed(x) if x.numel() > 2**30 else x + x"),
    "by_text": ("", "getattr(shared, 'chan' + 'ged')(x)"),
    "by_globals": ("from shared import changed", "globals()['chan' + 'ged'](x)"),
    "in_a_table": ("TABLE = {'x': shared.changed}", "TABLE['x'](x)"),
    "by_method": ("ONE = shared.Table()", "ONE.changed_method(x)"),
    "of_a_class": ("ANOTHER = shared.Table()", "ANOTHER.kept(x)"),
    "at_import": ("BUILT = shared.build()", "x + x"),
}
ALIKE = {"nothing", "kept", "kept_method"}
needs_its_observers = pytest.mark.usefixtures("forked")  # one for each tree, in its folder


def observed(tree: Tree, groups: Sequence[Group]) -> list[Seen]:
    return identity.observed(tree, groups, device=torch.device("cpu"))


def shared(more: str = "", or_more: str = "") -> dict[str, str]:
    return {"shared.py": SHARED.format(more=more, or_more=or_more)}


@needs_its_observers
def test_a_file_counts_for_what_could_run_its_functions_that_differ(tmp_path: Path) -> None:
    names = [name for name in USES if name != "at_import"]
    lines = "\n".join(["import shared", *(USES[name][0] for name in names)])
    ops = [OP.format(name=name, body=USES[name][1]) for name in names]
    files = {"kernels/uses.py": "\n".join([HEAD, lines, *ops])}
    pair(tmp_path, {**files, **shared()}, shared(more=" + 0"))
    found = judged(tmp_path, names, observed, "uses")
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
def test_what_an_import_puts_among_the_functions_of_others_counts_for_every_op(
    tmp_path: Path,
) -> None:
    """Its call names no function of the tree, and this one does not run it."""
    shown = "def inner(x):\n    return x + x{more}\n\n\ndef method(x):\n    return inner(x)\n\n\n"
    puts = op_file("puts", f"{shown}torch.Tensor.zz_method = method")
    asks = op_file("asks", "", "x.zz_method() if x.numel() > 2**30 else x + x")
    before, after = (puts.replace("{more}", more) for more in ("", " + 0"))
    pair(
        tmp_path,
        {"kernels/puts.py": before, "kernels/asks.py": f"import kernels.puts\n{asks}"},
        {"kernels/puts.py": after},
    )
    found = judged(tmp_path, ["asks", "puts"], observed)
    assert found == {
        f"{name}-sum": "it opens kernels/puts.py, which differs" for name in ("asks", "puts")
    }


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


@needs_its_observers
@pytest.mark.parametrize("which", ["kernel", "host"])
def test_a_launcher_or_kernel_that_differs_counts_for_what_could_launch_it(
    tmp_path: Path, which: str
) -> None:
    def shared_kernels(**more: str) -> dict[str, str]:
        return {"shared_kernels.py": KERNELS.format(**({"kernel": "", "host": ""} | more))}

    ops = [WITH_KERNELS.format(name=name, body=body) for name, body in LAUNCHES.items()]
    files = {"kernels/launch.py": "\n".join(ops), "late_launcher.py": LATE, "late.py": ""}
    more = {"kernel": " + 0", "host": "\n    x.numel()"}
    pair(tmp_path, {**files, **shared_kernels()}, shared_kernels(**{which: more[which]}))
    found = judged(tmp_path, list(LAUNCHES), observed, "launch")
    assert set(found) == {f"{name}-sum" for name in ("named", "maybe", "late", "later")}
    assert set(found.values()) == {"it opens shared_kernels.py, which differs"}


@needs_its_observers
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
