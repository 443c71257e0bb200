"""The entries of a record, a class for each kind; docs/results.md says what the fields mean.

In a file an entry is an object with its ``kind`` and those fields of the class that are not None.
Nothing is checked when an entry is made. It is checked when it is added to a record (`checked`),
and with its record when that is written or read (`tinyllama.harness.records.results`).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np

_LARGEST = sys.float_info.max  # a float above it is infinite; NaN is within no bounds
Number = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Amount = (
    Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    | Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
)
Seconds = Annotated[float, msgspec.Meta(gt=0, le=_LARGEST)]
Amounts = Mapping[str, Amount]
Texts = Mapping[str, str]


class Ratio(NamedTuple):
    """How many times longer one thing takes than another: the median and its 99% interval."""

    median: Number
    low: Number
    high: Number

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Quartiles(NamedTuple):
    """The first and the third quartile of a series of readings."""

    low: Number
    high: Number


Ratios = Mapping[str, Ratio]


class Entry(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
):
    """One measurement.

    cannot: why it was not measured. unavailable: field -> why it is absent.
    """

    judged_by_tests: ClassVar[bool] = False  # and not compared with a baseline

    name: str
    cannot: str | None = None
    unavailable: Texts | None = None

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


class Timed(Entry, kw_only=True, frozen=True):
    """``seconds`` is the median of so many ``rounds``, and seconds_quartiles are their quartiles.

    over_baseline: how many times as long ``baseline`` takes. over: the same for each other one.
    """

    role: str
    seconds: Seconds | None = None
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


class Contended(Timed, kw_only=True, frozen=True):
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


class StepEntry(Contended, tag="step", kw_only=True, frozen=True):
    title: str | None = None
    software: str | None = None
    parts: Amounts | None = None
    held_bytes: Amount | None = None
    held_peak_bytes: Amount | None = None
    kernels: Amount | None = None
    copies: Amount | None = None
    host_syncs: Amount | None = None
    samples_per_second: Amount | None = None
    mfu: Amount | None = None
    joules_per_sample: Amount | None = None
    watts: Amount | None = None
    floor_share: Ratio | None = None
    gradients: int | None = None
    parameters: int | None = None

    @property
    def gradient_share(self) -> float | None:
        """Parameters with a right gradient, of all; None where it was not looked at."""
        if self.gradients is None or not self.parameters:
            return None
        return self.gradients / self.parameters


class SweepEntry(Contended, tag="sweep", kw_only=True, frozen=True):
    """axis: the field that is varied, ``seq_len`` or ``batch_size``."""

    batch_size: int
    seq_len: int
    axis: str
    samples_per_second: Amount | None = None


class LongestEntry(Contended, tag="longest", kw_only=True, frozen=True):
    """seq_len: the longest that ran. bytes_per_token: the growth of the peak."""

    batch_size: int
    seq_len: int | None = None
    flops_per_second: Amount | None = None
    mfu: Amount | None = None
    bytes_per_token: Number | None = None


class ScalingEntry(Contended, tag="scaling", kw_only=True, frozen=True):
    """A step on ``ranks`` GPUs. case: ``one`` GPU with the workload's batch, ``weak`` (as much on
    each) or ``strong`` (as much on all). batch_size: of all ranks. In records of before 2026-11-30
    sharing says how gradients were summed, and link_bytes_per_second what an all-reduce sent.

    efficiency: the time of ``one`` over this one's; ``strong``: divided by the ranks.
    """

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
    last_loss: Number | None = None
    steps: int | None = None


class OpEntry(Timed, tag="op", kw_only=True, frozen=True):
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
    bandwidth_share: Amount | None = None
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


class CurveEntry(Entry, tag="curve", kw_only=True, frozen=True):
    """losses: of every ``every``-th step the mean loss of the ``window`` steps from it on."""

    judged_by_tests: ClassVar[bool] = True

    workload: str
    contender: str
    precision: str
    steps: int
    window: int
    every: int
    losses: Sequence[Number]

    @property
    def who(self) -> str:
        return self.contender


class CeilingEntry(Entry, tag="ceiling", kw_only=True, frozen=True):
    """Bytes read plus written of a copy, or operations of a square product, per second."""

    bytes_per_second: Amount | None = None
    flops_per_second: Amount | None = None


if TYPE_CHECKING:
    AnyEntry = Entry
else:  # the kinds that a file may have
    AnyEntry = (
        StepEntry | SweepEntry | LongestEntry | ScalingEntry | OpEntry | CurveEntry | CeilingEntry
    )


def as_number(value: Any) -> Any:
    """A number of numpy as one of Python. Raises ValueError for another object."""
    if isinstance(value, np.number):
        return value.item()
    raise ValueError(f"{value!r:.80} is no figure that a record can hold")


def checked(entry: Entry) -> Entry:
    """An entry with numbers of numpy as Python's. Raises ValueError, with the field's name, for a
    figure that is none, such as NaN, and for a time that is absent without a reason."""
    try:
        values = msgspec.to_builtins(entry, enc_hook=as_number)
        numbers: Entry = msgspec.convert(values, AnyEntry)
    except ValueError as error:
        raise ValueError(f"{entry.name}: {error}") from error
    check_time(numbers)
    return numbers


def check_time(entry: Entry) -> None:
    """Raise ValueError for an entry that lacks its time, and does not say why."""
    if isinstance(entry, Timed) and entry.cannot is None and entry.seconds is None:
        raise ValueError(f"{entry.name}: it has neither seconds nor a reason in cannot")


def baseline_of(entries: Iterable[Timed]) -> str | None:
    """The contender that some entries are compared with; None where they have no ratios."""
    return next((entry.baseline for entry in entries if entry.baseline), None)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; a bool is not."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST  # NaN is not less than anything
