"""Samples of what the gate writes: A/A blocks, certificates, reports."""

from typing import Any

from tinyllama.harness.gate.calibrate import Block
from tools import try_gate

DEVICE, HOST = "device_seconds", "host_seconds"
CARD, VERSIONS = "A Card 1", {"torch": "2.11"}


def block(number: int = 0, **fields: Any) -> Block:
    date = f"2030-01-01T{number // 60:02d}:{number % 60:02d}:00Z"
    figures = {"copy-ours": {DEVICE: 0.001 * (number + 1), HOST: -0.01}}
    defaults = {"date": date, "commit": "c" * 40, "versions": VERSIONS, "pairs": 40}
    return Block(**{**defaults, "statistics": figures, **fields})


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
