"""What the gate finds on each device, from the certificates under results/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from result_tables import tracked

from tinyllama.harness.gate.certificates import load, provenance


def bars() -> str:
    """For each device its bars, in short."""
    return _each(lambda data: _bars(data, lambda text: text.partition(";")[0]))


def certificate() -> str:
    """For each device its bars, then each figure: spread between blocks, slowdowns found."""
    return _each(lambda data: f"{_bars(data)}\n\n{_figures(data)}")


def _each(table: Callable[[dict[str, Any]], str]) -> str:
    found = [load(path) for path in sorted(tracked("results/*/gate/certificate.json"))]
    shown = [f"{_source(data)}:\n\n{table(data)}\n\n{provenance(data)}." for data in found]
    return "\n\n".join(shown) or "No device is certified yet."


def _source(data: dict[str, Any]) -> str:
    blocks = f"{data['blocks']} A/A blocks and {data['merges']:,} simulated merges"
    return f"{data['device']}, from {blocks}"


def _bars(data: dict[str, Any], shown: Callable[[str], str] = str) -> str:
    lines = ["| bar | measured | |", "| --- | --- | --- |"]
    for bar in data["bars"]:
        held = "" if bar["held"] else "**missed**"
        lines.append(f"| {bar['text']} | {shown(bar['measured'])} | {held} |")
    return "\n".join(lines)


def _figures(data: dict[str, Any]) -> str:
    lines = ["| benchmark | metric | spread | 1% | 2% | 5% | 10% | finds |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in data["found"]:
        shares = " | ".join(f"{share:.1%}" for share in one["detected"].values())
        smallest = "none" if one["smallest"] is None else f"{one['smallest']:.1%}"
        name = f"{one['benchmark']} | {one['metric']} | {one['spread']:.2%}"
        lines.append(f"| {name} | {shares} | {smallest} |")
    return "\n".join(lines)
