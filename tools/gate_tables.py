"""What the gate finds on each device, from the certificates under results/."""

from __future__ import annotations

import json
from typing import Any

from result_tables import tracked


def certificate() -> str:
    """For each device its bars, then each figure: spread between blocks, slowdowns found."""
    found = sorted(tracked("results/*/gate/certificate.json"))
    if not found:
        return "No device is certified yet."
    return "\n\n".join(_device(json.loads(path.read_text())) for path in found)


def _device(data: dict[str, Any]) -> str:
    lines = ["| bar | measured | |", "| --- | --- | --- |"]
    for bar in data["bars"]:
        lines.append(
            f"| {bar['text']} | {bar['measured']} | {'' if bar['held'] else '**missed**'} |"
        )
    lines += ["", "| benchmark | metric | spread | 1% | 2% | 5% | 10% | finds |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in data["found"]:
        shares = " | ".join(f"{share:.1%}" for share in one["detected"].values())
        smallest = "none" if one["smallest"] is None else f"{one['smallest']:.1%}"
        name = f"{one['benchmark']} | {one['metric']} | {one['spread']:.2%}"
        lines.append(f"| {name} | {shares} | {smallest} |")
    source = f"{data['blocks']} A/A blocks and {data['merges']:,} simulated merges"
    return "\n".join([f"{data['device']}, from {source}:", "", *lines, "", _provenance(data)])


def _provenance(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    commits = ", ".join(commit[:10] for commit in data["commits"])
    return f"{data['device']}; {versions}; commit {commits}; {data['date'][:10]}."
