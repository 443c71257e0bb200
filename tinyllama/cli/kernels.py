"""``tinyllama kernels``: what resources every kernel uses on a chip, and whether it got worse.

Nothing is run and no GPU is needed. torch is imported by the command, not here.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import check_known, file_path
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_writable, read_regular, write_json
from tinyllama.harness.machine.parsed import json_of

if TYPE_CHECKING:
    from tinyllama.harness.declare.op import Op, Provider
    from tinyllama.harness.kernels.instructions import Instructions
    from tinyllama.harness.kernels.resources import Compilation

WORSE = 1  # exit status when something got worse
# The dtype of a case, and how products of float32 are made.
MODES = (("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"))
DEFAULT = ("gfx942", "sm_90")


@dataclass(frozen=True)
class Row:
    """The resources of a kernel, compiled for a case; a row of the table and of the JSON.

    launch: a number from 1 for each way in which the case compiles this kernel.
    registers: of a thread; spilled_bytes: of a thread; shared_bytes: of a program.
    occupancy: warps that a partition of the chip holds, limited by ``limited_by``; None where the
    chip is not described.
    """

    case: str
    launch: int
    op: str
    kernel: str
    chip: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    occupancy: float | None
    limited_by: str
    instructions: "Instructions"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        from tinyllama.harness.kernels.instructions import Instructions

        return cls(**{**values, "instructions": Instructions.from_json(values["instructions"])})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "instructions": self.instructions.to_json()}

    @property
    def place(self) -> tuple[str, str, str, int]:
        return self.chip, self.case, self.kernel, self.launch

    def __str__(self) -> str:
        return f"{self.kernel} on {self.chip}, {self.case}"


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    kernels = subparsers.add_parser(
        "kernels", help="compile each kernel, and show what resources it uses"
    )
    kernels.description = (
        "Compile every kernel of the timed cases for chips that need not be present, and show "
        "registers, spills, shared memory, occupancy, the widest access of a thread to global "
        "memory and the matrix instructions. With --against, exit 1 when a kernel has less "
        "occupancy, spills more, has narrower accesses, loses a matrix instruction or gains an "
        "atomic, compared with the file of another revision."
    )
    option = kernels.add_argument
    default = "default gfx942 and sm_90, where triton compiles for them"
    option("--chip", action="append", metavar="NAME", help=f"repeatable ({default})")
    option("--op", action="append", metavar="NAME", help="only this op; repeatable")
    option("--json", type=file_path, metavar="PATH", help="write the table as JSON")
    option(
        "--against",
        type=file_path,
        metavar="PATH",
        help="a table written by --json, to compare with",
    )
    kernels.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, print and compare; the exit status."""
    from tinyllama.harness.kernels.resources import CHIPS, lacking
    from tinyllama.harness.report.terminal import console
    from tinyllama.ops import OPS

    chips = args.chip or [chip for chip in DEFAULT if not lacking(chip)]
    check_known("--chip", chips, CHIPS)
    check_known("--op", args.op, OPS)
    for chip in chips:
        if reason := lacking(chip):
            raise UsageError(f"--chip {chip}: {reason}")
    check_writable(args.json, "--json")
    before = _read(args.against) if args.against else None
    if before is not None:
        _check_held(args.against, before, chips, args.op)
    rows = [
        row
        for op in OPS.values()
        if not args.op or op.name in args.op
        for provider in _with_kernels(op)
        for row in _rows(op, provider, chips)
    ]
    if not rows:
        ops, where = ", ".join(args.op or OPS), ", ".join(chips) or "any chip"
        raise UsageError(f"no kernel of {ops} compiles for {where}: choose with --op and --chip")
    console().print(_table(rows))
    if args.json:
        write_json(args.json, {"triton": _triton(), "kernels": [row.to_json() for row in rows]})
    if before is None:
        return 0
    worse = list(_worse(before, rows, set(chips), set(args.op or OPS)))
    print("\n".join(worse) if worse else "no kernel takes more than before")
    return WORSE if worse else 0


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _rows(op: "Op", provider: "Provider", chips: list[str]) -> Iterator[Row]:
    """A row for each chip, case, mode and kernel, and for each way in which it is compiled."""
    from tinyllama.harness.check.cases import OpCase
    from tinyllama.harness.check.launched import launches_of
    from tinyllama.harness.kernels.precision import DTYPE_OF
    from tinyllama.harness.kernels.resources import compilation

    for chip in chips:
        for case in op.timed[1:] or op.timed:
            compiled: set[str] = set()
            for short, precision in MODES:
                op_case = OpCase(op, provider, case, DTYPE_OF[short])
                if op_case.unsupported() is not None:
                    continue
                name = str(op_case) if precision == "ieee" else f"{provider}-{case}-tf32"
                keys: dict[str, list[str]] = {}
                target = {"chip": chip, "precision": precision}
                for launch in launches_of(op, provider, case, DTYPE_OF[short], **target):
                    compiling = compilation(launch, chip)
                    ways = keys.setdefault(compiling.kernel, [])
                    if compiling.key in ways:
                        continue
                    ways.append(compiling.key)
                    if precision == "tf32" and compiling.key in compiled:
                        continue  # no matrix product, or this chip has none in tf32
                    compiled.add(compiling.key)
                    yield _row(op, compiling, name, len(ways))


def _row(op: "Op", compiling: "Compilation", case: str, launch: int) -> Row:
    from tinyllama.harness.kernels.occupancy import occupancy

    taken = compiling.run()
    resident = occupancy(taken)
    return Row(
        case=case,
        launch=launch,
        op=op.name,
        kernel=compiling.kernel,
        chip=compiling.chip.name,
        registers=taken.registers,
        spilled_bytes=taken.spilled,
        shared_bytes=taken.shared,
        num_warps=taken.num_warps,
        occupancy=resident.warps if resident else None,
        limited_by=resident.limit if resident else "",
        instructions=taken.instructions,
    )


def _table(rows: list[Row]) -> Any:
    from rich.table import Table

    from tinyllama.harness.kernels.instructions import names, width

    table = Table()
    for column in ("chip", "case", "kernel"):
        table.add_column(column, overflow="fold")
    for column in ("registers", "spilled B", "shared B", "warps", "a partition holds"):
        table.add_column(column, justify="right")
    for column in ("widest load", "widest store", "products"):
        table.add_column(column)
    for row in rows:
        resident = "" if row.occupancy is None else f"{row.occupancy:g}, {row.limited_by}"
        numbers = (row.registers, row.spilled_bytes, row.shared_bytes, row.num_warps)
        has = row.instructions
        kinds = (width(has.loads), width(has.stores), names(has.products))
        table.add_row(row.chip, row.case, row.kernel, *map(str, numbers), resident, *kinds)
    return table


def _read(path: Path) -> list[Row]:
    try:
        data = json_of(read_regular(path))
        rows = [Row.from_json(row) for row in data["kernels"]]
        triton = data["triton"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--against {str(path)!r} is no table of this command: {error!r}; make one with --json"
        ) from error
    if triton != _triton():
        raise UsageError(
            f"--against {str(path)!r} was made with triton {triton}, this is {_triton()}: code "
            "differs between them; make both with one version"
        )
    return rows


def _check_held(path: Path, before: list[Row], chips: list[str], ops: list[str] | None) -> None:
    """Refuse a table without a chip, or without an op there that --op names."""
    from tinyllama.ops import OPS

    names = [name for name in ops or OPS if _with_kernels(OPS[name])]
    for chip in chips:
        there = {row.op for row in before if row.chip == chip}
        absent = [name for name in names if name not in there]
        if absent and (ops or len(absent) == len(names)):
            of = ", ".join(absent) if ops else "any op"
            raise UsageError(
                f"--against {str(path)!r} has no kernel of {of} on {chip}: make it with --json and "
                "the same --op and --chip, or choose what it has"
            )


def _with_kernels(op: "Op") -> "list[Provider]":
    return [p for p in op.providers.values() if "triton" in p.requires]


def _worse(before: list[Row], after: list[Row], chips: set[str], ops: set[str]) -> Iterator[str]:
    """What got worse, kernel by kernel; a kernel that is gone is named too: nothing bounds it."""
    now = {row.place: row for row in after}
    for old in before:
        if old.chip not in chips or old.op not in ops:
            continue
        new = now.get(old.place)
        if new is None:
            yield f"MISSING {old}: it is not compiled for this case any more"
            continue
        if (old.occupancy or 0) > (new.occupancy or 0):
            yield (
                f"WORSE {old}: a partition holds {new.occupancy or 0:g} warps, before "
                f"{old.occupancy:g}; limited by {new.limited_by}"
            )
        if new.spilled_bytes > old.spilled_bytes:
            yield (
                f"WORSE {old}: {new.spilled_bytes} bytes are spilled, before {old.spilled_bytes}"
            )
        yield from (f"WORSE {old}: {lost}" for lost in new.instructions.worse(old.instructions))
