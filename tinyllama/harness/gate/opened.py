"""What the import of an op and one call of its providers open, and what they change for others.

An `Observer` is an object of a worker that has loaded the harness and no op. It forks itself for
each op. The fork imports the op's modules, calls each provider once on its smallest case, and
reports the files that were opened. Nothing is timed, and no device is used except by a provider
that needs one. Bytecode is read from an empty folder, so that each source is opened.

What is opened is told by the audit events of Python (`events`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.registry import Registry, load_file
from tinyllama.harness.gate import process_state
from tinyllama.harness.gate.events import HERE, Events, Uncached
from tinyllama.harness.gate.replaced import replaced
from tinyllama.harness.kernels.tuned import adopted
from tinyllama.harness.machine.device import cannot

HARNESS = os.path.join("tinyllama", "harness", "")
_ENVIRONMENT = os.path.join(os.path.realpath(sys.prefix), "")
SECONDS = 120.0  # for one op; interpreted calls on smallest cases take a few
_KERNELS = ("configs", "gluon", "interpreter", "libdevice", "programs", "interpreter_speed")
# What a first backward pass and a first interpreted kernel load, here for all forks. The latter
# change triton: each fork that did that itself would be made again.
_LATE = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils._device",
    *(f"tinyllama.harness.kernels.{name}" for name in _KERNELS),
)


@dataclass(frozen=True)
class Group:
    """Benchmarks that run the same modules. calls: names of ops and providers."""

    modules: tuple[str, ...]
    calls: tuple[tuple[str, str], ...] = ()


@dataclass
class Seen:
    """files: whole paths of the files that were opened. texts: those of them that were read
    otherwise than by an import: comments may decide what is run. changed: what the import, or a
    call, changed for every op, see `process_state`. unidentified: why it cannot be told what the
    group runs; empty where it can."""

    files: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    unidentified: str = ""


class Observer:
    """In a worker, whose current folder is the root of a tree.

    device: of the benchmarks, for providers that run nowhere else.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # Of this process, once it is listed, which takes long.
        self.before: process_state.Code | None = None
        self._load(_LATE)
        torch.set_num_threads(1)  # a fork of a process with busy threads could hang

    def seen(self, groups: Sequence[Group]) -> list[Seen]:
        """What each group opens and changes."""
        if not all(name.endswith(".py") for one in groups for name in one.modules):
            self._load(["scipy.stats"])  # a step's modules do; without bytecode that takes 4 s
        found, news = self._each(groups)
        again = [place for place, one in enumerate(found) if one.changed and news[place]]
        if again:  # torch changes itself when some of its modules are loaded first
            self._load(sorted(set().union(*(news[place] for place in again))))
            second, _ = self._each([groups[place] for place in again])
            for place, one in zip(again, second, strict=True):
                found[place] = one
        for changes in map(self._replaced, _orders(groups)):
            for one, group in zip(found, groups, strict=True):
                for name in group.modules:
                    one.changed |= changes.get(name, {})
        for name, file in _of_tree():
            for one in found:
                one.changed[f"module {name}"] = "loaded by the harness"
                one.files.append(file)
        return found

    def _load(self, names: Iterable[str]) -> None:
        """Load modules that are not there, for all forks."""
        for name in names:
            if name not in sys.modules:
                self.before = None
                with contextlib.suppress(Exception):  # whoever needs it sees the error
                    importlib.import_module(name)

    def _replaced(self, names: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """By module, what its import changes of those before it, in this order. Where that
        cannot be told, each module changes something."""
        with tempfile.TemporaryDirectory(prefix="observed-") as folder:
            fork = _Fork(partial(_all_imported, names), Path(folder) / "replaced.json")
            while not fork.ended():
                time.sleep(0.01)
            found, error = fork.answer()
        return {name: {"import of all files": error} for name in names} if error else found

    def _each(self, groups: Sequence[Group]) -> tuple[list[Seen], list[set[str]]]:
        waiting = list(range(len(groups)))
        running: dict[int, _Fork] = {}  # by the place of its group
        found: list[Seen] = [Seen() for _ in groups]
        news: list[set[str]] = [set() for _ in groups]
        self.before = self.before or process_state.code()
        with tempfile.TemporaryDirectory(prefix="observed-") as folder:
            while waiting or running:
                while waiting and len(running) < max(1, len(os.sched_getaffinity(0)) // 2):
                    place = waiting.pop(0)
                    say = partial(self._said, groups[place])
                    running[place] = _Fork(say, Path(folder) / f"{place}.json")
                ended = [place for place, fork in running.items() if fork.ended()]
                for place in ended:
                    found[place], news[place] = _read(running.pop(place))
                if not ended:
                    time.sleep(0.01)
        return found, news

    def _said(self, group: Group) -> dict[str, Any]:
        assert self.before is not None
        seen, news = _observed(group, self.device, self.before)
        return {"seen": asdict(seen), "news": sorted(news)}


def _of_tree() -> Iterator[tuple[str, str]]:
    """The modules of a tree, except the harness's, loaded before any op: they are in the
    place of installed ones, and what their import changed was not seen."""
    root = f"{Path.cwd().resolve()}{os.sep}"
    ours = os.path.join(root, "tinyllama", "")
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        file = spec.origin if spec and spec.has_location else None
        if file and _below(file, root) and not os.path.realpath(file).startswith(ours):
            yield name, file


def _below(file: str, root: str) -> bool:
    """Whether a file is of the tree: below its root, and not of an environment that lies there."""
    path = os.path.realpath(file)
    installed = _ENVIRONMENT.startswith(root) and path.startswith(_ENVIRONMENT)
    return path.startswith(root) and not installed


def _orders(groups: Sequence[Group]) -> Iterable[tuple[str, ...]]:
    """The names of the modules in the order of their groups, and in the other one."""
    both = (groups, groups[::-1])
    return dict.fromkeys(
        tuple(dict.fromkeys(name for group in each for name in group.modules)) for each in both
    )


class _Fork:
    """Of this process; it writes what a function says to a file that it alone has."""

    def __init__(self, say: Callable[[], Any], report: Path) -> None:
        self.report, self.began, self.status = report, time.monotonic(), 0
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, 0)
        # torch makes its pool of threads anew in a fork, without a lock. Autograd's threads, one
        # for each GPU, would do it at once, and torch would abort: "Invalid thread pool!"
        torch.set_num_threads(1)
        try:
            report.write_text(_tried(say))
        finally:  # whatever is raised: this process has nothing else to do
            os._exit(0)

    def ended(self) -> bool:
        """Whether it ended; it is ended where it takes too long."""
        if time.monotonic() - self.began > SECONDS:
            os.kill(self.pid, signal.SIGKILL)
        pid, self.status = os.waitpid(self.pid, os.WNOHANG)
        return pid == self.pid

    def answer(self) -> tuple[Any, str]:
        """What it said, or why it said nothing."""
        try:
            found = json.loads(self.report.read_text(encoding="utf-8"))
            return (None, str(found["raised"])) if "raised" in found else (found["said"], "")
        except (OSError, ValueError, KeyError, TypeError):
            return None, self._why()

    def _why(self) -> str:
        if not os.WIFSIGNALED(self.status):
            return "ended the process"
        number = os.WTERMSIG(self.status)
        late = f", which it gets after {SECONDS:.0f} s" if number == signal.SIGKILL else ""
        return f"ended the process by {signal.Signals(number).name}{late}"


def _tried(say: Callable[[], Any]) -> str:
    try:
        return json.dumps({"said": say()})
    except BaseException as error:
        text = f"raised {type(error).__name__}: {error}"
        return json.dumps({"raised": text.splitlines()[0][:300]})


def _read(fork: _Fork) -> tuple[Seen, set[str]]:
    said, error = fork.answer()
    if error:
        return Seen(unidentified=f"its import or a call {error}"), set()
    return Seen(**said["seen"]), set(said["news"])


def _observed(
    group: Group, device: torch.device, code: process_state.Code
) -> tuple[Seen, set[str]]:
    """In the fork: what a group does, and the modules of torch that it loaded first. code: of the
    process before."""
    with tempfile.TemporaryDirectory() as bytecode:
        sys.pycache_prefix, sys.dont_write_bytecode = bytecode, True
        linecache.cache = Uncached()
        events, known = Events(), process_state.loaded()
        before, seen = process_state.settings(), Seen()
        root = f"{Path.cwd().resolve()}{os.sep}"
        try:
            ops = _imported(group.modules)
            seen.changed = process_state.changes(before, process_state.settings())
            for op, provider in group.calls:
                _call(ops[op], ops[op][provider], device)
        except (Exception, SystemExit) as error:
            seen.unidentified = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        after = process_state.settings()
        for name in process_state.AT_IMPORT:  # a call may draw, and compile in a thread
            after.pop(name)
            before.pop(name)
        seen.changed |= process_state.changes(before, after)
        seen.changed |= code.changes()
        seen.changed |= code.added(lambda file: not file.startswith(HERE) and _below(file, root))
        if events.hooks:
            seen.changed["audit hooks"] = str(events.hooks)
        seen.files, seen.texts = sorted(events.files), sorted(events.texts)
        seen.unidentified = seen.unidentified or events.unidentified() or ""
        return seen, process_state.loaded() - known


def _imported(modules: Sequence[str]) -> Mapping[str, Op]:
    """The ops of some modules, by name."""
    found: dict[str, Op] = {}
    registry = Registry()
    for name in modules:
        _import(name, registry)
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is Op:
                found[value.name] = value
    return found


def _all_imported(names: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """In a fork, what each of some modules changes of others."""
    sys.dont_write_bytecode = True  # nothing is written into a tree
    return replaced(names, _import)


def _import(name: str, registry: Registry | None = None) -> None:
    """Import a module, or a file of ops."""
    if name.endswith(".py"):
        load_file(name, Registry() if registry is None else registry)
    else:
        with adopted():
            importlib.import_module(name)


def _call(op: Op, provider: Provider, device: torch.device) -> None:
    """One call of a provider on the smallest case that it covers, forward and backward."""
    on = torch.device("cpu")
    if any(cannot(need, on) for need in provider.requires):
        on = device
    cases = (OpCase(op, provider, case, dtype) for dtype in op.dtypes for case in op.cases)
    covered = [one for one in cases if one.unsupported() is None]
    if covered:
        case = min(covered, key=lambda one: elements(op, one.case))
        inputs, dtypes = case.inputs(on), provider.output_dtypes
        evaluate(op, provider.call, inputs, provider.overwrites, dtypes=dtypes)
