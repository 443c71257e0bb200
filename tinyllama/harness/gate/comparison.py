"""Prepares the `Session` of a comparison with a revision or an interpreter.

Both sides are measured with one instrument, which is that of the harness that runs here, and never
the candidate's (`tinyllama.harness.gate.judge`): its clock, its workers, its rules of correctness,
the gate itself and what is registered with it replace the files of both trees. What is compared is
the ops, and the part of the harness that they run: `harness.kernels` and `harness.declare`.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tinyllama.harness.gate import accepted, identity, team
from tinyllama.harness.gate.benchmarks import Benchmark, Registered
from tinyllama.harness.gate.calibrate import Noise
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.judge import HARNESS
from tinyllama.harness.gate.judged import (
    BYTECODE,
    INSTRUMENT,
    INSTRUMENT_FILES,
    Change,
    changed_files,
    shadowing,
)
from tinyllama.harness.gate.pair import BASE, CANDIDATE, FACTORY, Tree, make_side
from tinyllama.harness.gate.revision import (
    RevisionError,
    check_out,
    overlay,
    tracked_files,
    untracked_code,
)
from tinyllama.harness.gate.schedule import launcher, pairs_at_once, timing_processor
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Affected, Setting
from tinyllama.harness.gate.sources import Sources, imports_of, module_file, modules_of
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.machine import worker
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.files import real


class UnreadableError(ValueError):
    """A candidate whose tree this judge cannot measure."""


@dataclass(frozen=True)
class Request:
    """What to compare the tree in ``root`` with: a commit, or (``commit`` None) itself under
    another interpreter. label: the user's name for it. results: where A/A blocks are; None: in the
    base. version: of the project; accepted entries expire by it. ops: the only ones that are
    compared; empty: all, and the steps. seconds: of each stage so far."""

    registered: Registered
    root: Path
    label: str
    commit: str | None
    python: str
    device: torch.device
    results: Path | None
    version: str
    watch: DeviceGuard
    candidate_label: str
    all_verdicts: bool = False
    ops: tuple[str, ...] = ()
    seconds: Stages = field(default_factory=Stages)
    say: Callable[[str], None] = lambda line: None
    doing: Callable[[str], None] = lambda text: None


@contextmanager
def prepared(request: Request) -> Iterator[Session]:
    """The session of a request; its folders are removed when it ends.

    Raises RevisionError, and ValueError at the end for a candidate that was edited meanwhile.
    """
    registered = request.registered
    before = contents(request.root, registered)
    if Path(tempfile.gettempdir()).resolve().is_relative_to(request.root.resolve()):
        raise ValueError(
            f"temporary files are in {tempfile.gettempdir()}, which is in the tree that is "
            "compared: set TMPDIR to another folder"
        )
    changed: list[Change] = []
    processor = timing_processor(request.device)
    trees = request.seconds.of("trees")
    with tempfile.TemporaryDirectory(prefix="gate-") as name, launcher(processor) as pairs:
        folder = Path(name)
        base_root = root = request.root
        if request.commit is not None:
            with trees:
                base_root = check_out(request.commit, request.root, folder / "base")
                changed = changes(base_root, request.root, registered)
                for bytecode in [*base_root.rglob(BYTECODE)]:
                    shutil.rmtree(bytecode)
                root = copied(request.root, folder / "candidate")
                if registered.own is None:
                    _instrumented(base_root, root, registered)
        of_base = team.load(base_root, of_base=True)
        if registered.own is not None:  # a pattern that the candidate dropped drops no benchmark
            patterns = dict.fromkeys([*registered.own.files, *of_base.ops])
            for one in patterns:  # pytest tests what it names; both sides would have it, or neither
                if os.path.isabs(one) or os.pardir in Path(one).parts:
                    raise ValueError(
                        f"{team.TABLE} ops: {one!r} leads out of the tree, and only files of a "
                        "tree are compared: name files in it"
                    )
            registered = replace(registered, own=replace(registered.own, files=tuple(patterns)))
        for file in (accepted.FILE, team.FILE):  # else nobody would review it
            if (request.root / file).exists() and not (root / file).exists():
                raise ValueError(
                    f"{request.root / file} is not in git, which ignores it or what it links to: "
                    "add it (git add --force), or delete it"
                )
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
            root,
            sys.executable,
            request.candidate_label,
            folder / "candidate-caches",
            usual=team.load(request.root).slowdowns,
        )
        threading.Thread(target=_read_ahead, args=([base_root, root], registered)).start()
        yield Session(
            Setting(
                base=base,
                candidate=candidate,
                device=request.device,
                registered=registered,
                noise=Noise.load(
                    request.results or base_root / "results", device_name(request.device)
                ),
                accepted=allowed,
                watch=request.watch,
                affected=functools.partial(
                    _affected, trees=(base, candidate), registered=registered, device=request.device
                ),
                toolchains=request.commit is None,
                all_verdicts=request.all_verdicts,
                ops=request.ops,
                processor=processor,
                at_once=pairs_at_once(request.device),
                changed=tuple(changed),
                contents=functools.partial(state, copies=folder),
                seconds=request.seconds,
                say=request.say,
                doing=request.doing,
                pairs=pairs,
            )
        )
    if contents(request.root, registered) != before:
        raise ValueError(f"{request.root} was edited while it was compared: compare it again")


def _instrumented(base: Path, candidate: Path, registered: Registered) -> None:
    """Put the judge's instrument into both trees, and compile their bytecode: workers write none.

    Raises RevisionError for a base that cannot be measured with it, UnreadableError for a
    candidate.
    """
    files = instrument(HARNESS, registered)
    check_tree(base, "base", HARNESS, files, registered)
    try:
        check_tree(candidate, "candidate", HARNESS, files, registered)
    except RevisionError as error:
        raise UnreadableError(str(error)) from error
    for tree in (base, candidate):
        overlay(HARNESS, tree, files)
    each = str(max(1, len(os.sched_getaffinity(0)) // 4))  # processes
    # Nothing of a tree runs.
    compile_all = (sys.executable, "-I", "-S", "-m", "compileall", "-qq", "-j", each)
    compiling = [
        subprocess.Popen([*compile_all, str(tree / "tinyllama")]) for tree in (base, candidate)
    ]
    try:
        for one in compiling:
            one.wait()  # a file that cannot be compiled fails where it is imported
    finally:
        for one in compiling:
            one.kill()
            one.wait()


def contents(root: Path, registered: Registered) -> str:
    """A digest of the files of a tree that workers may run."""
    found = hashlib.sha256()
    if registered.own is not None:
        paths = [*tracked_files(root), *untracked_code(root)]
    else:
        modules = ("tinyllama", registered.package, *registered.modules)
        folders = [root / name for name in sorted({name.partition(".")[0] for name in modules})]
        paths = sorted(path for folder in folders for path in folder.rglob("*"))
    for path in paths:
        if path.suffix in (".py", ".json", ".toml") and path.is_file():
            found.update(b"%s\0%s\0" % (os.fsencode(path), _digest(path)))
    return found.hexdigest()


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def state(tree: Tree, copies: Path) -> str:
    """A digest of all files of a tree: of a copy bytecode too, of a checkout what git lists."""
    found, root = hashlib.sha256(), tree.root
    inside = root.is_relative_to(copies)
    paths = root.rglob("*") if inside else {*tracked_files(root), *untracked_code(root)}
    for path in sorted(paths):
        if path.is_symlink():
            found.update(b"%s\0>%s\0" % (os.fsencode(path), os.fsencode(os.readlink(path))))
        elif path.is_file():
            found.update(b"%s\0%s\0" % (os.fsencode(path), _digest(path)))
    return found.hexdigest()


def benchmarks_of(root: Path, device: torch.device, registered: Registered) -> list[Benchmark]:
    """The benchmarks of a tree on a device, listed in a process of its own."""
    with worker.Worker("benchmarks", cwd=root) as asked:
        make_side(asked, device, registered, usual=dict(team.load(root).slowdowns))
        found: list[Benchmark] = asked.call("side", "benchmarks")
    return found


def changes(base: Path, candidate: Path, registered: Registered) -> list[Change]:
    """The files of a candidate that would judge, and differ from those of the base."""
    has = {path.relative_to(base).as_posix(): path for path in base.rglob("*") if path.is_file()}
    paths = {*tracked_files(candidate), *untracked_code(candidate)}
    here = {path.relative_to(candidate).as_posix(): path for path in paths if path.is_file()}
    modules = (module_file(HARNESS, name) for name in registered.modules)
    timing = [str(path.relative_to(HARNESS)) for path in modules if path is not None]
    hiding = shadowing(here, {name.partition(".")[0] for name in sys.modules}, has)
    return changed_files(has, here, {*timing, *hiding})


def copied(root: Path, folder: Path) -> Path:
    """A copy of a checkout: the files that git tracks or would, and untracked code; no bytecode."""
    for path in {*tracked_files(root), *untracked_code(root)}:
        if BYTECODE in path.parts:
            continue
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            to = os.readlink(path)  # a whole path would lead from the copy to the checkout
            if os.path.isabs(to) or not real(path).is_relative_to(real(root)):
                raise UnreadableError(f"{path} links out of its tree: link to {to} by a path in it")
            copy.symlink_to(to)
        elif path.is_file():
            shutil.copy2(path, copy)
    return folder


def instrument(root: Path, registered: Registered) -> list[str]:
    """The files of a tree that measure, relative to it. Raises RevisionError where one lacks."""
    found = [root / name for name in INSTRUMENT_FILES]
    for name in registered.modules:
        path = module_file(root, name)
        if path is None:
            raise RevisionError(f"{root} has no module {name!r}: both sides are measured with it")
        found.append(path)
    for name in INSTRUMENT:
        found += sorted((root / name).rglob("*.py"))
    return [str(path.relative_to(root)) for path in found]


def check_tree(
    tree: Path, who: str, judge: Path, files: Sequence[str], registered: Registered
) -> None:
    """Raise RevisionError for a tree without a module that the judge's instrument imports.

    files: of the instrument, which the tree need not have.
    """
    waiting, done = [FACTORY.partition(":")[0], registered.package, registered.modules[0]], set()
    while waiting:
        name = waiting.pop()
        path = module_file(judge, name)
        if name in done or path is None:
            continue
        done.add(name)
        file = path.relative_to(judge)
        if str(file) in files:
            waiting += imports_of(judge, name)
        elif module_file(tree, name) is None and who == "candidate":
            text = f"the candidate has no {file}, which the judge's instrument imports"
            raise RevisionError(text)
        elif module_file(tree, name) is None:
            moved = name.startswith("tinyllama.harness.") and not (tree / file).parent.is_dir()
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


def _affected(
    benchmarks: Sequence[Benchmark],
    trees: Sequence[Tree],
    registered: Registered,
    device: torch.device,
) -> dict[str, Affected]:
    """By name, why benchmarks are measured; those that run the same on both sides have no entry."""
    observe = functools.partial(identity.observed, device=device)
    of_source = {
        part: {one.name: "source" for one in benchmarks if _differs(trees, one, part)}
        for part in (0, 1)
    }
    seen = identity.Differs({}, {})
    if alike := [one for one in benchmarks if one.name not in of_source[1]]:
        seen = identity.differs(
            trees, alike, registered=registered, sources=_sources, observe=observe
        )
    whole, host = {**seen.whole, **of_source[0]}, {**seen.host, **of_source[1]}
    by_name = {one.name: one for one in benchmarks}
    return {
        name: Affected(why, host=name in host, own=_own_differs(trees, by_name[name]))
        for name, why in whole.items()
    }


def _differs(trees: Sequence[Tree], benchmark: Benchmark, part: int) -> bool:
    base, candidate = (sources(tree, benchmark)[part] for tree in trees)
    return base != candidate


def _own_differs(trees: Sequence[Tree], benchmark: Benchmark) -> bool:
    base, candidate = (sources(tree, benchmark)[0] for tree in trees)
    own = []
    for tree in trees:
        if path := module_file(tree.root, benchmark.module):
            own.append(path.relative_to(tree.root).as_posix().removesuffix("__init__.py"))
    differ = (name for name in {**base, **candidate} if base.get(name) != candidate.get(name))
    return any(name.startswith(tuple(own)) for name in differ)


def _read_ahead(roots: Sequence[Path], registered: Registered) -> None:
    """Read the source of the ops of trees, while workers start."""
    for root in roots:
        for name in modules_of(root, registered.package):
            with suppress(RevisionError, OSError):  # whoever asks for it says so
                _sources(root).of(f"{registered.package}.{name}")


_sources = functools.lru_cache(maxsize=8)(Sources)  # so that each file of a tree is read once
