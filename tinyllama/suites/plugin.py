"""The suites of the ops that a session is about, beside a repository's own tests.

With ``--ops`` or ``--op`` and no path, nothing else is collected. Ops of pyproject.toml join a run
that names no path. ``--record`` and ``--benchmark-compare`` time the ops; any other run asks
whether they are right.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tinyllama.bench import measure_ops
from tinyllama.harness.plugins.benchmarks import RECORDING, team_of
from tinyllama.harness.plugins.suite import OWN, worker_device
from tinyllama.suites import accuracy, timings
from tinyllama.suites.selection import SELECTION, selected

PATHS = pytest.StashKey[bool]()  # whether the command line names paths
MARKERS = (
    "slow(reason): left out, unless -m asks for it",
    "quick: the first case of each provider; -m quick runs these alone",
    "target: holds a measurement to a bar",
)


class Suite(pytest.Module):
    """Tests of this package, in a session of another repository."""

    def funcnamefilter(self, name: str) -> bool:
        """Whatever that repository calls its own tests."""
        return name.startswith("test_")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[OWN] = Path(__file__).parent
    config.stash[SELECTION] = selected(config, team_of(config))
    named = config.args_source is config.ArgsSource.ARGS
    config.stash[PATHS] = getattr(config, "workerinput", {}).get("paths_are_named", named)


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
    named = bool(config.option.ops or config.option.op)
    if named or not paths:
        module = timings if config.stash[RECORDING].active else accuracy
        path = Path(str(module.__file__))
        suite = Suite.from_parent(collector, path=path, nodeid=f"ops/{path.stem}")
        others = [] if named and not paths else report.result
        report.result = [*others, suite]
    return report


def pytest_tinyllama_groups(config: pytest.Config) -> list[str]:
    return measure_ops.groups(worker_device(config))


def pytest_tinyllama_short_groups(config: pytest.Config) -> list[str]:
    return measure_ops.short_groups(worker_device(config))
