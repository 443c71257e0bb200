"""The suites of the ops that a session is about, beside a repository's own tests.

With ``--ops`` or ``--op`` and no path, nothing else is collected. Ops of pyproject.toml join a run
that names no path. ``--record`` and ``--benchmark-compare`` time the ops; any other run asks
whether they are right.
"""

import re
import sys
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tinyllama.ops
from tinyllama.bench import measure_ops
from tinyllama.harness import DeclarationError, Registry, load_file
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.gate.config import entry_points
from tinyllama.harness.measure.op_contender import declared_by, loaded
from tinyllama.harness.plugins.benchmarks import RECORDING, team_of
from tinyllama.harness.plugins.suite import OWN, worker_device
from tinyllama.suites.entry import expanded

PACKAGE = tinyllama.ops.__name__
SELECTION = pytest.StashKey["Selection"]()
PATHS = pytest.StashKey[bool]()  # whether the command line names paths
MARKERS = (
    "slow(reason): left out, unless -m asks for it",
    "quick: the first case of each provider; -m quick runs these alone",
    "target: holds a measurement to a bar",
)


@dataclass(frozen=True)
class Selection:
    """files: of ops, absolute. providers: by op, those that are meant: all of an op that these or
    entry points declare, of another op those that they register."""

    files: tuple[str, ...]
    providers: dict[str, list[Provider]]

    @property
    def ops(self) -> list[Op]:
        """The ops of these providers."""
        registry, _ = loaded(PACKAGE, self.files)
        return [registry[name] for name in self.providers]


def selected(config: pytest.Config) -> Selection:
    """What the options mean, else pyproject.toml; ``--op`` without either means an op of this
    package.

    Raises pytest.UsageError where that is nothing.
    """
    option, team = config.option, team_of(config)
    where = "[tool.tinyllama] ops of pyproject.toml:"
    if str(config.rootpath) not in sys.path:
        sys.path.insert(0, str(config.rootpath))  # a file of ops may import its neighbours
    files = tuple(option.ops or expanded(where, team.ops, config.rootpath))
    modules = () if option.ops else entry_points(config.rootpath)
    registry, file_of = loaded(PACKAGE, files, load)
    for module in (*file_of, *modules):
        if declared_by(registry, [module]):
            continue
        if module in file_of:
            raise pytest.UsageError(
                f"{file_of[module]} declares no op and no provider: see docs/check.md; name tests "
                "before --ops"
            )
        raise pytest.UsageError(
            f"the entry point {module!r} of pyproject.toml gives no op: install this project, and "
            "declare an op in that module"
        )
    if file_of or modules:
        providers = declared_by(registry, [*file_of, *modules])
    else:
        providers = {op.name: list(op.providers.values()) for op in registry.values()}
    for name in option.op:
        if name not in providers:
            text = f"--op {name!r:.80} is none of the ops: {', '.join(providers)}"
            raise pytest.UsageError(text)
    names = [name for name in providers if not option.op or name in option.op]
    return Selection(files, {name: providers[name] for name in names})


def load(file: str, registry: Registry) -> ModuleType:
    """As `load_file`. Raises pytest.UsageError, with the place in the file, for whatever a user's
    file raises, or ends with."""
    try:
        return load_file(file, registry)
    except DeclarationError as error:
        raise pytest.UsageError(f"--ops {file}: {error}") from error
    except (Exception, SystemExit) as error:
        name = re.escape(str(Path(file).resolve()))
        lines = re.findall(rf'^ *File "{name}", line (\d+)', traceback.format_exc(), re.MULTILINE)
        place = f"{file}:{lines[-1]}" if lines else file
        raise pytest.UsageError(f"--ops {place}: {type(error).__name__}: {error}") from error


class Suite(pytest.Module):
    """Tests of this package, in a session of another repository."""

    def funcnamefilter(self, name: str) -> bool:
        """Whatever that repository calls its own tests."""
        return name.startswith("test_")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[OWN] = Path(__file__).parent
    config.stash[SELECTION] = selected(config)
    by_argument = config.args_source is config.ArgsSource.ARGS
    config.stash[PATHS] = getattr(config, "workerinput", {}).get("paths_are_named", by_argument)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist hands its workers paths, whoever named them."""
    node.workerinput["paths_are_named"] = node.config.stash[PATHS]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add the suite to what a session collects, or put it in its place."""
    report = yield
    if not isinstance(collector, pytest.Session):
        return report
    config, paths = collector.config, collector.config.stash[PATHS]
    by_option = bool(config.option.ops or config.option.op)
    if by_option or not paths:
        name = "timings.py" if config.stash[RECORDING].active else "accuracy.py"
        path = Path(__file__).with_name(name)
        suite = Suite.from_parent(collector, path=path, nodeid=f"ops/{path.stem}")
        theirs = [] if by_option and not paths else report.result
        report.result = [*theirs, suite]
    return report


def pytest_tinyllama_groups(config: pytest.Config) -> list[str]:
    return measure_ops.groups(worker_device(config))


def pytest_tinyllama_short_groups(config: pytest.Config) -> list[str]:
    return measure_ops.short_groups(worker_device(config))
