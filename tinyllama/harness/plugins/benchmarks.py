"""The pytest plugin for timings: a record for each group, judged and saved when the group ends.

Tests measure through the fixture `recording`, in a fixture of their own that is named ``group``::

    @pytest.fixture(scope="module", params=GROUPS, ids=str)
    def group(request, recording):
        with recording.group(str(request.param)) as measured:
            measured.add(StepEntry(name="step/small-bf16/v2", seconds=..., ...))
            yield measured

A conftest says in `pytest_tinyllama_groups` what must be measured. The verdict is not left to
pytest-benchmark, which passes where a benchmark is new, missing, disabled or run under xdist. Here
the groups measured must be the groups expected, and what cannot be compared has an exit status.

Exit status: pytest's own where that is neither 0 nor 5 (1: a test failed; 2: interrupted), else
that of the worst verdict. Each verdict is a test case too, in the summary and in JUnit.
"""

import warnings
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tinyllama.harness.gate import config as settings
from tinyllama.harness.gate.device_guard import BusyError
from tinyllama.harness.machine.files import check_results_dir
from tinyllama.harness.plugins.recording import Recording
from tinyllama.harness.plugins.suite import worker_device
from tinyllama.harness.records import results
from tinyllama.harness.report.tables import terminal

RECORDING = pytest.StashKey[Recording]()


class Hooks:
    @pytest.hookspec
    def pytest_tinyllama_groups(self, config: pytest.Config) -> list[str]:  # type: ignore[empty-body]
        """The groups that must be measured on this device, whatever is collected or selected."""

    @pytest.hookspec
    def pytest_tinyllama_short_groups(self, config: pytest.Config) -> list[str]:  # type: ignore[empty-body]
        """Those that ``--groups short`` measures and expects. One that is not among the groups of
        the device is measured only if it is asked for."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tinyllama")
    group.addoption("--results-dir", metavar="DIR", help="folder of the records (default results/)")
    group.addoption(
        "--record",
        action="store_true",
        help="save a record of each group; without a comparison it is the next baseline",
    )
    group.addoption(
        "--groups",
        metavar="A,B",
        help="measure and expect only these groups; short: the few that the suite declares",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    saved_run = getattr(config.option, "benchmark_compare", None)  # True, or which one
    if saved_run is True:  # records are compared; pytest-benchmark need not have saved a run
        warned = ExitStack()
        warned.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Can't compare. No benchmark files")
        config.add_cleanup(warned.close)
    root = Path(config.option.results_dir or config.rootpath / "results")
    recording = Recording(config, root, compare=bool(saved_run))
    config.stash[RECORDING] = recording
    config.pluginmanager.register(recording, "tinyllama-recording")  # it receives the reports
    if recording.active:
        if getattr(config.option, "dist", "no") != "no":
            raise pytest.UsageError(
                "-n: timings are taken one after the other, in processes of their own: remove it"
            )
        try:
            check_results_dir(root)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        recording.stored = _stored(root)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Wait for the GPU only now, when every plugin has refused the options that it refuses."""
    recording = session.config.stash[RECORDING]
    if recording.active:
        try:
            recording.hold_gpu(worker_device(session.config))
        except BusyError as error:
            raise pytest.UsageError(str(error)) from error


def team_of(config: pytest.Config) -> settings.Config:
    """What the pyproject.toml of the session sets. Raises pytest.UsageError for a table that is
    wrong."""
    try:
        return settings.load(config.rootpath)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _stored(root: Path) -> list[results.Record]:
    try:
        return [record for _, record in results.records(root)]
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"{error}; repair or remove that file") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[RECORDING].collected(items)


@pytest.fixture(scope="session")
def recording(request: pytest.FixtureRequest) -> Recording:
    """The groups of this session: ``with recording.group(name) as measured``."""
    return request.config.stash[RECORDING]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Know which item runs, and finish the group that it was the last one of."""
    recording = item.config.stash[RECORDING]
    recording.current = item.nodeid
    result = yield
    recording.current = None
    recording.finish_left()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Conclude before any other plugin: its error must not suppress the verdicts."""
    recording = session.config.stash[RECORDING]
    recording.conclude(session)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    recording = config.stash[RECORDING]
    tables = terminal(recording.finished())
    if tables:
        terminalreporter.section("ladder")
    for line in tables:
        terminalreporter.line(line)
    lines = [*map(str, (verdict for _, verdict in recording.verdicts)), *recording.lines]
    if lines:
        terminalreporter.section("comparison" if recording.compare else "records")
    for line in lines:
        terminalreporter.line(line)
