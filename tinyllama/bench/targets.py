"""The targets of this project, from ``targets.toml``."""

from pathlib import Path

from tinyllama.harness.records.targets import load

TARGETS = load(Path(__file__).with_suffix(".toml"))
