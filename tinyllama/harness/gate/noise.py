"""The device's own A/A blocks: both sides ran the same code, so a block shows noise alone.

Each device has one file, ``results/<device>/gate/noise.json``; it is not among the records, whose
readers would meet it. Blocks of other versions stay in the file and do not count.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tinyllama.harness.gate.decision import Spread
from tinyllama.harness.machine.device import slug
from tinyllama.harness.machine.files import only_writer, read_regular, replace_text
from tinyllama.harness.machine.parsed import json_of
from tinyllama.harness.records.results import folder, is_number

# 1: host time was of single calls; 2: a statistic was the median of single pairs; 3: the backward
# pass worked in autograd's thread.
SCHEMA = 4
METRICS = ("device_seconds", "host_seconds")


@dataclass(frozen=True)
class Block:
    """One launch of two equal sides. ``statistics[benchmark][metric]`` is `of_block` of the logs of
    one side's times over the other's. wave: the name of the block's wave; empty in older
    files, which have no waves."""

    date: str
    commit: str
    versions: dict[str, str]
    pairs: int
    statistics: dict[str, dict[str, float]]
    wave: str = ""


@dataclass
class Noise:
    """The blocks of one device, oldest first."""

    device: str
    blocks: list[Block] = field(default_factory=list)

    def of(self, versions: Mapping[str, str]) -> list[Block]:
        """The blocks that were measured with exactly these versions."""
        return [block for block in self.blocks if block.versions == versions]

    def spread(self, benchmark: str, metric: str, versions: Mapping[str, str]) -> Spread:
        """The spread of one figure; without a block of it, one without a history."""
        if metric not in METRICS:
            raise ValueError(f"metric {metric!r}: use one of {', '.join(METRICS)}")
        found = [block.statistics.get(benchmark, {}) for block in self.of(versions)]
        return Spread.of([metrics[metric] for metrics in found if metric in metrics])

    def add(self, block: Block) -> None:
        """Raises ValueError for an invalid block, and for one that is stored already."""
        _check_block("the block", asdict(block))
        if block in self.blocks:
            raise ValueError(f"the block of {block.date} is stored already: a block counts once")
        self.blocks.append(block)

    def record(self, root: Path, block: Block) -> Path:
        """Add a block to those stored by now, and hold them all: another GPU of that name may be
        certified at the same time."""
        with only_writer(noise_path(root, self.device)):
            self.blocks = Noise.load(root, self.device).blocks
            self.add(block)
            return self.save(root)

    @staticmethod
    def load(root: Path, device: str) -> "Noise":
        """The device's blocks; none where no file is. Raises ValueError, naming file and field."""
        path = noise_path(root, device)
        try:
            data = json_of(read_regular(path))
            _check(data)
            if data["device"] != device:
                raise ValueError(f"device {data['device']!r} is not {device!r}")
        except FileNotFoundError:
            return Noise(device)
        except ValueError as error:
            raise ValueError(f"{path} holds no A/A blocks of this version: {error}") from error
        return Noise(device, [Block(**block) for block in data["blocks"]])

    def save(self, root: Path) -> Path:
        """Replace the file, whole or not at all."""
        data = {"schema": SCHEMA, **asdict(self)}
        _check(data)
        path = noise_path(root, self.device)
        replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        return path


def noise_path(root: Path, device: str) -> Path:
    return folder(root, device) / "gate" / "noise.json"


_BLOCK: dict[str, type] = {
    "date": str,
    "commit": str,
    "versions": dict,
    "pairs": int,
    "statistics": dict,
    "wave": str,
}


def _check(data: Any) -> None:
    """Raise ValueError, naming the field, unless ``data`` is what `Noise.save` writes."""
    if not isinstance(data, dict):
        raise ValueError("it is not an object of fields")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema {data.get('schema')!r} is not {SCHEMA}: its blocks were measured in another "
            "way; delete the file and certify again"
        )
    _check_fields("it", data, {"schema": int, "device": str, "blocks": list})
    if not slug(data["device"]):
        raise ValueError(f"device {data['device']!r:.80} names no device")
    for index, block in enumerate(data["blocks"]):
        _check_block(f"blocks[{index}]", block)
        if block in data["blocks"][:index]:
            raise ValueError(f"blocks[{index}] is there twice: a block counts once")


def _check_fields(where: str, data: Any, fields: dict[str, type]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r:.80}, not an object of fields")
    if wrong := sorted(data.keys() ^ fields.keys()):
        raise ValueError(f"{where}: fields missing or unknown: {', '.join(wrong)}")
    for name, kind in fields.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{where}: {name} is {data[name]!r:.80}, not of type {kind.__name__}")


def _check_block(where: str, block: Any) -> None:
    _check_fields(where, {"wave": "", **block} if isinstance(block, dict) else block, _BLOCK)
    try:
        datetime.strptime(block["date"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        text = f"date {block['date']!r:.80}: use UTC, as in 2030-01-31T23:59:59Z"
        raise ValueError(f"{where}: {text}") from None
    for name in ("commit", "versions", "statistics"):
        if not block[name]:
            raise ValueError(f"{where}: {name} is empty")
    if block["pairs"] < 1:
        raise ValueError(f"{where}: pairs is {block['pairs']}: a block has one or more")
    for name, version in block["versions"].items():
        if not isinstance(name, str) or not isinstance(version, str):
            raise ValueError(f"{where}: versions: {name!r:.80} is {version!r:.80}, not a text")
    for name, metrics in block["statistics"].items():
        _check_statistics(f"{where}: statistics of {name!r:.120}", name, metrics)


def _check_statistics(where: str, name: Any, metrics: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: a benchmark's name is a text")
    if not isinstance(metrics, dict) or not metrics:
        raise ValueError(f"{where}: they are {metrics!r:.80}, not a number for each metric")
    for metric, value in metrics.items():
        if metric not in METRICS:
            raise ValueError(f"{where}: metric {metric!r:.80}: use one of {', '.join(METRICS)}")
        if not is_number(value):
            raise ValueError(f"{where}: {metric} is {value!r:.80}, not a finite number")
