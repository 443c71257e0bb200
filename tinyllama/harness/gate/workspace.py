"""Prepares the comparison of a candidate with a base: both trees, unpacked, and what is gated.

The instrument is that of the harness that runs here, and never the candidate's: where the trees are
of the harness itself, its files replace those of both trees (`protected_files`).
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import tinyllama
from tinyllama.harness.gate import affected, config, waivers
from tinyllama.harness.gate.benchmarks import BASE, CANDIDATE, Benchmark, Registered
from tinyllama.harness.gate.calibrate import Noise
from tinyllama.harness.gate.config import Config
from tinyllama.harness.gate.device_guard import DeviceGuard
from tinyllama.harness.gate.options import Options
from tinyllama.harness.gate.pair import Pair, Tree
from tinyllama.harness.gate.protected_files import GATE, deleted_tests, instrument, judging_files
from tinyllama.harness.gate.report import Base
from tinyllama.harness.gate.schedule import PairPool, pairs_at_once, timing_processor
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Affected, Setting, Stages
from tinyllama.harness.gate.snapshots import Repository, module_file
from tinyllama.harness.machine.device import device_name
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.progress import Progress

HARNESS = Path(tinyllama.__file__).resolve().parent.parent  # of this process
OPS = f"{tinyllama.__name__}.ops"  # the package whose ops every repository may use


@dataclass(frozen=True)
class Prepared:
    """A comparison that can begin, and what is shown of the change."""

    session: Session
    change: affected.Change
    protected: Sequence[str]
    deleted_tests: Sequence[str]


@contextmanager
def prepared(
    repository: Repository,
    options: Options,
    base: Base,
    candidate: str,
    *,
    folder: Path,
    guard: DeviceGuard,
    seconds: Stages,
    progress: Progress,
) -> Iterator[Prepared]:
    """The comparison of a candidate, by git's hash of its tree, with a base.

    folder: an empty one, for both trees. seconds: by stage, of earlier comparisons.

    Raises UsageError for trees that cannot be compared, and else ValueError for a configuration.
    """
    device = guard.device
    with seconds.of("trees"):
        # Where two interpreters are compared, both run the same tree.
        base_tree = repository.of_commit(base.commit) if base.commit else candidate
        differences = repository.changed(base_tree, candidate)
        ours = repository.has(base_tree, GATE)  # else the tree of another repository
        rules = config.load(HARNESS) if ours else Config()
        timing = [rules.benchmarks.partition(":")[0], *rules.timing] if rules.benchmarks else []
        replaced = instrument(HARNESS, timing) if ours else []
        trees = {
            side: repository.replaced(tree, HARNESS, replaced) if ours else tree
            for side, tree in ((BASE, base_tree), (CANDIDATE, candidate))
        }
        roots = {side: folder / side for side in trees}
        for side, root in roots.items():
            repository.unpack(trees[side], root)
    of_base, here = config.load(roots[BASE], of_base=True), config.load(roots[CANDIDATE])
    toolchains = base.python != sys.executable
    if not toolchains:
        names = [difference.name for difference in differences]
        if changed := config.dependencies_changed(roots[BASE], roots[CANDIDATE], names):
            raise UsageError(
                f"dependencies differ in {', '.join(changed)}, and both sides would run the "
                "versions that are installed here: add --against-env PYTHON, an interpreter with "
                "the base's"
            )

    def tree(side: str, python: str, label: str, stated: Config) -> Tree:
        if stated.package and not ours:
            raise ValueError(f"{config.TABLE} package: name files instead, with ops")
        registered = registered_in(roots[side], rules if ours else stated, options.ops)
        caches = folder / f"{side}-caches"
        return Tree(side, roots[side], python, label, caches, registered, stated.slowdowns)

    change = affected.Change(
        roots[BASE],
        roots[CANDIDATE],
        repository.changed(trees[BASE], trees[CANDIDATE]),
        affected.UNRELATED if of_base.unrelated is None else of_base.unrelated,
    )
    version = str(config.project(roots[CANDIDATE]).get("project", {}).get("version", ""))
    results = Path(options.results_dir) if options.results_dir else roots[BASE] / "results"
    processor = timing_processor(device)
    with PairPool(processor) as pool:
        setting = Setting(
            base=tree(BASE, base.python, base.label, of_base),
            candidate=tree(CANDIDATE, sys.executable, f"tree {candidate[:10]}", here),
            device=device,
            noise=Noise.load(results, device_name(device)),
            accepted=waivers.load(
                roots[CANDIDATE] / waivers.FILE,
                version,
                roots[BASE] / waivers.FILE,
                device="cpu" if device.type == "cpu" else "gpu",
                partial=bool(options.ops),
            ),
            guard=guard,
            affected=lambda benchmarks: _affected(change, benchmarks, everything=options.all),
            toolchains=toolchains,
            # On a CPU no body of a kernel is in what is timed.
            audit=affected.AUDITED if change.related(host=device.type == "cpu") else 0,
            all_verdicts=options.all_verdicts,
            ops=options.op,
            processor=processor,
            at_once=pairs_at_once(device),
            seconds=seconds,
            say=progress.line,
            doing=progress,
            pairs=pool.pairs,
        )
        protected = [
            name
            for name in judging_files(differences, replaced)
            if _code(repository, base_tree, name) != _code(repository, candidate, name)
        ]
        yield Prepared(Session(setting), change, protected, deleted_tests(differences))


def without_folders(text: str, folder: Path, base: str) -> str:
    """A text whose places are those in the repository; of the base's tree, as git writes them."""
    return text.replace(f"{folder / CANDIDATE}/", "").replace(f"{folder / BASE}/", f"{base}:")


def benchmarks_of(tree: Tree, device: torch.device) -> list[Benchmark]:
    """The benchmarks of a tree on a device, listed in a process of its own. Raises SideError."""
    pair = Pair([tree], device)
    try:
        pair.open()
        benchmarks: list[Benchmark] = pair.ask(tree.name, "benchmarks")
    finally:
        pair.close()
    return benchmarks


def registered_in(tree: Path, rules: Config, ops: Sequence[str] = ()) -> Registered:
    """What a tree gates, by its pyproject.toml. ops: files or patterns that replace those.

    Raises UsageError for ``ops`` of a package, and ValueError for a pattern that cannot be
    used.
    """
    if rules.package:
        if ops:
            raise UsageError(f"--ops: the ops of {rules.package} are gated here: remove it")
        if rules.benchmarks:  # its classes are in workers' answers
            importlib.import_module(rules.benchmarks.partition(":")[0])
        return Registered(rules.package, factory=rules.benchmarks)
    plugins = (module_file(tree, name) for name in config.entry_points(tree))
    files = (path.relative_to(tree).as_posix() for path in plugins if path is not None)
    patterns = tuple(ops or dict.fromkeys([*rules.ops, *files]))
    for pattern in patterns:
        if os.path.isabs(pattern) or os.pardir in Path(pattern).parts:
            raise ValueError(
                f"{config.TABLE} ops: {pattern!r} leads out of the tree: name files in it"
            )
    return Registered(OPS, patterns, own=True)


def _affected(
    change: affected.Change, benchmarks: Sequence[Benchmark], *, everything: bool
) -> Mapping[str, Affected]:
    change.benchmarks = list(benchmarks)
    return {
        benchmark.name: Affected(
            why,
            host=everything or bool(change.why(benchmark, host=True)),
            op_differs=change.op_differs(benchmark),
        )
        for benchmark in benchmarks
        if (why := "--all" if everything else change.why(benchmark))
    }


def _code(repository: Repository, tree: str, name: str) -> str | None:
    """What a file of a tree says, comments aside; None where there is none."""
    text = repository.text(tree, name)
    if text is None or not name.endswith(".py"):
        return text
    return affected.code_of(os.fsencode(text), kernels=True)
