"""Samples of what the gate writes: A/A blocks, certificates, reports."""

import json
from pathlib import Path
from typing import Any

from correctness_tests.support.sample_records import FIRST
from tinyllama.harness.gate.calibrate import SCHEMA, Block
from tools import try_gate

DEVICE, HOST = "device_seconds", "host_seconds"
CARD, VERSIONS = "A Card 1", {"torch": "2.11"}


def block(number: int = 0, **fields: Any) -> Block:
    date = f"2030-01-01T{number // 60:02d}:{number % 60:02d}:00Z"
    figures = {"copy-ours": {DEVICE: 0.001 * (number + 1), HOST: -0.01}}
    defaults = {"date": date, "commit": "c" * 40, "versions": VERSIONS, "pairs": 40}
    return Block(**{**defaults, "statistics": figures, **fields})


FOUND = {
    "benchmark": "one/a",
    "metric": "device_seconds",
    "spread": 0.0012,
    "smallest": 0.015,
    "detected": {"0.01": 0.0, "0.02": 0.9991},
}


def certificate(device: str = FIRST) -> dict[str, Any]:
    """Of two figures, the second of which is never found."""
    never = {**FOUND, "benchmark": "two/a", "metric": "host_seconds", "smallest": None}
    return {
        "schema": SCHEMA,
        "device": device,
        "date": "2030-01-31T00:00:00Z",
        "commits": ["c0ffee" * 6],
        "versions": {"torch": "9.9"},
        "blocks": 20,
        "merges": 100_000,
        "bars": [
            {"text": "95% all green", "held": True, "measured": "99.90%"},
            {"text": "99% found", "held": False, "measured": "1 of 2; not two/a (SYNTHETIC)"},
        ],
        "found": [FOUND, never],
    }


def stored(root: Path, content: dict[str, Any], folder: str = "a-device") -> Path:
    path = root / folder / "gate" / "certificate.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    return path


def gate_report(metric: str = "device_seconds", outcome: str = "SLOWER", moved: str = "") -> Any:
    """What ``--gate-json`` holds: one benchmark that is SLOWER, and one that is the same."""
    name = "rms_norm-triton-N8-bf16/forward+backward"
    figures = [{"metric": metric, "outcome": "SLOWER"}, {"metric": "kernels", "outcome": "SAME"}]
    slower = {"outcome": outcome, "figures": figures, "text": "a\nb", "moved": [moved]}
    same = {"outcome": "SAME", "figures": [], "text": "", "moved": []}
    return {
        "verdicts": [{"outcome": outcome}, {"outcome": "SAME"}, {"outcome": "SAME"}],
        "comparisons": [{"benchmarks": {name: slower, "other": same}, "seconds": {"time": 8.04}}],
    }


def run(status: int, content: Any, seconds: float = 10.0) -> dict[str, Any]:
    outcomes = {verdict["outcome"]: 1 for verdict in content["verdicts"]}
    slower = try_gate.slower(content)
    return {"status": status, "outcomes": outcomes, "slower": slower, "seconds": seconds}
