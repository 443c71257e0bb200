"""The pytest plugin of an installed harness: silent until ops are named.

Ops are named by ``--ops FILE``, by ``--op NAME``, by ``[tool.tinyllama] ops`` in pyproject.toml, or
by the entry points ``tinyllama.ops`` that this pyproject.toml declares. Only then is anything else
imported. A repository whose conftest loads the harness's plugins has suites of its own: they take
these ops, and no others are added.

The entry point is named as this module, so that a conftest may name it too without a second copy.
"""

import glob
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

SUITE = "tinyllama.harness.plugins.suite"
PLUGINS = (
    SUITE,
    "tinyllama.harness.plugins.benchmarks",
    "tinyllama.suites.selection",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config: Any = pluginmanager.get_plugin("pytestconfig")
    hand_over([str(argument) for argument in config.invocation_params.args])
    group = parser.getgroup("tinyllama")
    group.addoption(
        "--ops",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="test the ops declared in Python files, or in those of a pattern; name folders of "
        "tests before this option",
    )
    group.addoption(
        "--op", action="append", default=[], metavar="NAME", help="test this op only (repeatable)"
    )


def hand_over(arguments: list[str]) -> None:
    """End this process with the gate's status if ``--against`` or ``--against-env`` is among the
    arguments: before a conftest could import an op, which may end the process as it likes."""
    if not any(argument.startswith("--against") for argument in arguments):
        return
    from tinyllama.harness.gate import command, options
    from tinyllama.harness.machine.errors import UsageError

    try:
        sys.exit(command.run(options.of_pytest(arguments)))
    except UsageError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(int(pytest.ExitCode.USAGE_ERROR))


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """After the conftests, and before all options are read."""
    result = yield
    manager = early_config.pluginmanager
    if _names_ops(early_config) and not manager.has_plugin(SUITE):
        for name in PLUGINS:
            manager.import_plugin(name)
    return result


def _names_ops(config: pytest.Config) -> bool:
    """In a worker of xdist, the options are those of its controller."""
    for options in (config.known_args_namespace, config.option):
        if getattr(options, "ops", None) or getattr(options, "op", None):
            return True
    declared = project(config.rootpath)
    table = declared.get("tool", {}).get("tinyllama", {})
    files = table.get("ops") if isinstance(table, dict) else None
    return bool(files or declared.get("project", {}).get("entry-points", {}).get("tinyllama.ops"))


def project(folder: Path) -> dict[str, Any]:
    """The pyproject.toml of a folder; empty where there is none, or where pytest refuses it."""
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    if "tinyllama" not in text:  # most have nothing of ours, and are not parsed
        return {}
    from tinyllama.harness.machine.parsed import toml_of

    try:
        return toml_of(text)
    except ValueError:
        return {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Of the suites of a conftest, leave out what is about no op of ``--op``.

    Raises pytest.UsageError for a file or an op that no test is about. A worker of xdist, whose
    errors its controller does not show, has one test instead, which fails with that text.
    """
    if config.pluginmanager.has_plugin(PLUGINS[-1]):
        return  # its tests are of the ops that are meant
    names, about = config.option.op, [_about(item) for item in items]
    for option, values in (("--ops", config.option.ops), ("--op", names)):
        if unused := [value for value in values if not any(value in words for words in about)]:
            text = f"{option} {unused[0]}: no collected test is about it"
            if not hasattr(config, "workerinput"):
                raise pytest.UsageError(text)
            items[:] = [_Refused.from_parent(session, name=option, text=text)]
            return
    if names:
        compared = bool(getattr(config.option, "benchmark_compare", False))  # by whole groups
        dropped = {
            item
            for item, words in zip(items, about, strict=True)
            if not words & {*names} and not (compared and "group" in _params(item))
        }
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


class _Refused(pytest.Item):
    """A test that fails with a text."""

    def __init__(self, text: str, **named: Any) -> None:
        super().__init__(**named)
        self._text = text

    def runtest(self) -> None:
        raise pytest.UsageError(self._text)

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return f"ERROR: {self._text}"


def _about(item: pytest.Item) -> set[str]:
    """The names of the ops that a test is about, and the files in which these and their providers
    are declared: by its parameters, and by the name of its file."""
    words = {item.path.stem.removeprefix("test_")}
    for value in _params(item).values():
        op = getattr(value, "op", value)
        name = getattr(op, "name", op)
        words |= {name} if isinstance(name, str) else set()
        for declared in (op, getattr(value, "provider", None)):
            module = sys.modules.get(str(getattr(declared, "module", "")))
            words.add(str(getattr(module, "__file__", "")))
    return words


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    option.ops = expanded("--ops", option.ops, config.invocation_params.dir)
    if option.op and getattr(option, "record", False):
        raise pytest.UsageError("--op: a record is of every op; remove it, or --record")


def expanded(where: str, patterns: Iterable[str], folder: Path) -> list[str]:
    """The files that paths and patterns in a folder mean, each once and whole.

    Raises pytest.UsageError for one that means none, or a folder.
    """
    files: list[str] = []
    for pattern in patterns:
        path = folder / pattern
        names = [] if path.exists() else glob.glob(pattern, root_dir=folder, recursive=True)
        paths = [path] if path.exists() else [folder / name for name in sorted(names)]
        if not paths:
            raise pytest.UsageError(f"{where} {pattern}: no such file; name a Python file of ops")
        for path in paths:
            if not path.is_file():
                raise pytest.UsageError(
                    f"{where} {pattern}: {path} is no file: name Python files of ops, and folders "
                    "of tests before --ops"
                )
        files += [str(path.resolve()) for path in paths]
    return list(dict.fromkeys(files))
