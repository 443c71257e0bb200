"""The record of a run: what was measured, on what, with which versions, by which command.

A figure without its device, versions, commit and date is worth nothing later. One file holds them
all, and is written whole or not at all: ``results/<device>/<date>-<commit>-<group>.json``. Its
schema is docs/results.md.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import torch

from tinyllama.harness.machine.device import device_name, slug
from tinyllama.harness.machine.files import read_regular, write_new
from tinyllama.harness.records.entries import Amount, AnyEntry, Entry, as_number, check_time
from tinyllama.harness.records.entries import is_number as is_number

DATE = "%Y-%m-%dT%H:%M:%SZ"
Kind = TypeVar("Kind", bound=Entry)
PartOfFileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one run measured of one group: entries, each with a name of its own.

    complete: the run ended by itself, and nothing in it failed, was missing or was slower; only
    such a record may become a baseline. missed: the targets that its figures miss.
    """

    schema: Literal[3] = 3
    group: PartOfFileName
    device: str
    machine: dict[str, str | Amount | dict[str, str | Amount] | None]
    versions: dict[str, str]
    commit: PartOfFileName
    date: str
    command: str
    complete: bool = False
    missed: list[str] = []
    entries: list[AnyEntry] = []

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
    def day(self) -> str:
        return self.date[:10]

    @property
    def software(self) -> str:
        """The versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def other_versions(self, other: "Record", absent: str = "none") -> dict[str, tuple[str, str]]:
        """What differs between the versions of this and another record: name -> both."""
        names = dict.fromkeys([*self.versions, *other.versions])
        pairs = {n: (self.versions.get(n, absent), other.versions.get(n, absent)) for n in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

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
    named = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": None,
        "numpy": np.__version__,
    }
    if importlib.util.find_spec("triton"):
        named["triton"] = importlib.import_module("triton").__version__
    return {name: str(version) for name, version in named.items() if version is not None}


def folder(root: Path, device: str) -> Path:
    return root / slug(device)


def save(record: Record, root: Path) -> Path:
    """Write a record under ``root``: whole or not at all, and never over another record.

    Raises ValueError for a record that could not be read back, for example one with a figure that
    is NaN or infinite: JSON has neither. Raises OSError where it cannot be written.
    """
    values = msgspec.to_builtins(record, enc_hook=as_number)
    _check(msgspec.convert(values, Record))
    target = folder(root, record.device)
    target.mkdir(parents=True, exist_ok=True)
    stamp = record.date.replace(":", "").replace("-", "")
    name = f"{stamp}-{record.commit[:10]}-{record.group}"
    content = msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"
    path = target / f"{name}.json"
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            write_new(path, content)
            break
        path = target / f"{name}-{number}.json"
    return path


def load(path: Path) -> Record:
    """Read a record. Raises ValueError, naming file and field, when it is not one, and what
    `read_regular` raises."""
    return parse(read_regular(path), str(path))


def parse(content: bytes, name: str) -> Record:
    """The record in a file's content; ``name`` is that of the file, for the error."""
    try:
        return _check(msgspec.json.decode(content, type=Record))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a record of this version: {error}") from error


def _check(record: Record) -> Record:
    """Return a record whose types are right. Raises ValueError where its values are not."""
    if not slug(record.device):
        raise ValueError(f"device {record.device!r:.80} names no device")
    try:
        same = datetime.strptime(record.date, DATE).strftime(DATE) == record.date
    except ValueError:
        same = False
    if not same:
        raise ValueError(f"date {record.date!r:.80}: use UTC, as in 2030-01-31T23:59:59Z")
    names: set[str] = set()
    for entry in record.entries:
        check_time(entry)
        if entry.name in names:
            raise ValueError(f"several entries have the name {entry.name!r:.120}")
        names.add(entry.name)
    return record


def records(root: Path, device: str | None = None) -> Iterator[tuple[Path, Record]]:
    """Every record under ``root``, of one device or of all, oldest first."""
    pattern = "*/*.json" if device is None else f"{slug(device) or '-'}/*.json"
    loaded = [(path, load(path)) for path in list(root.glob(pattern))]
    yield from sorted(loaded, key=lambda pair: (pair[1].date, len(pair[0].name), pair[0].name))


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
