"""Two trees of files of ops, and what the gate finds to differ between them."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.commands import ROOT
from correctness_tests.support.own_repository import OP
from tinyllama import ops
from tinyllama.harness.gate import identity, sources
from tinyllama.harness.gate.benchmarks import Benchmark, Own, Registered
from tinyllama.harness.gate.opened import Group, Seen
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Tree
from tinyllama.harness.machine.worker import Worker
from tinyllama.harness.measure.op_contender import Timed

HEAD = "import importlib.util, json, os, pathlib, runpy, subprocess, torch\n"
HEAD += "HERE = pathlib.Path(__file__).parent.parent\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def op_file(name: str, line: str = "", body: str = "x + x") -> str:
    return f"{HEAD}{line}\n{OP.format(name=name, body=body)}"


def benchmark(op: str, file: str = "") -> Benchmark:
    file = f"kernels/{file or op}.py"
    return Benchmark(f"{op}-sum", Timed(op, "sum", 0, "fp32"), file, registered=file)


def judged(
    folder: Path,
    names: Sequence[str],
    seen: Callable[[Tree, Sequence[Group]], Sequence[Seen]],
    file: str = "",
) -> Mapping[str, str]:
    """By benchmark, what differs. file: the one with all of the ops; empty where each has its own,
    with its name."""
    trees = [Tree(n, folder / n, sys.executable, n, folder / "caches") for n in (BASE, CANDIDATE)]
    return identity.differs(
        trees,
        [benchmark(name, file) for name in names],
        registered=Registered(ops.__name__, own=Own(("kernels/*.py",))),
        sources=sources.Sources,
        observe=seen,
    ).whole


def pair(folder: Path, files: dict[str, str], changed: dict[str, str]) -> None:
    """Two trees that differ in some files."""
    write(folder / BASE, files)
    write(folder / CANDIDATE, {**files, **changed})


@pytest.fixture(scope="module")
def each_file_is_read_once() -> Iterator[None]:
    """A file that is the same in many trees is parsed for its digest in one of them."""
    known: dict[tuple[str, bytes], str] = {}

    def once(plain: Callable[[Path], str], path: Path) -> str:
        key = plain.__name__, path.read_bytes()
        return known.get(key) or known.setdefault(key, plain(path))

    with pytest.MonkeyPatch.context() as patch:
        for plain in (sources.digest, sources.host_digest):
            patch.setattr(sources, plain.__name__, partial(once, plain))
        yield


LOCK = threading.Lock()
OTHER = "<root>"  # stands for the root of a tree


@pytest.fixture(scope="module")
def observer() -> Iterator[Worker]:
    with Worker("observer", cwd=ROOT, env={"OMP_NUM_THREADS": "1"}) as worker:
        worker.make("observer", identity.FACTORY, device="cpu")
        yield worker


@pytest.fixture(scope="module")
def observed_before() -> dict[Any, str]:
    """What groups of a tree of some files do, with its root replaced."""
    return {}


@pytest.fixture
def seen(
    observer: Worker, observed_before: dict[Any, str]
) -> Callable[[Tree, Sequence[Group]], list[Seen]]:
    """In the place of `observed`: one process for all trees, which gets whole paths, and is not
    asked again about a tree that did not change, nor about an equal one elsewhere."""

    def observe(tree: Tree, groups: Sequence[Group]) -> list[Seen]:
        root = str(tree.root)
        whole = [
            replace(one, modules=tuple(str(tree.root / name) for name in one.modules))
            for one in groups
        ]
        files = sorted(path for path in tree.root.rglob("*") if path.is_file())
        texts = tuple((str(path.relative_to(root)), path.read_bytes()) for path in files)
        key = tuple(groups), texts
        with LOCK:  # both sides ask at once
            if key not in observed_before:
                found = observer.call("observer", "seen", whole)
                text = json.dumps([asdict(one) for one in found])
                observed_before[key] = text.replace(root, OTHER)
        text = observed_before[key].replace(OTHER, root)
        return [Seen(**one) for one in json.loads(text)]

    return observe
