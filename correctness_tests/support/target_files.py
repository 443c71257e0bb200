"""Files of targets, right but for the keys that a test changes."""

from collections.abc import Mapping
from pathlib import Path

RIGHT = {
    "tier": '"v3"',
    "workload": '"small"',
    "precision": '"any"',
    "metric": '"speed"',
    "over": '"v1"',
    "at_least": "5.5",
    "device": '"any"',
    "source": '"project"',
}

RIGHT_OF_OP = {
    "op": '"rope"',
    "provider": '"triton"',
    "case": '"any"',
    "dtype": '"bf16"',
    "passes": '"forward"',
    "metric": '"speed"',
    "over": '"torch"',
    "at_least": "1.0",
    "device": '"any"',
    "source": '"project"',
}


def written(folder: Path, *tables: Mapping[str, str | None], key: str = "target") -> Path:
    """A file of targets, each right with some keys changed, or left out where None."""
    lines = []
    for table in tables:
        lines.append(f"[[{key}]]")
        keys = {**(RIGHT if key == "target" else RIGHT_OF_OP), **table}
        lines += [f"{key} = {value}" for key, value in keys.items() if value is not None]
    path = folder / "targets.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
