"""The certificates under a folder of results, as ``tinyllama certify`` writes them."""

from pathlib import Path
from typing import Any

from tinyllama.harness.gate.noise import SCHEMA
from tinyllama.harness.machine.files import read_regular
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.results import is_number, short

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
BAR: dict[str, type] = {"text": str, "held": bool, "measured": str}
FIGURE: dict[str, type] = {"benchmark": str, "metric": str, "detected": dict}


def certificates(root: Path, device: str | None = None) -> list[dict[str, Any]]:
    """The certificates of all devices, or of one, in the order of their folders. Raises what `load`
    raises, and OSError for an unreadable file."""
    # The brackets: glob would skip a dangling link of a plain name.
    found = [load(path) for path in sorted(root.glob("*/gate/certificate.jso[n]"))]
    return [one for one in found if device in (None, one["device"])]


def load(path: Path) -> dict[str, Any]:
    """The certificate in a file. Raises ValueError, naming file and field, for an invalid one, and
    for one whose blocks were measured in another way than now."""
    try:
        data = json_of(read_regular(path))
        _check_fields("", data, FIELDS)
        if data["schema"] != SCHEMA:
            raise ValueError(
                f"schema {data['schema']} is not {SCHEMA}: its blocks were measured in another way"
            )
        if not all(isinstance(commit, str) for commit in data["commits"]):
            raise ValueError("commits: each is a text")
        for index, bar in enumerate(data["bars"]):
            _check_fields(f"bars[{index}]: ", bar, BAR)
        for index, figure in enumerate(data["found"]):
            _check_figure(f"found[{index}]: ", figure, data["found"][0])
    except ValueError as error:
        raise ValueError(f"{path} is no certificate: {error}: certify again") from error
    return data


def _check_fields(where: str, data: Any, fields: dict[str, type]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}it is not an object of fields")
    for name, kind in fields.items():
        value = data.get(name)
        if type(value) is not kind:
            raise ValueError(f"{where}{name} is {value!r:.80}, not of type {kind.__name__}")


def _check_figure(where: str, figure: Any, first: dict[str, Any]) -> None:
    """Of the slowdowns of the first, with a number for each."""
    _check_fields(where, figure, FIGURE)
    if not is_number(figure.get("spread")):
        raise ValueError(f"{where}spread is {figure.get('spread')!r:.80}, not a finite number")
    smallest = figure.get("smallest", "absent")
    if smallest is not None and not is_number(smallest):
        raise ValueError(f"{where}smallest is {smallest!r:.80}, neither a number nor null")
    if figure["detected"].keys() != first["detected"].keys():
        raise ValueError(f"{where}detected is of other slowdowns than the first figure's")
    for slowdown, share in figure["detected"].items():
        try:
            float(slowdown)
        except ValueError:
            raise ValueError(f"{where}detected has {slowdown!r:.80}, not a slowdown") from None
        if not is_number(share):
            raise ValueError(f"{where}detected at {slowdown} is {share!r:.80}, not a share")


def provenance(certificate: dict[str, Any]) -> str:
    """Where it comes from: device, versions, commits, date."""
    versions = ", ".join(f"{name} {version}" for name, version in certificate["versions"].items())
    commits = ", ".join(map(short, certificate["commits"]))
    return f"{certificate['device']}; {versions}; commit {commits}; {certificate['date'][:10]}"
