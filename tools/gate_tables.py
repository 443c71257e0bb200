"""Tables of what the gate finds on each device, from the files under results/."""

import json
from collections import Counter
from typing import Any

from tinyllama.harness.gate.calibrate import METRICS, load, provenance
from tinyllama.harness.records.report import markdown_table
from tools import try_gate
from tools.result_tables import tracked


def certificate() -> str:
    """For each device what its A/A blocks say of the gate's errors, a bar a row."""
    found = [load(path) for path in sorted(tracked("results/*/gate/certificate.json"))]
    shown = [f"{_source(data)}:\n\n{_bars(data)}\n\n{provenance(data)}." for data in found]
    return "\n\n".join(shown) or "No device is certified yet."


def _source(data: dict[str, Any]) -> str:
    blocks = f"{data['blocks']} A/A blocks and {data['merges']:,} simulated merges"
    return f"{data['device']}, from {blocks}"


def _bars(data: dict[str, Any]) -> str:
    rows = [["bar", "measured", ""]]
    for bar in data["bars"]:
        measured = bar["measured"].partition(";")[0]
        rows.append([bar["text"], measured, "" if bar["held"] else "**missed**"])
    return markdown_table(rows)


def validation() -> str:
    """For each device, the verdicts on benchmarks with real work added to each call."""
    paths = sorted(tracked("results/*/gate/validation.json"))
    return "\n\n".join(_validated(json.loads(path.read_bytes())) for path in paths) or (
        "Nothing is recorded yet."
    )


def _validated(data: dict[str, Any]) -> str:
    rows = [["metric", "work added", "benchmarks", "measured", "verdicts"]]
    groups: dict[tuple[str, float], list[tuple[str, float]]] = {}
    untimed = []
    for name, share in data["slowed"].items():
        one = data["benchmarks"].get(name, {"figures": []})  # none where all was stopped at once
        timed = [figure for figure in one["figures"] if figure["metric"] in METRICS]
        timed.sort(key=lambda figure: METRICS.index(figure["metric"]))  # work is added to the first
        if timed:
            found = groups.setdefault((timed[0]["metric"], share), [])
            found.append((timed[0]["outcome"], timed[0]["ratio"] - 1))
        else:
            untimed.append(name)
    for (metric, share), found in sorted(groups.items()):
        counted = Counter(outcome for outcome, _ in found)
        verdicts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counted.items()))
        measured = sorted(ratio for _, ratio in found)
        spread = f"{measured[0]:+.1%} to {measured[-1]:+.1%}"
        rows.append([metric, f"{share:.0%}", str(len(found)), spread, verdicts])
    wrong = ", ".join(data["wrong"]) or "none"
    source = provenance({**data, "commits": [data["commit"]]})
    providers = sorted({name.split("-")[1] for name in data["slowed"]})
    said = [f"Providers: {', '.join(providers)}. Not what was added: {wrong}."]
    said += [f"Not timed: {', '.join(untimed)}."] if untimed else []
    return f"{markdown_table(rows)}\n\n{' '.join(said)} {source}."


def tried() -> str:
    """For each device, the verdicts on branches whose verdicts are known."""
    found = [try_gate.load(path) for path in sorted(tracked(f"results/*/gate/{try_gate.FILE}"))]
    return "\n\n".join(map(_tried, filter(None, found))) or "Nothing is recorded yet."


def _tried(runs: list[dict[str, Any]]) -> str:
    rows = [["branch", "runs", "statuses", "seconds", "slower, kernels"]]
    for name, branch in try_gate.BRANCHES.items():
        own = [run for run in runs if run["branch"] == name]
        if own:
            statuses = ", ".join(sorted({str(run["status"]) for run in own}))
            seconds = [run["seconds"] for run in own]
            took = f"{min(seconds):.0f} to {max(seconds):.0f}" if own[1:] else f"{seconds[0]:.0f}"
            wrong = sorted({text for run in own for text in try_gate.wrong(run)})
            told = "; ".join([*_slower(own), *(f"**{text}**" for text in wrong)])
            rows.append([branch.does, str(len(own)), statuses, took, told])
    last = max(runs, key=lambda run: run["date"])
    commits = list(dict.fromkeys(run["commit"] for run in runs))
    return f"{markdown_table(rows)}\n\n{provenance({**last, 'commits': commits})}."


def _slower(runs: list[dict[str, Any]]) -> list[str]:
    """Of each benchmark that some run found slower: how many did, and the kernels they named."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for one in run["slower"]:
            found.setdefault(one["benchmark"], []).append(one)
    lines = []
    for benchmark, times in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        metrics = sorted({metric for one in times for metric in one["metrics"]})
        kernels = sorted({text.split(":")[0] for one in times for text in one["moved"]})
        named = f" ({', '.join(kernels)})" if kernels else ""
        lines.append(f"{', '.join(metrics)} of {benchmark} in {len(times)}{named}")
    return lines
