"""The targets of this project, from ``targets.toml``."""

from pathlib import Path

from tinyllama.harness.records.targets import load, load_ops

_PATH = Path(__file__).with_suffix(".toml")
OF_STEPS = load(_PATH)
OF_OPS = load_ops(_PATH)
