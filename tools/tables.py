"""Tables of the documents: of measurements, from the records under results/ and from nothing else;
of the model's presets and tiers, and of what README states.

Only records that git tracks count: what a reader measures must not make the documents stale.
"""

import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from field.run import recorded as released_bugs_record
from tinyllama.bench.targets import TARGETS
from tinyllama.harness.machine.parsed import tomllib
from tinyllama.harness.records.entries import (
    CurveEntry,
    Entry,
    LongestEntry,
    OpEntry,
    ScalingEntry,
    StepEntry,
)
from tinyllama.harness.records.results import Record, load
from tinyllama.harness.report.summary import summaries
from tinyllama.harness.report.tables import (
    Column,
    escaped,
    last_passes,
    latest,
    markdown_table,
    source,
    step_columns,
    table_of,
)
from tinyllama.model.config import PRESETS, WORKLOADS
from tinyllama.model.tiers import TIERS, V1, Tier
from tinyllama.ops.block import PARTS

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/pictures/ladder.svg"
NOTHING = "Nothing is recorded yet."


# -- records ---------------------------------------------------------------------------------------


def tracked(pattern: str) -> list[Path]:
    """The files of a pattern that git tracks; all of them in an export, which has no git."""
    listed = subprocess.run(
        ["git", "ls-files", f":(glob){pattern}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[:-1]
    files = [ROOT / name for name in listed] or list(ROOT.glob(pattern))
    return [path for path in files if path.exists()]  # one may be deleted, and not committed yet


def newest(kind: type[Entry]) -> list[list[Record]]:
    """For each device, the newest complete records of each group with entries of this kind."""
    by_device: dict[str, list[Record]] = {}
    for record in latest(load(path) for path in tracked("results/*/*.json")):
        if record.of(kind):
            by_device.setdefault(record.device, []).append(record)
    return [by_device[device] for device in sorted(by_device)]


def _of_kind(kind: type[Entry]) -> list[Record]:
    return [record for records in newest(kind) for record in records]


def _last(kind: type[Entry]) -> list[Record]:
    """The newest record of each group, of whatever device."""
    by_date = sorted(_of_kind(kind), key=lambda record: record.date)
    of_group = {record.group: record for record in by_date}
    return [of_group[group] for group in sorted(of_group)]


def _tables(tables: Iterable[tuple[Sequence[Record], Sequence[Sequence[str]]]]) -> str:
    """Tables as Markdown, each with the sources of its records and their groups below it."""
    parts = []
    for records, rows in tables:
        groups: dict[str, list[str]] = {}
        for record in records:
            groups.setdefault(source(record), []).append(record.group)
        sources = [f"{', '.join(names)}: measured on {text}." for text, names in groups.items()]
        parts += [markdown_table(rows), *map(escaped, sources)]
    return "\n\n".join(parts) or NOTHING


def ladder() -> str:
    """The newest ladders, from short steps to long ones."""
    records = _last(StepEntry)
    groups = [[step for step in r.of(StepEntry) if step.cannot is None] for r in records]
    groups.sort(key=lambda group: min(step.time for step in group if step.role == "tier"))
    steps = [step for group in groups for step in group]
    measured = step_columns(steps)
    columns: list[Column[StepEntry]] = [
        ("workload", lambda step: step.workload),
        ("precision", lambda step: step.precision),
        *measured[:7],
        measured[-1],
    ]
    return _tables([(records, table_of(columns, steps))])


def claims() -> str:
    """What the published example claims of V4, beside the newest record of `small` in bf16."""
    (record,) = (record for record in _last(StepEntry) if record.group == "small-bf16")
    steps = {step.contender: step for step in record.of(StepEntry)}
    rows = [["", "claimed", "V4 over V1", "V4 over V3"]]
    for title, claimed, value in (
        ("kernels", "-95%", lambda step: step.kernels),
        ("memory bandwidth, of the same bytes", "+45%", lambda step: 1 / step.time),
        ("energy of a sample", "-32%", lambda step: step.joules_per_sample),
    ):
        ratios = (value(steps["v4"]) / value(steps[tier]) for tier in ("v1", "v3"))
        rows.append([title, claimed, *(f"{ratio - 1:+.0%}" for ratio in ratios)])
    return _tables([([record], rows)])


def ops() -> str:
    """The newest timings of ops: a row for each op, case and dtype, a column for each provider:
    forward + backward on the device, microseconds and the share of the roofline of the same run."""
    records = _last(OpEntry)
    entries = [entry for record in records for entry in last_passes(record) if entry.ran]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in entries:
        share = f" ({entry.roofline_share:.0%})" if entry.roofline_share else ""
        cells.setdefault(entry.call[:3], {})[entry.provider] = f"{entry.time * 1e6:.1f}{share}"
    baseline = next((entry.baseline for entry in entries if entry.baseline), None)
    names = dict.fromkeys(entry.provider for entry in entries)
    providers = sorted(names, key=lambda name: name != baseline)
    rows = [["op", "case", "dtype", *providers]]
    rows += [[*call, *(row.get(p, "") for p in providers)] for call, row in cells.items()]
    return _tables([(records, rows)])


LONGEST: list[Column[LongestEntry]] = [
    ("workload", lambda e: "-".join(e.group)),
    ("contender", lambda e: e.contender),
    ("tokens", lambda e: f"{e.seq_len:,}"),
    ("ms", lambda e: f"{e.time * 1e3:,.0f}"),
    ("of the product's speed", lambda e: f"{e.mfu or 0:.0%}"),
    ("peak GiB", lambda e: f"{(e.peak_bytes or 0) / 2**30:.0f}"),
]
SCALING: list[Column[ScalingEntry]] = [
    ("workload", lambda e: "-".join(e.group)),
    ("step", lambda e: e.contender),
    ("GPUs", lambda e: f"{e.ranks}"),
    ("batch", lambda e: f"{e.batch_size}"),
    ("ms", lambda e: f"{e.time * 1e3:.2f}"),
    ("efficiency", lambda e: f"{e.case}: {e.efficiency}" if e.efficiency else ""),
    (
        "collectives hidden",
        lambda e: f"{(e.hidden_seconds or 0) / s:.0%}" if (s := e.collective_seconds) else "",
    ),
    ("plan", lambda e: e.plan or ""),
]


def longest() -> str:
    """The longest sequence that each contender trains on one card."""
    return _tables(
        ([record], table_of(LONGEST, [e for e in record.of(LongestEntry) if e.ran]))
        for record in _of_kind(LongestEntry)
    )


def scaling() -> str:
    """Training steps on several GPUs beside those on one."""
    return _tables(
        # Sums of gradients by copies between GPUs were a way that training had.
        ([r], table_of(SCALING, [e for e in r.of(ScalingEntry) if e.sharing != "copies"]))
        for r in _last(ScalingEntry)
    )


# Bytes a second of one adapter of 400 Gb/s; a DGX H100 has one for each of its eight GPUs.
ADAPTER = 50e9


def expected_scaling() -> str:
    """V4's step of medium in bf16 with a full batch on each of 1, 2, 8 and 64 GPUs: the first two
    measured, the others computed from these as docs/train.md says."""
    records = [r for r in _of_kind(ScalingEntry) if r.group == "scaling-medium-bf16"]
    record = max(records, key=lambda record: record.date)
    steps = {e.case: e.time for e in record.of(ScalingEntry) if e.contender == "v4"}
    alone, pair = steps["one"], steps["weak"]
    rates = [e.link_bytes_per_second for r in records for e in r.of(ScalingEntry)]
    link = statistics.median(rate for rate in rates if rate)
    gradients, backward = 4 * PRESETS["medium"].parameters, alone * 2 / 3
    slowed = (pair - alone) / (gradients / link)  # by a collective under the backward pass

    def row(gpus: int, where: str, rate: float, step: float = 0.0) -> list[str]:
        sent = 2 * (gpus - 1) / gpus * gradients
        takes = sent / rate
        seconds = step or alone + slowed * min(takes, backward) + max(0.0, takes - backward)
        return [
            f"{gpus}{where}",
            f"{sent / 1e6:,.0f}" if sent else "",
            f"{rate / 1e9:.0f}" if sent else "",
            f"{takes * 1e3:.1f}" if sent else "",
            f"{seconds * 1e3:.1f}",
            f"{alone / seconds:.2f}" if sent else "",
            "measured" if step else "computed",
        ]

    head = ["GPUs", "MB that each sends", "GB/s", "ms that takes", "ms a step", "efficiency", ""]
    rows = [
        row(1, "", link, alone),
        row(2, "", link, pair),
        row(8, " of one host", link),
        row(64, ", an adapter for each", min(link, 8 * ADAPTER)),
        row(64, ", an adapter for each host of 8", ADAPTER),
    ]
    text = f"Steps of one and two GPUs: {escaped(source(record))}."
    return f"{markdown_table([head, *rows])}\n\n{text}"


def curves() -> str:
    """The loss of each tier on text at the end, and its largest distance from V1's on the way,
    beside that of V1 from itself in float64."""
    return _tables(([record], _curves(record)) for record in _of_kind(CurveEntry))


def _curves(record: Record) -> list[list[str]]:
    curves = {(e.contender, e.precision): e for e in record.of(CurveEntry)}
    exact = curves["v1", "fp64"]
    window = f"mean of {exact.window} steps"
    rows = [
        ["tier", "precision", f"first loss, {window}", f"after {exact.steps} steps", "distance"]
    ]
    for (tier, precision), entry in curves.items():
        other = exact if tier == "v1" else curves["v1", precision]
        distance = max(abs(a - b) for a, b in zip(entry.losses, other.losses, strict=True))
        of = f"{distance:.4f} from {'V1 in float64' if other is exact else 'V1'}"
        ends = [f"{entry.losses[place]:.4f}" for place in (0, -1)]
        rows.append([tier.upper(), precision, *ends, "" if entry is exact else of])
    return rows


def bars() -> str:
    """Which bars of targets.toml the newest records of each device miss."""
    records = [load(path) for path in tracked("results/*/*.json")]
    lines = []
    for summary in summaries(records, TARGETS):
        [missed] = [part for part in summary.parts if part.name == "missed"]
        lines.append(f"- {summary.device} misses {missed.sentence}.")
        lines += [f"  - {escaped(line)}" for line in missed.lines]
    return "\n".join(lines)


def stages() -> str:
    """The comparison that `tinyllama stages` wrote on each device."""
    texts = [path.read_text(encoding="utf-8") for path in tracked("results/*/stages/comparison.md")]
    return "\n\n".join(text.strip() for text in texts) or NOTHING


# -- the model -------------------------------------------------------------------------------------


def presets() -> str:
    """The shape of each preset, and the batch with which it is trained."""
    rows = [["preset", *"DLHGKFV", "parameters", "workload B × T"]]
    for name, model in PRESETS.items():
        dims = model.dims(1, 1)
        used = WORKLOADS.get(name)
        batch = f"{used.batch_size} × {used.seq_len}" if used else "none"
        rows.append(
            [f"`{name}`", *(str(dims[c]) for c in "DLHGKFV"), f"{model.parameters:,}", batch]
        )
    return markdown_table(rows)


def tiers() -> str:
    """What the model of each tier calls. One with a ``block`` calls the block's parts in that
    alone, but for the norm, which is the model's last as well; one with a ``stack`` calls that, or
    block by block where its plan says so."""

    def cell(tier: Tier, op: str) -> str:
        if "block" in tier.table and op in PARTS and op != "rms_norm":
            return "in `block`"
        if "stack" in tier.table and op == "block":
            return "in `stack`, or by itself"
        return f"`{tier.table[op]}`" if op in tier.table else ""

    parts = [op for op in V1.table if op in PARTS]
    names = [*parts, "block", "stack", *(op for op in V1.table if op not in PARTS)]
    rows = [[f"`{op}`", *(cell(tier, op) for tier in TIERS.values())] for op in names]
    return markdown_table([["op", *(tier.name.upper() for tier in TIERS.values())], *rows])


# -- README ----------------------------------------------------------------------------------------


def ladder_picture() -> str:
    """Markdown of README that shows the steps of the device that was measured last."""
    records = _measured_last()
    if not records:
        return NOTHING
    return (
        f"![Time of a training step over the floor's: V1 to V4 and peers]"
        f"({PICTURE.relative_to(ROOT)})\n\n"
        f"*{records[0].device}; each row is a model size and precision, and has its fastest tier's "
        "time. A peer is\nanother project's step; the floor is torch's matrix products, attention "
        "and AdamW alone.*"
    )


def draw_picture() -> None:
    """Draw the picture again if it is not of the newest records."""
    records = _measured_last()
    mark = f"<!-- {' '.join(f'{record.group}: {source(record)}.' for record in records)} -->"
    if records and not (PICTURE.exists() and mark in PICTURE.read_text(encoding="utf-8")):
        from tinyllama.harness.report.plots import ladder  # which needs the extra `report`

        PICTURE.write_text(f"{ladder(records).rstrip()}\n{mark}\n", encoding="utf-8")


def _measured_last() -> list[Record]:
    """The records with steps of the device that was measured last."""
    return max(newest(StepEntry), key=lambda records: max(r.date for r in records), default=[])


def released_bugs() -> str:
    """How many bugs of released kernels the checks find, by the last run of `field.run`."""
    record = released_bugs_record()
    cases = [case for case in record["cases"] if case["issue"]]
    detected = [case for case in cases if case["found_by"]]  # the last run found it by all of these
    *first, last = [f"`{library}`" for library in sorted({case["library"] for case in cases})]
    libraries = f"{', '.join(first)} and {last}"
    return (
        f"In released kernels of {libraries}, the checks of\n{record['date']} found "
        f"{len(detected)} of {len(cases)} bugs, each from a public issue, without a hint of\n"
        "where to look; more in the newest releases: [docs/FIELD.md](docs/FIELD.md)."
    )


def versions() -> str:
    """What is supported, what CI installs, and what the figures were measured with."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    python = [line for line in project["classifiers"] if "Python :: 3." in line]
    first, last = (line.rpartition(" ")[2] for line in (python[0], python[-1]))
    torch, triton = project["dependencies"][0], project["optional-dependencies"]["triton"][0]
    lanes = set(re.findall(r'python-version: "(.*)"', _text(".github/workflows/ci.yml")))
    oldest, newer = sorted(lanes, key=lambda lane: [int(part) for part in lane.split(".")])
    floor, latest_pins = _pinned("floor"), _pinned("newest")
    records = _of_kind(StepEntry)

    def measured(name: str) -> str:
        return ", ".join(dict.fromkeys(record.versions[name] for record in records))

    rows = [["", "supported", "oldest in CI", "newest in CI", "figures measured with"]]
    rows.append(["Python", f"{first} to {last}", oldest, newer, measured("python")])
    for name, needed in (("torch", torch), ("triton", triton)):
        least = f"{needed.removeprefix(f'{name}>=').partition(';')[0]} or later"
        rows.append([name, least, floor[name], latest_pins[name], measured(name)])
    devices = ", ".join(dict.fromkeys(record.device for record in records))
    rows.append(["device", "CPU, CUDA or ROCm GPU", "CPU", "CPU", devices])
    return markdown_table(rows)


def _pinned(name: str) -> dict[str, str]:
    """The versions of torch and triton in a file of constraints."""
    pins = re.findall(r"^(torch|triton)([=<>].*)$", _text(f"constraints/{name}.txt"), re.MULTILINE)
    return {package: re.sub(r"[=<>]", "", pin).replace(",", " to ") for package, pin in pins}


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
