"""What a repository sets in its pyproject.toml.

    [tool.tinyllama]
    ops = ["kernels/*.py"]                  # files of ops, or patterns, that are tested and gated
    unrelated = ["docs/*", "*.md"]          # what no op can read: see `affected.UNRELATED`
    slowdowns = { device_seconds = 0.01 }   # of the gate, where an op states none
    # In the harness's own repository:
    package = "tinyllama.ops"                        # instead of ops: each module declares ops
    benchmarks = "tinyllama.bench.gated:benchmarks"  # further ones
    timing = ["tinyllama.bench.steps"]               # modules that these are timed with

A change cannot loosen these for itself: the gate takes the base's `unrelated`, the stricter
slowdowns, and each side's own ops, so that what a candidate names no more is MISSING.
"""

from pathlib import Path
from typing import Any

import msgspec

from tinyllama.harness.machine.files import read_regular
from tinyllama.harness.machine.parsed import toml_of
from tinyllama.harness.records.entries import is_number

FILE = "pyproject.toml"
TABLE = "[tool.tinyllama]"
GATED = ("device_seconds", "host_seconds")
# Beside pyproject.toml, what says which versions of others are installed.
_LOCKS = (
    *("uv.lock", "poetry.lock", "pdm.lock", "pixi.lock", "pylock.toml", "Pipfile.lock"),
    *("setup.py", "setup.cfg"),
)
_INSTALLERS = ("poetry", "pdm", "pixi", "uv")
_OF_TOOLS = ("group", "dev-dependencies", "sources", "override-dependencies", "pypi-dependencies")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table [tool.tinyllama]. unrelated: None where it names none. slowdowns: metric -> the
    smallest share that the gate must not call SAME."""

    ops: tuple[str, ...] = ()
    unrelated: tuple[str, ...] | None = None
    package: str = ""
    benchmarks: str = ""
    timing: tuple[str, ...] = ()
    slowdowns: dict[str, float] = {}

    def __post_init__(self) -> None:
        if len({*self.ops}) < len(self.ops) or not all(self.ops):
            raise ValueError("ops: name each once, and no empty one")
        for metric, share in self.slowdowns.items():
            if metric not in GATED or not is_number(share) or not 0 < share < 1:
                raise ValueError(
                    f"slowdowns: {metric} = {share!r}: give {' or '.join(GATED)} a share above 0, "
                    "as 0.01"
                )


def load(folder: Path, *, of_base: bool = False) -> Config:
    """The table in a folder's pyproject.toml. of_base: it may have keys of another version.

    Raises ValueError that names the file, the key and the fix.
    """
    table = project(folder).get("tool", {}).get("tinyllama", {})
    if of_base and isinstance(table, dict):
        table = {key: value for key, value in table.items() if key in Config.__struct_fields__}
    try:
        return msgspec.convert(table, Config)
    except ValueError as error:
        raise ValueError(f"{folder / FILE}, {TABLE}: {error}") from error


def project(folder: Path) -> dict[str, Any]:
    """All of a folder's pyproject.toml; empty where there is none. Raises ValueError."""
    path = folder / FILE
    try:
        return toml_of(read_regular(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from error


def entry_points(folder: Path) -> tuple[str, ...]:
    """The modules of the entry points ``tinyllama.ops`` that a pyproject.toml declares."""
    points = project(folder).get("project", {}).get("entry-points", {}).get("tinyllama.ops", {})
    return tuple(sorted({str(value).partition(":")[0].strip() for value in points.values()}))


def dependencies_changed(base: Path, candidate: Path, names: list[str]) -> list[str]:
    """Of the files that differ, those in which two trees ask for other dependencies."""
    changed = [name for name in names if _pins(name)]
    tables = [project(tree) for tree in (base, candidate)]
    if FILE in names and _dependencies(tables[0]) != _dependencies(tables[1]):
        changed.append(FILE)
    return changed


def _pins(name: str) -> bool:
    last = name.rpartition("/")[2]
    listed = last.endswith(".txt") and ("requirements" in name or "constraints" in name)
    return name in _LOCKS or listed or last in ("environment.yml", "environment.yaml")


def _dependencies(table: dict[str, Any]) -> list[Any]:
    keys = ("dependencies", "optional-dependencies", "requires-python")
    of_project = [table.get("project", {}).get(key) for key in keys]
    tools = [table.get("tool", {}).get(name, {}) for name in _INSTALLERS]
    of_tools = [[tool.get(key) for key in (*_OF_TOOLS, *keys)] for tool in tools]
    return [*of_project, *of_tools, table.get("build-system"), table.get("dependency-groups")]
