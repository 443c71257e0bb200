"""The pytest plugin of the gate: ``pytest --benchmark-compare --against REV``.

No test of the session is run: the gate times both sides itself, all benchmarks that either side
has. A conftest says in `pytest_tinyllama_benchmarks` what those are. Each verdict is a test case in
the summary and in JUnit, and the worst is the exit status.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import tinyllama
from tinyllama.harness.gate import judge
from tinyllama.harness.gate.benchmarks import Registered
from tinyllama.harness.gate.interrupted import time_limit
from tinyllama.harness.gate.revision import RevisionError, tree_of
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import real
from tinyllama.harness.plugins.benchmarks import check_measuring
from tinyllama.harness.plugins.gating import Gating, asked_of
from tinyllama.harness.plugins.suite import LEFT_OUT

GATING = pytest.StashKey[Gating | None]()
# Options that would leave benchmarks out, or measure something else.
REFUSED = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "groups": "--groups",
    "record": "--record",
    "benchmark_autosave": "--benchmark-autosave",
    "benchmark_save": "--benchmark-save",
    "benchmark_json": "--benchmark-json",
}


# Options of which an empty text, as of a variable that is not set, would count as not given.
TEXTS = (
    *("against", "against_env", "judge", "tree", "gate_json"),
    *("device", "results_dir", "op", "ops"),
)
# Options with which pytest ends before a test could run.
ENDS_EARLY = {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "setupplan": "--setup-plan",
    "setuponly": "--setup-only",
    "help": "--help",
    "version": "--version",
    "markers": "--markers",
    "cacheshow": "--cache-show",
}


class Hooks:
    @pytest.hookspec
    def pytest_tinyllama_benchmarks(self, config: pytest.Config) -> Registered:  # type: ignore[empty-body]
        """What the gate compares, beside the tests; one conftest of a session says so."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tinyllama")
    group.addoption(
        "--against",
        action="append",
        default=[],
        metavar="REV",
        help="gate this tree against a branch, tag or commit; repeatable",
    )
    group.addoption(
        "--against-env",
        action="append",
        default=[],
        metavar="PYTHON",
        help="gate this interpreter, with its torch and triton, against another one",
    )
    group.addoption(
        "--judge",
        metavar="REV",
        help="whose harness judges: a revision or a folder (default: that of the first --against)",
    )
    group.addoption(
        "--tree",
        metavar="DIR",
        help="judge that checkout, with the harness that runs here (default: start a judge)",
    )
    group.addoption("--gate-json", metavar="FILE", help="write all that the gate measured")
    group.addoption(
        "--all-verdicts",
        action="store_true",
        help="decide every benchmark (default: once one is SLOWER the others are NOT DECIDED)",
    )
    group.addoption(
        "--time-limit",
        type=time_limit,
        metavar="SECONDS",
        help="end the gate after this time; the report has what was decided, and is not green",
    )
    group.addoption(
        "--unwatched", action="store_true", help="gate on a GPU whose load cannot be read"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Refuse what ends a session before anything is compared, and have another harness judge."""
    option = config.option
    for name in TEXTS:
        value = getattr(option, name, None)
        if "" in (value if isinstance(value, list) else [value]):
            raise pytest.UsageError(
                f"--{name.replace('_', '-')} is empty: give a value, or leave it out"
            )
    if not (option.against or option.against_env):
        return None
    for name, shown in ENDS_EARLY.items():
        if getattr(option, name, None):
            raise pytest.UsageError(f"{shown}: nothing would be compared; remove it")
    if option.tree is not None:
        return None
    _refuse(config)
    try:
        root = Path(tree_of(config.rootpath))
        if not root.samefile(config.rootpath):
            raise pytest.UsageError(
                f"the gate compares whole repositories, and the root of this session is "
                f"{config.rootpath}: add --rootdir {root}"
            )
        names = config.args if config.args_source is config.ArgsSource.ARGS else []
        given = [arg for arg in config.invocation_params.args if arg not in names]
        here = config.invocation_params.dir
        paths = [os.path.relpath(real(here / name), real(root)) for name in names]
        report = Path(option.gate_json).absolute() if option.gate_json else None
        asked_of(config, root, here, names).check_all()
        named = (option.against, option.judge, report, _ours(config))
        return judge.run(root, list(map(str, given)), paths, *named)
    except (RevisionError, UsageError) as error:
        raise pytest.UsageError(str(error)) from error


def _refuse(config: pytest.Config) -> None:
    """Options that would leave something out, or measure something else."""
    check_measuring(config)
    option = config.option
    for name, shown in REFUSED.items():
        if given := getattr(option, name, None):
            if hasattr(given, "close"):  # pytest-benchmark opens the file of --benchmark-json
                given.close()
            raise pytest.UsageError(f"{shown}: the gate times every benchmark; remove it")
    if getattr(option, "benchmark_compare_fail", None):
        raise pytest.UsageError(
            "--benchmark-compare-fail: the gate's thresholds are declared by the benchmarks, and "
            "accepted_slowdowns.toml accepts more; remove it"
        )
    if isinstance(getattr(option, "benchmark_compare", None), str):
        raise pytest.UsageError(
            f"--benchmark-compare {option.benchmark_compare!r}: the gate compares revisions, no "
            "saved run; give the option no value"
        )
    if any("::" in arg for arg in config.args):
        raise pytest.UsageError(
            "tests are named one by one, but the gate times every benchmark: name a folder"
        )


def _ours(config: pytest.Config) -> list[str]:
    """The plugins of this distribution, which a judge needs too."""
    found = (getattr(one, "__name__", "") for one in config.pluginmanager.get_plugins())
    return sorted(name for name in found if name.startswith(f"{tinyllama.__name__}."))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GATING] = None
    option = config.option
    for name in ("gate_json", "unwatched", "judge", "tree", "all_verdicts", "time_limit"):
        if getattr(option, name) and not (option.against or option.against_env):
            shown = f"--{name.replace('_', '-')}"
            raise pytest.UsageError(f"{shown} goes with --against or --against-env: add one")
    if not (option.against or option.against_env):
        return
    _refuse(config)
    option.benchmark_compare = []  # no test runs, so pytest-benchmark has nothing to compare
    config.stash[GATING] = Gating(config)


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The gate needs the conftests alone: importing the tests takes seconds."""
    return True if config.stash[GATING] is not None and collection_path.is_file() else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.stash[GATING] is not None and items:
        config.stash[LEFT_OUT]["the gate times both sides itself"] += len(items)
        config.hook.pytest_deselected(items=list(items))
        items[:] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    gating = session.config.stash[GATING]
    if gating is None or session.testsfailed:
        return None
    gating.run()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    gating = session.config.stash[GATING]
    if gating is not None:
        gating.conclude(session)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    gating = config.stash[GATING]
    if gating is None:
        return
    terminalreporter.section("gate")
    for line in gating.lines():
        terminalreporter.line(line)
