"""Whether benchmarks run the same code: what `opened` sees on both sides.

A benchmark is unidentified, and is measured, where a file that it imports or opens differs, or
where files cannot tell what it runs. All are, where the import of one op changes torch, the harness
or the environment, unless it does the same on both sides from the same source.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tinyllama.harness.gate.benchmarks import Benchmark, Registered
from tinyllama.harness.gate.opened import HARNESS, Group, Seen
from tinyllama.harness.gate.pair import CANDIDATE, READY, Tree
from tinyllama.harness.gate.revision import RevisionError
from tinyllama.harness.gate.sources import Sources, is_environment, module_file, modules_of, roots
from tinyllama.harness.machine.worker import Worker, WorkerError
from tinyllama.harness.measure.op_contender import Timed

FACTORY = "tinyllama.harness.gate.opened:Observer"
Observe = Callable[[Tree, Sequence[Group]], Sequence[Seen]]
SHOWN = 3  # changes that a reason names


class Differs(NamedTuple):
    """By benchmark, why it is measured; benchmarks that run the same on both sides have no entry.
    host: the same, but differences in the bodies of kernels do not count."""

    whole: Mapping[str, str]
    host: Mapping[str, str]


def differs(
    trees: Sequence[Tree],
    benchmarks: Sequence[Benchmark],
    *,
    registered: Registered,
    sources: Callable[[Path], Sources],
    observe: Observe,
) -> Differs:
    """What of benchmarks differs between two trees."""
    groups = [_groups(tree, benchmarks, registered) for tree in trees]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(observe, trees, groups))
    seen = [dict(zip(each, found, strict=True)) for each, found in zip(groups, both, strict=True)]
    of = [_Side(tree, sources(tree.root), found) for tree, found in zip(trees, seen, strict=True)]
    if changes := list(_global(of)):
        every = dict.fromkeys((one.name for one in benchmarks), "; ".join(changes))
        return Differs(every, every)
    whole, host = (
        {one.name: why for one in benchmarks if (why := _why_measured(of, one, host=bodies_aside))}
        for bodies_aside in (False, True)
    )
    return Differs(whole, host)


def observed(tree: Tree, groups: Sequence[Group], *, device: torch.device) -> list[Seen]:
    """What groups of a tree open, seen in a process of their own."""
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}  # it forks: no CUDA in it
    given = filter(None, [os.environ.get("PYTHONPATH")])
    env["PYTHONPATH"] = os.pathsep.join([*map(str, roots(tree.root)), *given])
    module = FACTORY.partition(":")[0]
    name = f"observer of the {tree.name}"
    with Worker(name, python=tree.python, cwd=tree.root, preload=[module], env=env) as worker:
        try:
            worker.make("observer", FACTORY, device=str(device), timeout=READY)
            found: list[Seen] = worker.call("observer", "seen", list(groups), timeout=READY)
        except WorkerError as error:
            return [Seen(unidentified=f"it cannot be observed: {error}") for _ in groups]
    return found


class _Side:
    """What was seen of a tree. Files are named relative to its root."""

    def __init__(self, tree: Tree, sources: Sources, seen: Mapping[Group, Seen]) -> None:
        self.name, self.root, self.sources = tree.name, tree.root.resolve(), sources
        self.seen = {group.modules: one for group, one in seen.items()}
        self.inside = functools.cache(self._inside)

    def files(self, modules: Sequence[str], *, every: bool) -> set[str]:
        """Of a group, or of all."""
        return self.named(file for one in self.of(modules, every) for file in one.files)

    def of(self, modules: Sequence[str], every: bool) -> Iterable[Seen]:
        return self.seen.values() if every else [self.seen[tuple(modules)]]

    def named(self, files: Iterable[str]) -> set[str]:
        """The names of those that are in the tree."""
        return {name for name in map(self.inside, files) if name}

    def code(self, files: Iterable[str]) -> list[str]:
        """Those that this side has as source, without the harness."""
        code = (name for name in files if name.endswith(".py") and not name.startswith(HARNESS))
        return sorted(name for name in code if (self.root / name).is_file())

    def _inside(self, file: str) -> str:
        """Its name in the tree; empty for one of elsewhere, or of an environment in the tree."""
        path = Path(os.path.realpath(file))
        if not path.is_relative_to(self.root):
            return ""
        above = (one for one in path.parents if one.is_relative_to(self.root))
        if any(is_environment(one, self.root) for one in above):
            return ""
        return path.relative_to(self.root).as_posix()


def _groups(tree: Tree, benchmarks: Iterable[Benchmark], registered: Registered) -> list[Group]:
    """What is imported in a tree: the modules of benchmarks, with calls of their providers, and the
    other files of ops, which may change torch for all."""
    calls: dict[tuple[str, ...], dict[tuple[str, str], None]] = {}
    for one in benchmarks:
        modules = _modules(one)
        if all(map(functools.partial(module_file, tree.root), modules)):
            each = calls.setdefault(modules, {})
            if not one.factory and isinstance(one.timed, Timed):
                each[one.timed.op, one.timed.provider] = None
    own = registered.own
    if own is None:
        others = [f"{registered.package}.{n}" for n in modules_of(tree.root, registered.package)]
    else:
        others = [*(os.path.relpath(path, tree.root) for path in own.found(tree.root))]
        others += own.modules
    known = {name for modules in calls for name in modules}
    for name in others:
        if name not in known:
            calls.setdefault((name,), {})
    return [Group(modules, tuple(each)) for modules, each in calls.items()]


def _modules(benchmark: Benchmark) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (benchmark.module, benchmark.registered))))


def _global(sides: Sequence[_Side]) -> Iterable[str]:
    """What an import changes for every op, and not in the same way from the same source; and links,
    since what is read through one has the name of its target."""
    links = [_links(side.root) for side in sides]
    for name in sorted(dict(links[0].items() ^ links[1].items())):
        yield f"{name} leads elsewhere, or is a link on one side alone"
    for side in sides:
        other = next(one for one in sides if one is not side)
        for modules, seen in side.seen.items():
            if not seen.changed:
                continue
            twin = other.seen.get(modules)
            both = twin is not None and twin.changed == seen.changed
            if both and (side.name == CANDIDATE or not _why(sides, modules, every=False)):
                continue  # said of the base already, or the same
            named = [f"{name} ({value:.60})" for name, value in seen.changed.items()]
            more = [f"{len(named) - SHOWN} more"] if len(named) > SHOWN else []
            what = ", ".join([*named[:SHOWN], *more])
            yield f"{' and '.join(modules)} of the {side.name} changes for every op: {what}"


def _links(root: Path) -> dict[str, str]:
    """The links of a tree by name: where each leads."""
    found = (
        Path(folder, name)
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
        if os.path.islink(os.path.join(folder, name))
    )
    return {str(path.relative_to(root)): os.readlink(path) for path in found}


def _why(sides: Sequence[_Side], modules: tuple[str, ...], *, every: bool) -> str:
    """Why a group is unidentified; empty where it is not."""
    if reason := _unseen(sides, modules):
        return reason
    files = _opened(sides, modules, every=every)
    for name in _differing(sides, files):
        return f"it opens {name}, which differs"
    return _text_differs(sides, modules, files, every=every)


def _why_measured(sides: Sequence[_Side], benchmark: Benchmark, *, host: bool) -> str:
    """Why a benchmark is measured; empty where it runs the same on both sides. host: differences in
    the bodies of kernels do not count."""
    modules, every = _modules(benchmark), bool(benchmark.factory)
    if reason := _unseen(sides, modules):
        return reason
    opened = _opened(sides, modules, every=every)
    try:
        files = opened.union(*(side.sources.of(*modules)[0] for side in sides))
        for side in sides:  # and what code imports that is loaded by its path
            files |= side.sources.imported(*side.code(opened))
    except RevisionError as error:
        return str(error)
    for name in _differing(sides, files, host=host):
        return f"it opens {name}, which differs"
    return _text_differs(sides, modules, files, every=every)


def _unseen(sides: Sequence[_Side], modules: tuple[str, ...]) -> str:
    """Why a group cannot be told by files; empty where it can."""
    for side in sides:
        one = side.seen.get(modules)
        if one is None:
            return f"the {side.name} has no such module"
        if one.unidentified:
            return f"unidentified: {one.unidentified}"
    return ""


def _opened(sides: Sequence[_Side], modules: tuple[str, ...], *, every: bool) -> set[str]:
    return set().union(*(side.files(modules, every=every) for side in sides))


def _text_differs(
    sides: Sequence[_Side], modules: tuple[str, ...], files: Iterable[str], *, every: bool
) -> str:
    """Why comments, docstrings and spaces decide what is run: in files that are read as texts, and
    in all source where some of it looks at docstrings or at lines."""
    code = {name for name in files if name.endswith(".py") and not name.startswith(HARNESS)}
    asked = any(side.sources.asks_for_text(side.root / name) for side in sides for name in code)
    found = code if asked else set()
    for side in sides:
        found |= side.named(file for one in side.of(modules, every) for file in one.texts)
    for name in sorted(found):
        base, candidate = (side.sources.text(side.root / name) for side in sides)
        if base != candidate:
            return f"it reads the text of {name}, which differs"
    return ""


def _differing(
    sides: Sequence[_Side], files: Iterable[str], *, host: bool = False
) -> Iterator[str]:
    for name in sorted(files, key=lambda name: ((sides[0].root / name).is_dir(), name)):
        base, candidate = (side.sources.digest(side.root / name, host=host) for side in sides)
        if base != candidate:
            yield name
