"""What a team asks of itself: ``[tool.tinyllama]`` in pyproject.toml.

    [tool.tinyllama]
    ops = ["kernels/*.py"]                  # files of ops, or patterns, that pytest tests
    groups = ["small-bf16", "ops-bf16"]     # what is timed where --groups names nothing
    tolerances = { seconds = 1.03 }         # to a stored baseline, where an entry states none
    slowdowns = { device_seconds = 0.01 }   # of the gate, where an op states none

    [tool.tinyllama.lanes]
    nightly = ["small-bf16", "medium-bf16"]     # --groups nightly

A change cannot loosen these for itself: the gate takes the stricter of both sides, and a record
keeps the tolerances with which it was made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tinyllama.harness.gate.metric import DEVICE, HOST
from tinyllama.harness.machine.files import read_regular
from tinyllama.harness.machine.parsed import toml_of
from tinyllama.harness.records.entries import is_number
from tinyllama.harness.records.verdict import TOLERANCES

FILE = "pyproject.toml"
TABLE = "[tool.tinyllama]"


@dataclass(frozen=True)
class Team:
    """ops: paths and patterns, relative to the folder. groups: None where a team names none. lanes:
    name -> groups. tolerances: metric -> ratio to a stored baseline. slowdowns: metric -> the
    smallest share that the gate must not call SAME."""

    ops: tuple[str, ...] = ()
    groups: tuple[str, ...] | None = None
    lanes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)

    def asked(self, name: str | None) -> tuple[str, ...] | None:
        """The groups of a lane, or without a name those of every run; None where it sets none."""
        return self.groups if name is None else self.lanes.get(name)

    def lines(self) -> list[str]:
        """What it sets, for a summary."""
        said = [
            *([f"ops {', '.join(self.ops)}"] if self.ops else []),
            *([f"groups {', '.join(self.groups)}"] if self.groups else []),
            *(f"lane {name} {', '.join(groups)}" for name, groups in self.lanes.items()),
            *(f"{metric} {ratio:g} times a baseline" for metric, ratio in self.tolerances.items()),
            *(f"{metric} {share:.2%} in the gate" for metric, share in self.slowdowns.items()),
        ]
        return [f"{TABLE} of {FILE}: {'; '.join(said)}"] if said else []


def load(folder: Path, *, of_base: bool = False) -> Team:
    """The table in a folder's pyproject.toml; what a base's has of another version is left out.

    Raises ValueError that names the file, the key and the fix.
    """
    path = folder / FILE
    try:
        table = toml_of(read_regular(path).decode()).get("tool", {}).get("tinyllama", {})
    except (FileNotFoundError, NotADirectoryError):
        return Team()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from error
    where = f"{path}, {TABLE}"
    if not isinstance(table, dict):
        raise ValueError(f"{where}: it is {table!r}: use a table")
    parsers: dict[str, Any] = {
        "groups": _names,
        "lanes": _lanes,
        "tolerances": _tolerances,
        "slowdowns": _shares,
        "ops": partial(_names, of="files of ops"),
    }
    unknown = [key for key in table if key not in parsers]
    if unknown and not of_base:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}: use {', '.join(parsers)}")
    return Team(
        **{key: parsers[key](f"{where}: {key}", table[key]) for key in parsers if key in table}
    )


def _names(where: str, value: Any, of: str = "names of groups") -> tuple[str, ...]:
    good = isinstance(value, list) and value and all(isinstance(n, str) and n for n in value)
    if not good or len(set(value)) < len(value):
        raise ValueError(f"{where} is {value!r}: use a list of different {of}")
    return tuple(value)


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}: use a table")
    return value


def _lanes(where: str, value: Any) -> dict[str, tuple[str, ...]]:
    for name in _table(where, value):
        if not name or "," in name or name == "short":
            raise ValueError(f"{where}: {name!r} cannot be asked for by --groups: rename it")
    return {name: _names(f"{where}.{name}", groups) for name, groups in value.items()}


def _tolerances(where: str, value: Any) -> dict[str, float]:
    for metric, ratio in _table(where, value).items():
        if metric not in TOLERANCES or not is_number(ratio) or ratio < 1:
            raise ValueError(
                f"{where}: {metric} = {ratio!r}: give one of {', '.join(TOLERANCES)} a ratio "
                "from 1, as 1.03"
            )
    return dict(value)


def _shares(where: str, value: Any) -> dict[str, float]:
    for metric, share in _table(where, value).items():
        if metric not in (DEVICE, HOST) or not is_number(share) or not 0 < share < 1:
            raise ValueError(
                f"{where}: {metric} = {share!r}: give {DEVICE} or {HOST} a share above 0, as 0.01"
            )
    return dict(value)
