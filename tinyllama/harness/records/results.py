"""The record of a run: what was measured, on what, with which versions, by which command.

A figure without its device, versions, commit and date is worth nothing later. One file holds them
all, and is written whole or not at all: ``results/<device>/<date>-<commit>-<group>.json``. Its
schema is docs/RECORDS.md.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import numpy as np
import torch

from tinyllama.harness.machine.device import device_name, slug
from tinyllama.harness.machine.files import read_regular, write_new
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.entries import Entry, entry_as_json, entry_from_json, is_number

SCHEMA = 2
DATE = "%Y-%m-%dT%H:%M:%SZ"
Kind = TypeVar("Kind", bound=Entry)


@dataclass
class Record:
    """What one run measured of one group: entries, each with a name of its own.

    complete: the run ended by itself, and nothing in it failed, was missing or was slower; only
    such a record may become a baseline. missed: the targets that its figures miss.
    """

    group: str
    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    date: str
    command: str
    entries: list[Entry] = field(default_factory=list)
    complete: bool = False
    missed: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The entries of a kind."""
        return [entry for entry in self.entries if isinstance(entry, kind)]

    @property
    def dirty(self) -> bool:
        """Whether tracked files differed from the commit."""
        return self.commit.endswith("+dirty")

    @property
    def short_commit(self) -> str:
        return short(self.commit)

    @property
    def software(self) -> str:
        """The versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def other_versions(self, other: "Record", absent: str = "none") -> dict[str, tuple[str, str]]:
        """What differs between the versions of this and another record: name -> both."""
        names = dict.fromkeys([*self.versions, *other.versions])
        each = {n: (self.versions.get(n, absent), other.versions.get(n, absent)) for n in names}
        return {name: pair for name, pair in each.items() if pair[0] != pair[1]}

    def same_setting(self, other: "Record") -> bool:
        """Whether two records may be compared: one device, one set of versions."""
        return self.device == other.device and self.versions == other.versions


def short(commit: str) -> str:
    """Ten letters of a commit, with its mark of changed files."""
    return commit[:10] + ("+dirty" if commit.endswith("+dirty") else "")


def new_record(device: torch.device, group: str, tree: Path | None = None) -> Record:
    """An empty record of this process on a device. tree: see `current_commit`."""
    from tinyllama.harness.machine.facts import describe  # asks drivers, so not for readers

    return Record(
        group=group,
        device=device_name(device),
        machine=describe(device),
        versions=versions(),
        commit=current_commit(tree),
        date=now(),
        command=_command(),
    )


def now() -> str:
    """The date of what is made now, in UTC."""
    return datetime.now(timezone.utc).strftime(DATE)


def versions() -> dict[str, str]:
    """The software that decides a measurement beside the code: Python, torch, its toolkit, Triton,
    numpy.

    Triton's module tells its version: the distribution is named differently by each build of torch.
    """
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": None,
        "numpy": np.__version__,
    }
    if importlib.util.find_spec("triton"):
        found["triton"] = importlib.import_module("triton").__version__
    return {name: str(version) for name, version in found.items() if version is not None}


def folder(root: Path, device: str) -> Path:
    return root / slug(device)


def save(record: Record, root: Path) -> Path:
    """Write a record under ``root``: whole or not at all, and never over another record.

    Raises ValueError for a record that could not be read back, OSError where it cannot be written.
    """
    content = as_json(record)
    from_json(content)
    target = folder(root, record.device)
    target.mkdir(parents=True, exist_ok=True)
    stamp = record.date.replace(":", "").replace("-", "")
    name = f"{stamp}-{record.commit[:10]}-{record.group}"
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path = target / f"{name}.json"
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            write_new(path, text.encode(), keep=True)
            break
        path = target / f"{name}-{number}.json"
    return path


def load(path: Path) -> Record:
    """Read a record. Raises ValueError, naming file and field, when it is not one, and what
    `read_regular` raises."""
    return parse(read_regular(path), str(path))


def parse(text: bytes, name: str) -> Record:
    """The record in a file's content; ``name`` is that of the file, for the error."""
    try:
        return from_json(json_of(text))
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ValueError(f"{name} is not a record of this version: {error}") from error


def as_json(record: Record) -> dict[str, Any]:
    """A record as a file holds it."""
    entries = [entry_as_json(entry) for entry in record.entries]
    return {**vars(record), "entries": entries}


# Group and commit are parts of a file's name.
_PART_OF_A_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_FIELDS = {name: get_origin(hint) or hint for name, hint in get_type_hints(Record).items()}


def from_json(data: Any) -> Record:
    """Read a record from the content of a file. Raises ValueError that names the field."""
    if not isinstance(data, dict):
        raise ValueError("it is not an object of fields")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA}")
    if wrong := sorted(data.keys() ^ _FIELDS.keys()):
        raise ValueError(f"fields missing or unknown: {', '.join(wrong)}")
    for name, kind in _FIELDS.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{name} is {data[name]!r:.80}, not of type {kind.__name__}")
    for name in ("group", "commit"):
        if not _PART_OF_A_NAME.fullmatch(data[name]):
            raise ValueError(f"{name} {data[name]!r:.120}: use letters, digits and . _ + -")
    if not slug(data["device"]):
        raise ValueError(f"device {data['device']!r:.80} names no device")
    _check_date(data["date"])
    for name, texts in (("versions", data["versions"].values()), ("missed", data["missed"])):
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name}: each is a text")
    _check_values("machine", data["machine"])
    found: dict[str, Entry] = {}
    for index, each in enumerate(data["entries"]):
        entry = entry_from_json(f"entries[{index}]", each)
        if entry.name in found:
            raise ValueError(f"entries[{index}]: a second entry has the name {entry.name!r}")
        found[entry.name] = entry
    return Record(**{**data, "entries": list(found.values())})


def _check_date(text: str) -> None:
    try:
        same = datetime.strptime(text, DATE).strftime(DATE) == text
    except ValueError:
        same = False
    if not same:
        raise ValueError(f"date {text!r:.80}: use UTC, as in 2030-01-31T23:59:59Z")


def _check_values(where: str, value: Any) -> None:
    """Only what JSON holds, and of numbers only finite ones."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_values(f"{where}: {name}", part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_values(where, part)
    elif not (value is None or isinstance(value, (str, bool)) or is_number(value)):
        raise ValueError(f"{where} is {value!r:.80}, not a finite number or a text")


def records(root: Path, device: str | None = None) -> Iterator[tuple[Path, Record]]:
    """Every record under ``root``, of one device or of all, oldest first."""
    pattern = "*/*.json" if device is None else f"{slug(device) or '-'}/*.json"
    found = [(path, load(path)) for path in list(root.glob(pattern))]
    yield from sorted(found, key=lambda pair: (pair[1].date, len(pair[0].name), pair[0].name))


def _command() -> str:
    """The command line, without the folder of the records: a path of one machine."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    folder_of_records = re.compile(r" --results-dir[= ]('[^']*'|\S+)")
    return folder_of_records.sub("", shlex.join([name, *sys.argv[1:]]))


def current_commit(tree: Path | None = None) -> str:
    """The commit of a tree, with ``+dirty`` when tracked files differ from it. tree: a folder of
    it; by default that of this file.

    Where the tree was copied without its history, TINYLLAMA_COMMIT says which it is.
    """
    if os.environ.get("TINYLLAMA_COMMIT"):
        return os.environ["TINYLLAMA_COMMIT"]

    def git(*args: str) -> str:
        run = subprocess.run(
            ["git", *args],
            capture_output=True,
            text=True,
            cwd=tree or Path(__file__).parent,
            check=False,
        )
        return run.stdout.strip() if run.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
