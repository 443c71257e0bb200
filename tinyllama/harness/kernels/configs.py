"""Configurations of kernels: declared finite spaces, and a table of choices for each chip.

    FORWARD = Space(
        "rms_norm.forward",
        keys={"D": ..., },                      # what a choice may depend on
        default=lambda D: Config(num_warps=4, ROWS=1),
        configs=lambda D: [Config(num_warps=w, ROWS=r) for w in (1, 2, 4, 8) for r in (1, 2, 4)],
    )
    config = FORWARD.choose(x.device, D=512)
    kernel[grid](..., **config.kwargs())

Nothing is searched inside a run. `python -m tinyllama tune` times a space on a device and writes
``tuned/<chip>.json`` beside the op's file; a key that is not in the table takes the default, which
must compile within every chip's limits.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tinyllama.harness.kernels.chips import chip_of
from tinyllama.harness.kernels.launch_cache import AFFECTING, among

Key = int | str | bool


@dataclass(frozen=True, init=False)
class Config:
    """One configuration: constants of the kernel by name, warps, pipeline stages."""

    constants: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    def __init__(self, *, num_warps: int = 4, num_stages: int = 2, **constants: int) -> None:
        object.__setattr__(self, "constants", tuple(sorted(constants.items())))
        object.__setattr__(self, "num_warps", num_warps)
        object.__setattr__(self, "num_stages", num_stages)

    def __getitem__(self, name: str) -> int:
        return dict(self.constants)[name]

    def kwargs(self) -> dict[str, int]:
        """What a launch takes."""
        return {**dict(self.constants), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def replace(self, **constants: int) -> "Config":
        """The same with some constants changed."""
        return Config(**{**self.kwargs(), **constants})

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.kwargs().items())


SPACES: "dict[str, Space]" = {}


class Space:
    """The finite space of configurations of one kernel; registered by its name.

    default, configs: functions of the key's parts (`choose`'s keywords): the configuration for
    every chip, and all that a search may try. tables: the folder of the chips' choices, ``tuned``
    beside the file that ``default`` is written in.
    """

    def __init__(
        self, name: str, *, default: Callable[..., Config], configs: Callable[..., Sequence[Config]]
    ) -> None:
        if name in SPACES:
            raise ValueError(f"space {name!r} is declared twice: pick another name")
        self.name = name
        self.default = default
        self.configs = configs
        self.tables = Path(inspect.getfile(default)).parent / "tuned"
        self._chosen: dict[tuple[Any, ...], Config] = {}
        SPACES[name] = self

    def choose(self, device: torch.device, **key: Key) -> Config:
        """The configuration for a key: the chip's choice where its table has one."""
        if FORCED or _RECORDED_KEYS:
            place = self.name, key_text(key)
            for keys in _RECORDED_KEYS:
                keys[place] = key
            if place in FORCED:
                return FORCED[place]
        chip = chip_of(device)
        chip_and_key = (chip, *key.items())
        if chip_and_key not in self._chosen:
            self._chosen[chip_and_key] = self.on(chip, **key)[0]
        return self._chosen[chip_and_key]

    def on(self, chip: str, **key: Key) -> tuple[Config, bool]:
        """The choice on a chip, and whether the chip's table says so. Raises ValueError for a table
        with keys or constants that the space does not have."""
        default = self.default(**key)
        entries = _table(self.tables, chip).get(self.name, {})
        for text, config in entries.items():
            names = {part.partition("=")[0] for part in text.split(",") if part}
            for kind, has, expected in (
                ("parts of a key", names, set(key)),
                ("constants", set(dict(config.constants)), set(dict(default.constants))),
            ):
                if has != expected:
                    raise ValueError(
                        f"{self.tables / chip}.json, {self.name}, {text!r}: {kind} are "
                        f"{', '.join(sorted(expected)) or 'none'}, not "
                        f"{', '.join(sorted(has)) or 'none'}; {_TUNE}"
                    )
        return entries.get(key_text(key), default), key_text(key) in entries

    @contextlib.contextmanager
    def force(self, config: Config, **key: Key) -> Iterator[None]:
        """Use this configuration for a key meanwhile: for a search, or a test of each one."""
        place = self.name, key_text(key)
        before = FORCED.get(place)
        FORCED[place] = config
        try:
            yield
        finally:
            del FORCED[place]
            if before is not None:
                FORCED[place] = before


FORCED: dict[tuple[str, str], Config] = {}  # by space and key's text
_RECORDED_KEYS: list[dict[tuple[str, str], dict[str, Key]]] = []
AFFECTING += [FORCED, _RECORDED_KEYS]


def recorded_keys() -> contextlib.AbstractContextManager[dict[tuple[str, str], dict[str, Key]]]:
    """Which keys of which spaces configurations are chosen for meanwhile:
    (space, key's text) -> key."""
    return among(_RECORDED_KEYS, {})


def key_text(key: dict[str, Any]) -> str:
    """A key as it stands in a table: ``D=512,dtype=bf16``."""
    return ",".join(f"{name}={value}" for name, value in sorted(key.items()))


_TUNE = "remove the entry, or search again: python -m tinyllama tune"


class _Table(msgspec.Struct):
    """A chip's table as it is stored: constants, warps and stages by space and key."""

    spaces: dict[str, dict[str, dict[str, int]]]
    chip: str = ""


@functools.cache
def _table(folder: Path, chip: str) -> dict[str, dict[str, Config]]:
    """A chip's choices by space and key; empty where there is no table of it.

    Raises ValueError that names the file and the entry when it is malformed.
    """
    path = folder / f"{chip}.json"
    if not chip or not path.is_file():
        return {}
    try:
        table = msgspec.json.decode(path.read_bytes(), type=_Table)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no table of choices ({error}); {_TUNE}") from error
    if table.chip not in ("", chip):
        raise ValueError(f"{path} is of chip {table.chip!r}: name it {table.chip}.json")
    return {
        space: {key: _config(entry, f"{path}, {space}, {key!r}") for key, entry in entries.items()}
        for space, entries in table.spaces.items()
    }


def _config(entry: dict[str, int], where: str) -> Config:
    warps, stages = entry.get("num_warps", 0), entry.get("num_stages", 0)
    if warps < 1 or warps & (warps - 1) or stages < 1:
        raise ValueError(
            f"{where}: num_warps is {warps}, which must be a power of two, and num_stages "
            f"{stages}, which must be 1 or more; {_TUNE}"
        )
    return Config(**entry)
