"""Slowdowns that a committed file accepts, until a release:

    [[accepted]]
    benchmark = "rms_norm/triton/..."   # its exact name
    device = "gpu"                      # or "cpu"; by default both
    metric = "device_seconds"           # the default
    amount = 0.03                       # up to 3% slower than the base; for counts and bytes a
                                        # whole number, for compile_seconds seconds more
    reason = "the sum is compensated now"
    release = "0.3.0"                   # from this version on the entry is an error

    [[accepted]]
    benchmark = "rope/naive/..."
    removed = true                      # the candidate no longer has it
    reason = "nobody uses it"
    release = "0.3.0"

The base's figures include what its own file accepts. That is not accepted again: every later merge
could then be slower by the same amount.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from tinyllama.harness.machine.files import read_regular
from tinyllama.harness.machine.parsed import toml_of

FILE = "accepted_slowdowns.toml"
Counted = Literal["peak_bytes", "kept_bytes", "kernels", "copies", "host_syncs"]
Metric = Literal["device_seconds", "host_seconds", "compile_seconds", "layouts", Counted]
IMPORT = "import"  # the name of the verdict on importing the ops, which has seconds alone
COMPILE = "compile_seconds"  # how many seconds more: as a share, those of a short base vary more
LONGEST = 3600  # of these seconds
COUNTED = get_args(Counted)
_NUMBERS = re.compile(r"\d{1,9}(\.\d{1,9})*")
_BEFORE_RELEASE = re.compile(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)\d*\b")


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is accepted of one benchmark: an amount of a metric, or that it is removed."""

    benchmark: str
    reason: str
    release: str
    metric: Metric = "device_seconds"
    amount: int | float | None = None
    removed: bool = False
    device: Literal["cpu", "gpu", ""] = ""

    def __post_init__(self) -> None:
        for name in ("benchmark", "reason"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty: use a text")
        if not _NUMBERS.fullmatch(self.release):
            raise ValueError(f"release is {self.release!r}: use numbers, as in '0.3.0'")
        if self.benchmark == IMPORT and self.metric != COMPILE:
            raise ValueError(f"an entry of {IMPORT!r} needs metric = {COMPILE!r}")
        if (self.amount is not None) == self.removed:
            raise ValueError("give either an amount, or removed = true")
        if self.amount is not None and not self._is_usable(self.amount):
            raise ValueError(
                f"amount is {self.amount!r}: use a share, as 0.03 for 3%, at most 1; for counts "
                "and bytes the whole number of how many more; "
                f"for {COMPILE} seconds, at most {LONGEST}"
            )

    def _is_usable(self, amount: float) -> bool:
        if self.metric in COUNTED:
            return amount > 0 and isinstance(amount, int)
        return 0 < amount <= (LONGEST if self.metric == COMPILE else 1)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    accepted: tuple[Waiver, ...] = ()


@dataclass(frozen=True)
class Waivers:
    """The entries of a file that hold on a device, and those that the base's file has.

    partial: only some of the benchmarks are compared.
    """

    path: Path
    entries: tuple[Waiver, ...] = ()
    of_base: tuple[Waiver, ...] = ()
    partial: bool = False

    def amount(self, benchmark: str, metric: str) -> float:
        """How much slower than the base it may be: 0.03 is 3%; for counts, bytes and seconds of
        compiling how many more."""
        now, before = (
            sum(e.amount or 0 for e in entries if (e.benchmark, e.metric) == (benchmark, metric))
            for entries in (self.entries, self.of_base)
        )
        added = metric in (*COUNTED, COMPILE)
        return max(0, now - before if added else (1 + now) / (1 + before) - 1)

    def is_removed(self, benchmark: str) -> bool:
        """Whether the candidate need not have it."""
        now, before = (
            any(e.removed and e.benchmark == benchmark for e in entries)
            for entries in (self.entries, self.of_base)
        )
        return now and not before

    def check(self, benchmarks: Collection[str]) -> None:
        """Raise ValueError for an entry of a benchmark that is not among these names, unless
        they are not all."""
        for entry in () if self.partial else self.entries:
            gone = entry.removed and entry in self.of_base  # no side has it any more
            if entry.benchmark not in benchmarks and not gone:
                raise ValueError(
                    f"{self.path}: {entry.benchmark!r}: there is no such benchmark here: rename or "
                    "delete the entry, or name the device that has it: device = 'cpu' or 'gpu'"
                )


def load(
    path: Path, version: str, base: Path | None = None, *, device: str, partial: bool = False
) -> Waivers:
    """The entries of a file for a device, "cpu" or "gpu", in a version of the project; none where
    there is no file. base: the base's file; partial: see `Waivers`. Raises ValueError that names
    the file and the entry."""
    entries = _read(path)
    for entry in entries:
        if not _is_before(version, entry.release):
            raise ValueError(
                f"{path}: {entry.benchmark!r} was accepted until {entry.release}, and this is "
                f"{version}: delete the entry, or accept it anew with a reason"
            )
    here, of_base = (
        tuple(entry for entry in of_tree if entry.device in ("", device))
        for of_tree in (entries, _read(base) if base else ())
    )
    names = [(entry.benchmark, entry.metric) for entry in here]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}: {twice[0][0]!r} has two entries of {twice[0][1]}: delete one")
    return Waivers(path, here, of_base, partial)


def _read(path: Path) -> tuple[Waiver, ...]:
    try:
        return msgspec.convert(toml_of(read_regular(path).decode()), _File).accepted
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _is_before(version: str, release: str) -> bool:
    """Whether a version comes before a release: a development version of it does."""
    numbers = _NUMBERS.match(version)
    if numbers is None:
        raise ValueError(f"the version is {version!r}: use one that begins as '0.3.0' does")
    now, then = (_numbers(text) for text in (numbers[0], release))
    return now < then or (now == then and bool(_BEFORE_RELEASE.match(version, numbers.end())))


def _numbers(version: str) -> list[int]:
    """The numbers of a version; 1.0 is 1."""
    return [int(part) for part in re.sub(r"(\.0+)+$", "", version).split(".")]
