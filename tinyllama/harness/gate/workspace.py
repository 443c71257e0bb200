"""Prepares the comparison of a candidate with a base: both trees, unpacked, and what is gated.

The instrument is that of the harness that runs here, and never the candidate's: where the trees are
of the harness itself, its files replace those of both trees (`protected_files`).
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tinyllama
from tinyllama.harness.gate import affected, config, waivers
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Benchmark, Registered, TeamOps
from tinyllama.harness.gate.calibrate import Noise
from tinyllama.harness.gate.config import Config
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.pair import Tree, make_side
from tinyllama.harness.gate.protected_files import GATE, deleted_tests, instrument, judging_files
from tinyllama.harness.gate.schedule import launcher, pairs_at_once, timing_processor
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Affected, Setting
from tinyllama.harness.gate.snapshots import Repository, Snapshot
from tinyllama.harness.gate.stages import Stages
from tinyllama.harness.machine import worker
from tinyllama.harness.machine.device import device_name

HARNESS = Path(tinyllama.__file__).resolve().parent.parent  # of this process
OPS = f"{tinyllama.__name__}.ops"  # the package whose ops every repository may use


class NotJudgedError(ValueError):
    """Two trees that cannot be compared; the message says why, and the fix."""


@dataclass(frozen=True)
class Request:
    """What to compare a snapshot with: a commit, or (None) the same tree.

    python: the interpreter of the base. tree: git's hash of the candidate. label: the user's name
    for the base. use_device, wait_until_idle: as of `Setting`.
    """

    repository: Repository
    options: Options
    tree: str
    label: str
    commit: str | None
    python: str
    device: torch.device
    guard: DeviceGuard
    use_device: Callable[[], str | None]
    wait_until_idle: Callable[[], str | None]
    seconds: Stages = field(default_factory=Stages)
    say: Callable[[str], None] = lambda line: None
    doing: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Prepared:
    """A comparison that can begin, and what is shown of the change."""

    session: Session
    change: affected.Change
    protected: Sequence[str]
    deleted_tests: Sequence[str]


@contextmanager
def prepared(request: Request) -> Iterator[Prepared]:
    """The comparison of a request; its folders are removed when it ends.

    Raises SnapshotError, and NotJudgedError, and ValueError for a configuration that is wrong.
    """
    repository, options, device = request.repository, request.options, request.device
    processor = timing_processor(device)
    trees = request.seconds.of("trees")
    with tempfile.TemporaryDirectory(prefix="gate-") as name, launcher(processor) as pairs:
        folder = Path(name)
        with trees:
            base_tree = repository.of_commit(request.commit) if request.commit else request.tree
            differences = repository.changed(base_tree, request.tree)
            ours = repository.has(base_tree, GATE)  # else the tree of another repository
            rules = config.load(HARNESS) if ours else Config()
            timing = [rules.benchmarks.partition(":")[0], *rules.timing] if rules.benchmarks else []
            replaced = instrument(HARNESS, timing) if ours else []
            snapshots = [
                repository.unpack(_instrumented(repository, tree, replaced), folder / side)
                for side, tree in ((BASE, base_tree), (CANDIDATE, request.tree))
            ]
            _compile_bytecode(snapshots)
        base, candidate = (snapshot.root for snapshot in snapshots)
        of_base, here = config.load(base, of_base=True), config.load(candidate)
        toolchains = request.python != sys.executable
        if not toolchains:
            _check_dependencies(base, candidate, [difference.name for difference in differences])
        sides = {
            BASE: Tree(
                BASE,
                base,
                request.python,
                request.label,
                folder / "base-caches",
                team_slowdowns=of_base.slowdowns,
            ),
            CANDIDATE: Tree(
                CANDIDATE,
                candidate,
                sys.executable,
                f"tree {request.tree[:10]}",
                folder / "candidate-caches",
                team_slowdowns=here.slowdowns,
            ),
        }
        change = affected.Change(
            base,
            candidate,
            repository.changed(*(snapshot.tree for snapshot in snapshots)),
            affected.UNRELATED if of_base.unrelated is None else of_base.unrelated,
        )
        project = config.project(candidate).get("project", {})
        results = Path(options.results_dir) if options.results_dir else HARNESS / "results"
        session = Session(
            Setting(
                base=sides[BASE],
                candidate=sides[CANDIDATE],
                device=device,
                registered=_registered(
                    options, rules if ours else of_base, here, (candidate, base)
                ),
                noise=Noise.load(results, device_name(device)),
                accepted=waivers.load(
                    candidate / waivers.FILE,
                    str(project.get("version", "0")),
                    base / waivers.FILE,
                    device="cpu" if device.type == "cpu" else "gpu",
                ),
                watch=request.guard,
                affected=lambda benchmarks: _affected(change, benchmarks, everything=options.all),
                toolchains=toolchains,
                audit=affected.AUDITED if change.related() else 0,
                all_verdicts=options.all_verdicts,
                ops=options.op,
                processor=processor,
                at_once=pairs_at_once(device),
                contents=lambda tree: repr(
                    [
                        repository.written(snapshot)
                        for snapshot in snapshots
                        if snapshot.root == tree.root
                    ]
                ),
                seconds=request.seconds,
                use_device=request.use_device,
                wait_until_idle=request.wait_until_idle,
                say=request.say,
                doing=request.doing,
                pairs=pairs,
            )
        )
        protected = [
            name
            for name in judging_files(differences, replaced)
            if _code(repository, base_tree, name) != _code(repository, request.tree, name)
        ]
        yield Prepared(session, change, protected, deleted_tests(differences))


def benchmarks_of(root: Path, device: torch.device, registered: Registered) -> list[Benchmark]:
    """The benchmarks of a tree on a device, listed in a process of its own."""
    with worker.Worker("benchmarks", cwd=root) as process:
        make_side(process, device, registered, team_slowdowns=dict(config.load(root).slowdowns))
        benchmarks: list[Benchmark] = process.call("side", "benchmarks")
    return benchmarks


def registered_by(rules: Config) -> Registered:
    """What the pyproject.toml of this process's harness, or of a package of ops, says is gated."""
    factory = rules.benchmarks
    modules = (factory.partition(":")[0], *rules.timing) if factory else ()
    for name in modules[:1]:
        importlib.import_module(name)  # its classes are in what workers answer
    return Registered(rules.package or OPS, factory, modules)


def _registered(options: Options, base: Config, here: Config, trees: Sequence[Path]) -> Registered:
    """What is gated. A pattern or an entry point that the candidate dropped drops no benchmark."""
    if base.package:
        if options.ops:
            raise NotJudgedError(f"--ops: the ops of {base.package} are gated here: remove it")
        return registered_by(base)
    patterns = options.ops or tuple(dict.fromkeys([*here.ops, *base.ops]))
    for pattern in patterns:
        if os.path.isabs(pattern) or os.pardir in Path(pattern).parts:
            raise ValueError(
                f"{config.TABLE} ops: {pattern!r} leads out of the tree: name files in it"
            )
    modules = tuple(dict.fromkeys(name for tree in trees for name in config.entry_points(tree)))
    if not patterns and not modules:
        raise NotJudgedError(
            "no ops are named: add --ops FILE, or [tool.tinyllama] ops to pyproject.toml"
        )
    return Registered(OPS, team_ops=TeamOps(patterns, () if options.ops else modules, options.op))


def _affected(
    change: affected.Change, benchmarks: Sequence[Benchmark], *, everything: bool
) -> Mapping[str, Affected]:
    change.benchmarks = list(benchmarks)
    if everything:
        return {benchmark.name: Affected("--all") for benchmark in benchmarks}
    return {
        benchmark.name: Affected(
            why,
            host=bool(change.why(benchmark, host=True)),
            op_differs=change.op_differs(benchmark),
        )
        for benchmark in benchmarks
        if (why := change.why(benchmark))
    }


def _check_dependencies(base: Path, candidate: Path, names: list[str]) -> None:
    if changed := config.dependencies_changed(base, candidate, names):
        raise NotJudgedError(
            f"dependencies differ in {', '.join(changed)}, and both sides would run the versions "
            "that are installed here: add --against-env PYTHON, an interpreter with the base's"
        )


def _code(repository: Repository, tree: str, name: str) -> str | None:
    """What a file of a tree says, comments aside; None where there is none."""
    text = repository.text(tree, name)
    if text is None or not name.endswith(".py"):
        return text
    return affected.code_of(os.fsencode(text), kernels=True)


def _instrumented(repository: Repository, tree: str, paths: Sequence[str]) -> str:
    return repository.replaced(tree, HARNESS, paths) if paths else tree


def _compile_bytecode(snapshots: Sequence[Snapshot]) -> None:
    """Workers write none into a tree. A file that cannot be compiled fails where it is imported."""
    processes = str(max(1, len(os.sched_getaffinity(0)) // 4))  # processes
    command = (sys.executable, "-I", "-S", "-m", "compileall", "-qq", "-j", processes)
    compiling = [
        subprocess.Popen([*command, str(snapshot.root)], stdout=subprocess.DEVNULL)
        for snapshot in snapshots
    ]
    for process in compiling:
        process.wait()
