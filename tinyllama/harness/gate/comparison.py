"""Prepares the `Session` of a comparison with a revision or an interpreter.

Both sides are measured with one instrument: the candidate's clock, its workers, the gate itself and
what is registered with it replace the base's files. What is compared is the ops, and the harness
that calls them.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tinyllama.harness import gate
from tinyllama.harness.gate import accepted, side, team
from tinyllama.harness.gate.noise import Noise
from tinyllama.harness.gate.pair import (
    BASE,
    CANDIDATE,
    Tree,
    launcher,
    make_side,
    timing_processor,
)
from tinyllama.harness.gate.registered import Registered
from tinyllama.harness.gate.revision import (
    RevisionError,
    check_out,
    overlay,
    tracked_files,
    untracked_code,
)
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Setting
from tinyllama.harness.gate.side import Benchmark
from tinyllama.harness.gate.sources import Sources, imports_of, module_file
from tinyllama.harness.gate.watch import Watch
from tinyllama.harness.machine import worker
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.measure import cache, clock, launches, op_contender

INSTRUMENT = (worker, cache, clock, launches, op_contender)  # and every module of the gate


@dataclass(frozen=True)
class Request:
    """What to compare the tree in ``root`` with: a commit, or (``commit`` None) itself under
    another interpreter. label: the user's name for it. version: of the project; accepted entries
    expire by it."""

    registered: Registered
    root: Path
    label: str
    commit: str | None
    python: str
    device: torch.device
    results: Path
    version: str
    watch: Watch
    candidate_label: str
    say: Callable[[str], None] = lambda line: None


@contextmanager
def prepared(request: Request) -> Iterator[Session]:
    """The session of a request; its folders are removed when it ends.

    Raises RevisionError, and ValueError at the end for a candidate that was edited meanwhile.
    """
    registered = request.registered
    before = contents(request.root, registered)
    processor = timing_processor(request.device)
    with tempfile.TemporaryDirectory(prefix="gate-") as name, launcher(processor) as pairs:
        folder = Path(name)
        base_root = request.root
        if request.commit is not None:
            base_root = check_out(request.commit, request.root, folder / "base")
            if registered.own is None:
                files = instrument(request.root, registered)
                check_base(base_root, request.root, files, registered)
                overlay(request.root, base_root, files)
        of_base = team.load(base_root, of_base=True)
        if registered.own is not None:  # a pattern that the candidate dropped drops no benchmark
            patterns = dict.fromkeys([*registered.own.files, *of_base.ops])
            registered = replace(registered, own=replace(registered.own, files=tuple(patterns)))
        allowed = accepted.load(
            request.root / accepted.FILE,
            request.version,
            base_root / accepted.FILE,
            device="cpu" if request.device.type == "cpu" else "gpu",
        )
        base = Tree(
            BASE,
            base_root,
            request.python,
            request.label,
            folder / "base-caches",
            usual=of_base.slowdowns,
        )
        candidate = Tree(
            CANDIDATE,
            request.root,
            sys.executable,
            request.candidate_label,
            folder / "candidate-caches",
            usual=team.load(request.root).slowdowns,
        )
        yield Session(
            Setting(
                base=base,
                candidate=candidate,
                device=request.device,
                registered=registered,
                noise=Noise.load(request.results, device_name(request.device)),
                accepted=allowed,
                watch=request.watch,
                sources=sources,
                toolchains=request.commit is None,
                processor=processor,
                say=request.say,
                pairs=pairs,
            )
        )
    if contents(request.root, registered) != before:
        raise ValueError(f"{request.root} was edited while it was compared: compare it again")


def contents(root: Path, registered: Registered) -> str:
    """A digest of the files of a tree that workers may run."""
    found = hashlib.sha256()
    if registered.own is not None:
        paths = [*tracked_files(root), *untracked_code(root)]
    else:
        modules = (gate.__name__, registered.package, *registered.modules)
        folders = [root / name for name in sorted({name.partition(".")[0] for name in modules})]
        paths = sorted(path for folder in folders for path in folder.rglob("*"))
    for path in paths:
        if path.suffix in (".py", ".json", ".toml") and path.is_file():
            found.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def benchmarks_of(root: Path, device: torch.device, registered: Registered) -> list[Benchmark]:
    """The benchmarks of a tree on a device, listed in a process of its own."""
    with worker.Worker("benchmarks", cwd=root) as asked:
        make_side(asked, device, registered, usual=dict(team.load(root).slowdowns))
        found: list[Benchmark] = asked.call("side", "benchmarks")
    return found


def instrument(root: Path, registered: Registered) -> list[str]:
    """The files of a tree that measure, relative to it. Raises RevisionError where one lacks."""
    names = [*(module.__name__ for module in INSTRUMENT), *registered.modules]
    files = {name: module_file(root, name) for name in (*names, gate.__name__)}
    for name, path in files.items():
        if path is None:
            raise RevisionError(f"{root} has no module {name!r}: both sides are measured with it")
    folder = files.pop(gate.__name__)
    assert folder is not None
    found = [*filter(None, files.values()), *sorted(folder.parent.glob("*.py"))]
    return [str(path.relative_to(root)) for path in found]


def check_base(base: Path, candidate: Path, files: Sequence[str], registered: Registered) -> None:
    """Raise RevisionError for a base without a module that the candidate's instrument imports.

    files: of the instrument, which the base need not have.
    """
    waiting, done = [side.__name__, registered.package, registered.modules[0]], set()
    while waiting:
        name = waiting.pop()
        path = module_file(candidate, name)
        if name in done or path is None:
            continue
        done.add(name)
        file = path.relative_to(candidate)
        if str(file) in files:
            waiting += imports_of(candidate, name)
        elif module_file(base, name) is None:
            moved = name.startswith("tinyllama.harness.") and not (base / file).parent.is_dir()
            since = "the harness was moved into folders" if moved else "that file was added"
            raise RevisionError(
                f"the base has no {file}, which the gate's instrument imports: it is from before "
                f"{since}. Compare with a commit that has it; git log --diff-filter=A -- {file} "
                "names the first"
            )


def sources(tree: Tree, benchmark: Benchmark) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Digests by file of the source that a benchmark runs in a tree: of all of it, and without the
    bodies of kernels. A tree without its modules equals no other."""
    modules = dict.fromkeys(filter(None, (benchmark.module, benchmark.registered)))
    try:
        return _sources(tree.root).of(*modules)
    except RevisionError:
        return {"": tree.name}, {"": tree.name}  # equal to nothing


_sources = functools.lru_cache(maxsize=8)(Sources)  # so that each file of a tree is read once
