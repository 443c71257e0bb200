"""The panel of a device's certificate: how often the gate errs there."""

from typing import Any

from tinyllama.harness.gate.calibrate import provenance
from tinyllama.harness.page.panels import Panel
from tinyllama.harness.page.tables import Cell, Header, Row, Table, texts
from tinyllama.harness.records.numbers import MISSING


def panel(certificate: dict[str, Any]) -> Panel:
    """Its bars, and folded what is found of each figure."""
    bars = certificate["bars"]
    rows = ((bar["text"], "holds" if bar["held"] else "missed", bar["measured"]) for bar in bars)
    title = f"{certificate['blocks']} A/A blocks, {certificate['merges']:,} simulated merges"
    tables = (
        texts("Bars of the gate", ("bar", "", "measured"), rows),
        _figures(certificate["found"]),
    )
    return Panel(title, (), tables, (), provenance(certificate))


def _figures(found: list[dict[str, Any]]) -> Table:
    slowdowns = list(found[0]["detected"]) if found else []
    headers = (
        Header("benchmark", words=True),
        Header("metric", words=True),
        Header("spread", "%", "standard deviation between blocks"),
        *(Header(f"{float(s):.0%} slower", "% found") for s in slowdowns),
        Header("finds", "%", "the least slowdown of which 99% are found"),
    )
    rows = []
    for one in found:
        smallest = one["smallest"]
        found_of = (f"{100 * one['detected'][s]:.1f}" for s in slowdowns)
        finds = MISSING if smallest is None else f"{100 * smallest:.1f}"
        cells = (one["benchmark"], one["metric"], f"{100 * one['spread']:.2f}", *found_of, finds)
        rows.append(Row(tuple(map(Cell, cells))))
    return Table("What is found of each figure", headers, tuple(rows), folded=True)
