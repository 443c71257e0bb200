"""The record of a run: what was measured, on what, with which versions, by which command.

A figure without its device, versions, commit and date is worth nothing later, so they are
one file, written whole or not at all: ``results/<device>/<date>-<commit>.json``.
"""

from __future__ import annotations

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
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyllama.harness.device import device_name, slug

SCHEMA = 1


@dataclass
class Record:
    """One run. ``entries`` are measurements, each a flat dict with a ``name`` of its own.

    complete: the run ended by itself and nothing in it failed; only such a record may become
    a baseline.
    """

    device: str
    versions: dict[str, str]
    commit: str
    date: str
    command: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.entries}

    def same_setting(self, other: Record) -> bool:
        """Whether two records may be compared: one device, one set of versions."""
        return self.device == other.device and self.versions == other.versions


def new_record(device: torch.device) -> Record:
    """An empty record of this process on a device."""
    return Record(
        device=device_name(device),
        versions=versions(),
        commit=_commit(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=_command(),
    )


def versions() -> dict[str, str]:
    """What decides a measurement beside the code: Python, torch, its toolkit, Triton, numpy.

    Triton is asked itself, since its distribution has another name in each build of torch.
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
    """Write a record under ``root``: whole or not at all, and over no other record."""
    target = folder(root, record.device)
    target.mkdir(parents=True, exist_ok=True)
    stamp = record.date.replace(":", "").replace("-", "")
    name = f"{stamp}-{record.commit[:10]}"
    with tempfile.NamedTemporaryFile("w", dir=target, suffix=".tmp") as file:
        json.dump(asdict(record), file, indent=1)
        file.write("\n")
        file.flush()
        os.chmod(file.name, 0o644)  # a record is for everyone to read
        for number in itertools.count(1):
            path = target / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
            try:
                os.link(file.name, path)  # fails where a name is taken, by whoever was first
            except FileExistsError:
                continue
            return path
    raise AssertionError("unreachable")


def load(path: Path) -> Record:
    """Read a record. Raises ValueError when the file is not one of this schema."""
    try:
        data = json.loads(path.read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA}")
        return Record(**data)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a record of this version: {error}") from error


def records(root: Path, device: str | None = None) -> Iterator[tuple[Path, Record]]:
    """Every record under ``root``, of one device or of all, oldest first."""
    pattern = f"{slug(device)}/*.json" if device else "*/*.json"
    found = ((path, load(path)) for path in root.glob(pattern))
    yield from sorted(found, key=lambda pair: (pair[1].date, len(pair[0].name), pair[0].name))


def _command() -> str:
    """The command line, without the folder of the records: a path of one machine."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    folder_of_records = re.compile(r" --results-dir[= ]('[^']*'|\S+)")
    return folder_of_records.sub("", shlex.join([name, *sys.argv[1:]]))


def _commit() -> str:
    """The commit of the tree, with ``+dirty`` when tracked files differ from it."""

    def git(*args: str) -> str:
        run = subprocess.run(
            ["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        return run.stdout.strip() if run.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    if not commit:
        return os.environ.get("TINYLLAMA_COMMIT", "unknown")
    return f"{commit}+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
