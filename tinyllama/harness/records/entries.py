"""The entries of a record, a class for each kind; docs/RECORDS.md says what the fields mean.

In a file an entry is an object with its ``kind`` and the fields of the class that are not None.
``over_baseline`` is there under the baseline's name: ``over_v1`` is the ratio over contender v1.
"""

import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints


class Ratio(NamedTuple):
    """How many times longer one thing takes than another: the median and its 99% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Quartiles(NamedTuple):
    """The first and the third quartile of a series of readings."""

    low: float
    high: float


Amount = Annotated[float, "not negative"]
Amounts = Mapping[str, Amount]
Numbers = Sequence[float]
Ratios = Mapping[str, Ratio]
Texts = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One measurement. It is not checked when it is made: a figure that is NaN must reach the
    verdict. A record is checked as a whole when it is written and when it is read.

    cannot: why it was not measured. unavailable: field -> why it is absent.
    tolerances: metric -> the ratio that a comparison allows (`tinyllama.harness.records.verdict`).
    """

    kind: ClassVar[str]
    held_by_tests: ClassVar[bool] = False  # and not compared with a baseline

    name: str
    cannot: str | None = None
    unavailable: Texts | None = None
    tolerances: Amounts | None = None

    @property
    def who(self) -> str:
        """Who was measured: a contender, a provider, or the entry itself."""
        return self.name

    @property
    def ran(self) -> bool:
        return self.cannot is None

    @property
    def not_gated(self) -> str | None:
        """Why it is measured for orientation alone; None where its figures decide."""
        return None


@dataclass(frozen=True, kw_only=True)
class Timed(Entry):
    """``seconds`` is the median of so many ``rounds``, and seconds_quartiles are their quartiles.

    over_baseline: how many times as long ``baseline`` takes. over: the same for each other one.
    """

    role: str | None = None
    seconds: Amount | None = None
    seconds_quartiles: Quartiles | None = None
    rounds: Amount | None = None
    peak_bytes: Amount | None = None
    baseline: str | None = None
    over_baseline: Ratio | None = None
    over: Ratios | None = None

    @property
    def ran(self) -> bool:
        return self.cannot is None and self.seconds is not None

    @property
    def time(self) -> float:
        """Its seconds; infinite where it has none."""
        return float("inf") if self.seconds is None else self.seconds

    @property
    def not_gated(self) -> str | None:
        return self.role if self.role in ("peer", "floor") else None

    @property
    def group(self) -> tuple[str, ...]:
        """What it has in common with all entries that are shown together with it."""
        raise NotImplementedError

    @property
    def call(self) -> tuple[str, ...]:
        """What is the same for all contenders, or providers, that are compared with each other."""
        return self.group


@dataclass(frozen=True, kw_only=True)
class Contended(Timed):
    """A training step of one contender.

    plan: how the step ran. left_out: how it could have run -> why it did not.
    graph_bytes: what of the other two lies in the memory pool of a captured graph.
    """

    workload: str
    precision: str
    contender: str
    plan: str | None = None
    left_out: Texts | None = None
    live_bytes: Amount | None = None
    graph_bytes: Amount | None = None

    @property
    def who(self) -> str:
        return self.contender

    @property
    def group(self) -> tuple[str, ...]:
        return self.workload, self.precision


@dataclass(frozen=True, kw_only=True)
class StepEntry(Contended):
    kind = "step"

    role: str = field()  # not None, as the base class allows
    title: str | None = None
    software: str | None = None
    device_seconds: Amount | None = None
    device_seconds_quartiles: Quartiles | None = None
    host_seconds: Amount | None = None
    host_seconds_quartiles: Quartiles | None = None
    busy_seconds: Amount | None = None
    time_by: Amounts | None = None
    parts: Amounts | None = None
    held_bytes: Amount | None = None
    held_peak_bytes: Amount | None = None
    kernels: Amount | None = None
    copies: Amount | None = None
    host_syncs: Amount | None = None
    samples_per_second: Amount | None = None
    tokens_per_second: Amount | None = None
    flops_per_second: Amount | None = None
    mfu: Amount | None = None
    joules_per_sample: Amount | None = None
    watts: Amount | None = None
    energy_source: str | None = None
    compile_seconds: Amount | None = None
    compiled_beside: int | None = None
    floor_share: Ratio | None = None
    gradients: int | None = None
    parameters: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    steps: int | None = None

    @property
    def gradient_share(self) -> float | None:
        """Parameters with a right gradient, of all; None where it was not looked at."""
        if self.gradients is None or not self.parameters:
            return None
        return self.gradients / self.parameters


@dataclass(frozen=True, kw_only=True)
class SweepEntry(Contended):
    """axis: the field that is varied, ``seq_len`` or ``batch_size``."""

    kind = "sweep"

    role: str = field()  # not None, as the base class allows
    batch_size: int
    seq_len: int
    axis: str
    samples_per_second: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class LongestEntry(Contended):
    """seq_len: the longest that ran. bytes_per_token: the growth of the peak."""

    kind = "longest"

    role: str = field()  # not None, as the base class allows
    batch_size: int
    seq_len: int | None = None
    flops_per_second: Amount | None = None
    mfu: Amount | None = None
    bytes_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingEntry(Contended):
    """A step on ``ranks`` GPUs. case: ``one`` GPU with the workload's batch, ``weak`` (as much on
    each) or ``strong`` (as much on all). batch_size: of all ranks. sharing: how they
    reduced, in records of before 2026-11-29.

    efficiency: the time of ``one`` over this one's; ``strong``: divided by the ranks.
    """

    kind = "scaling"

    role: str = field()  # not None, as the base class allows
    case: str
    ranks: int
    batch_size: int
    sharing: str | None = None
    efficiency: Ratio | None = None
    samples_per_second: Amount | None = None
    collective_seconds: Amount | None = None
    hidden_seconds: Amount | None = None
    link_bytes_per_second: Amount | None = None
    gradients: int | None = None
    parameters: int | None = None
    last_loss: float | None = None
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class OpEntry(Timed):
    kind = "op"

    role: str = field()  # not None, as the base class allows
    op: str
    provider: str
    case: str
    dtype: str
    values: str
    passes: str
    host_seconds: Amount | None = None
    host_seconds_quartiles: Quartiles | None = None
    repeated_host_seconds: Amount | None = None
    repeated_host_seconds_quartiles: Quartiles | None = None
    queued: bool | None = None
    bytes: Amount | None = None
    flops: Amount | None = None
    kernels: Amount | None = None
    bytes_per_second: Amount | None = None
    bandwidth_share: Amount | None = None
    flops_per_second: Amount | None = None
    flops_share: Amount | None = None
    roofline_seconds: Amount | None = None
    roofline_share: Amount | None = None
    bound: str | None = None
    layouts: Ratios | None = None

    @property
    def who(self) -> str:
        return self.provider

    @property
    def group(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def call(self) -> tuple[str, ...]:
        return self.op, self.case, self.dtype, self.passes


@dataclass(frozen=True, kw_only=True)
class CurveEntry(Entry):
    """losses: of every ``every``-th step the mean loss of the ``window`` steps from it on."""

    kind = "curve"
    held_by_tests = True

    workload: str
    contender: str
    precision: str
    steps: int
    window: int
    every: int
    losses: Numbers

    @property
    def who(self) -> str:
        return self.contender


@dataclass(frozen=True, kw_only=True)
class CeilingEntry(Entry):
    """Bytes read plus written of a copy, or operations of a square product, per second."""

    kind = "ceiling"

    bytes_per_second: Amount | None = None
    flops_per_second: Amount | None = None


KINDS: dict[str, type[Entry]] = {
    kind.kind: kind
    for kind in (
        *(StepEntry, SweepEntry, LongestEntry, ScalingEntry),
        *(OpEntry, CurveEntry, CeilingEntry),
    )
}
_OVER = re.compile("over_(.+)")


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """An entry as a file holds it."""
    values = {each.name: getattr(entry, each.name) for each in fields(entry)}
    baseline, over = values.pop("baseline", None), values.pop("over_baseline", None)
    found = {"name": entry.name, "kind": entry.kind, **values, f"over_{baseline}": over}
    return {name: value for name, value in found.items() if value is not None}


def entry_from_json(where: str, data: Any) -> Entry:
    """Read an entry from a file. Raises ValueError that names the entry and the field.

    where: what to call an entry that has no name.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r:.80}, not an object of fields")
    for name in ("name", "kind"):
        if not data.get(name):
            raise ValueError(f"{where} has no {name}")
    where = f"{where} ({data['name']!r:.120})"
    kind = KINDS.get(data["kind"]) if isinstance(data["kind"], str) else None
    if kind is None:
        raise ValueError(f"{where}: unknown kind {data['kind']!r:.80}: use {', '.join(KINDS)}")
    known = _hints(kind.kind)
    found: dict[str, Any] = {}
    for name, value in data.items():
        key = name
        if name not in known and (over := _OVER.fullmatch(str(name))):
            key, found["baseline"] = "over_baseline", over[1]
        if key == "kind":
            continue
        if key not in known or key in found:
            raise ValueError(f"{where}: unknown field {name!r:.80} of the kind {kind.kind}")
        found[key] = _checked(f"{where}: {name}", known[key], value)
    if absent := [f.name for f in fields(kind) if f.default is MISSING and f.name not in found]:
        raise ValueError(f"{where} has no {', '.join(absent)}")
    return kind(**found)


@functools.cache
def _hints(name: str) -> dict[str, Any]:
    """The type of each field of a kind, without the None of those that are optional."""
    kind = KINDS[name]
    hints = get_type_hints(kind, include_extras=True)
    names = {each.name for each in fields(kind)} - {"baseline"}
    return {name: _without_none(hint) for name, hint in hints.items() if name in names}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint


def _checked(where: str, hint: Any, value: Any) -> Any:
    """The value of a field of this type. Raises ValueError where it is of another one."""
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where} is {value!r:.80}, not an object of fields")
        return {k: _checked(f"{where}: {k}", get_args(hint)[1], v) for k, v in value.items()}
    words, fits = _TYPES[hint]
    if not fits(value):
        raise ValueError(f"{where} is {value!r:.80}, not {words}")
    return hint(*value) if hint in (Ratio, Quartiles) else value


def baseline_of(entries: Iterable[Timed]) -> str | None:
    """The contender that some entries are compared with; None where they have no ratios."""
    return next((entry.baseline for entry in entries if entry.baseline), None)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; a bool is not."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # NaN is not less than anything


def are_numbers(value: Any, count: int | None = None) -> bool:
    """Whether a value is a list of finite numbers, ``count`` of them."""
    several = isinstance(value, (list, tuple)) and count in (None, len(value))
    return several and all(map(is_number, value))


def is_interval(value: Any) -> bool:
    """Whether a value is a pair of finite numbers in order."""
    return are_numbers(value, 2) and value[0] <= value[1]


# What a field of this type takes, in words, and whether a value is that.
_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and is_number(value)),
    float: ("a finite number", is_number),
    Amount: ("a finite number of at least 0", lambda value: is_number(value) and value >= 0),
    Quartiles: ("two numbers in order", is_interval),
    Ratio: ("a ratio with its interval, three numbers", lambda value: are_numbers(value, 3)),
    Numbers: ("a list of finite numbers", are_numbers),
}
