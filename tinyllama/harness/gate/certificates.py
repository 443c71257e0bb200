"""The certificates under a folder of results, as ``tinyllama certify`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinyllama.harness.gate.noise import SCHEMA

FIELDS: dict[str, type] = {
    "schema": int,
    "device": str,
    "date": str,
    "commits": list,
    "versions": dict,
    "blocks": int,
    "merges": int,
    "bars": list,
    "found": list,
}


def certificates(root: Path, device: str | None = None) -> list[dict[str, Any]]:
    """Those of all devices, or of one, by their folders' names. Raises as `load` does."""
    found = [load(path) for path in sorted(root.glob("*/gate/certificate.json"))]
    return [one for one in found if device in (None, one["device"])]


def load(path: Path) -> dict[str, Any]:
    """What a file holds. Raises ValueError, naming file and field, for one that is none, or is of
    blocks that were taken otherwise than those of now."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is not an object of fields")
        for name, kind in FIELDS.items():
            if not isinstance(data.get(name), kind):
                raise ValueError(f"{name} is {data.get(name)!r:.80}, not of type {kind.__name__}")
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} is not {SCHEMA}, its blocks were other ones")
    except ValueError as error:
        raise ValueError(f"{path} is no certificate: {error}: certify again") from error
    return data


def provenance(certificate: dict[str, Any]) -> str:
    """What a reader must know to trust it: device, versions, commits, date."""
    versions = ", ".join(f"{name} {version}" for name, version in certificate["versions"].items())
    commits = ", ".join(commit[:10] for commit in certificate["commits"])
    return f"{certificate['device']}; {versions}; commit {commits}; {certificate['date'][:10]}"
