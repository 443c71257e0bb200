"""``tinyllama kernels``: what resources every kernel uses on a chip, and whether it got worse.

Nothing is run and no GPU is needed. torch is imported by the command, not here.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import check_known, file_path
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_writable, read_regular, write_json

if TYPE_CHECKING:
    from tinyllama.harness.declare.op import Op, Provider
    from tinyllama.harness.kernels.resources import Compilation

WORSE = 1  # exit status when something got worse
# The dtype of a case, and how products of float32 are made.
MODES = (("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"))
DEFAULT = ("gfx942", "sm_90")


@dataclass(frozen=True)
class Row:
    """The resources of a kernel, compiled for a case; a row of the table and of the JSON.

    launch: a number from 1 for each way in which the case compiles this kernel.
    registers, spilled_bytes: of a thread; shared_bytes: of a program.
    occupancy: warps that a partition of the chip holds, limited by ``limited_by``; None where the
    chip is not described.
    loads, stores, products: as of `tinyllama.harness.kernels.resources.Resources`.
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
    loads: int
    stores: int
    products: tuple[str, ...]

    @property
    def place(self) -> tuple[str, str, str, int]:
        return self.chip, self.case, self.kernel, self.launch

    def worse(self, before: "Row") -> Iterator[str]:
        """What another revision's kernel had and this one lost, in words; a gain is no matter."""
        now, then = self.occupancy or 0, before.occupancy or 0
        if now < then:
            yield f"a partition holds {now:g} warps, before {then:g}; limited by {self.limited_by}"
        if self.spilled_bytes > before.spilled_bytes:
            yield f"{self.spilled_bytes} bytes are spilled, before {before.spilled_bytes}"
        for what, size, old in (
            ("load", self.loads, before.loads),
            ("store", self.stores, before.stores),
        ):
            if size < old:
                yield f"its widest {what} is {width(size)}, before {width(old)}"
        if lost := sorted(set(before.products) - set(self.products)):
            yield f"its products are {names(self.products)}, before {names(lost)}"


@dataclass(frozen=True)
class Table:
    """What ``--json`` writes: the rows, and the version of triton that compiled them."""

    triton: str
    kernels: list[Row]


def width(size: int) -> str:
    """The bytes of an access, as shown."""
    from tinyllama.harness.kernels.assembly import TILE

    return {0: "none", TILE: "a tile"}.get(size, f"{size} B")


def names(products: Iterable[str]) -> str:
    return ", ".join(products) or "none"


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    kernels = subparsers.add_parser(
        "kernels", help="compile each kernel, and show what resources it uses"
    )
    kernels.description = (
        "Compile every kernel of the timed cases for chips that need not be present, and show "
        "registers, spills, shared memory, occupancy, the widest access of a thread to global "
        "memory and the matrix instructions. With --against, exit 1 when a kernel has less "
        "occupancy, spills more, has narrower accesses or loses a matrix instruction, compared "
        "with the file of another revision."
    )
    option = kernels.add_argument
    default = "default gfx942 and sm_90, where triton compiles for them"
    option("--chip", action="append", metavar="NAME", help=f"repeatable ({default})")
    option("--op", action="append", metavar="NAME", help="only this op; repeatable")
    option("--json", type=file_path, metavar="PATH", help="write the table as JSON")
    text = "a table written by --json, to compare with"
    option("--against", type=file_path, metavar="PATH", help=text)
    kernels.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, print and compare; the exit status."""
    from tinyllama.harness.check.launched import with_kernels
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
    ops = args.op or list(OPS)
    before = _read(args.against, chips, args.op or []) if args.against else None
    providers = with_kernels(map(OPS.__getitem__, ops))
    rows = [row for op, provider in providers for row in _rows(op, provider, chips)]
    if not rows:
        text = f"no kernel of {', '.join(ops)} compiles for {', '.join(chips) or 'any chip'}"
        raise UsageError(f"{text}: choose with --op and --chip")
    console().print(_table(rows))
    if args.json:
        write_json(args.json, asdict(Table(_triton(), rows)))
    if before is None:
        return 0
    now = {row.place: row for row in rows}
    losses = []
    for old in (row for row in before if row.chip in chips and row.op in ops):
        title = f"{old.kernel} on {old.chip}, {old.case}"
        if old.place not in now:  # its loss would be unseen
            losses.append(f"MISSING {title}: it is not compiled for this case any more")
        else:
            losses += [f"WORSE {title}: {loss}" for loss in now[old.place].worse(old)]
    print("\n".join(losses) or "no kernel takes more than before")
    return WORSE if losses else 0


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
    taken = compiling.run()
    resident = taken.occupancy
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
        loads=taken.loads,
        stores=taken.stores,
        products=taken.products,
    )


def _table(rows: list[Row]) -> Any:
    from rich import table as rich_table

    table = rich_table.Table()
    for column in ("chip", "case", "kernel"):
        table.add_column(column, overflow="fold")
    for column in ("registers", "spilled B", "shared B", "warps", "a partition holds"):
        table.add_column(column, justify="right")
    for column in ("widest load", "widest store", "products"):
        table.add_column(column)
    for row in rows:
        resident = "" if row.occupancy is None else f"{row.occupancy:g}, {row.limited_by}"
        numbers = (row.registers, row.spilled_bytes, row.shared_bytes, row.num_warps)
        kinds = (width(row.loads), width(row.stores), names(row.products))
        table.add_row(row.chip, row.case, row.kernel, *map(str, numbers), resident, *kinds)
    return table


def _read(path: Path, chips: list[str], ops: list[str]) -> list[Row]:
    """The rows of a table. Raises UsageError for one of another Triton, one without a chip, and one
    without an op there."""
    import msgspec

    fix = "make it with --json, and the same --op and --chip"
    try:
        table = msgspec.json.decode(read_regular(path), type=Table)
    except (OSError, ValueError) as error:
        text = f"--against {str(path)!r} is no table of this command: {error}"
        raise UsageError(f"{text}: {fix}") from error
    if table.triton != _triton():
        raise UsageError(
            f"--against {str(path)!r} was made with triton {table.triton}, this is {_triton()}: "
            "code differs between them; make both with one version"
        )
    for chip in chips:
        in_table = {row.op for row in table.kernels if row.chip == chip}
        if not in_table or not in_table.issuperset(ops):
            absent = ", ".join(sorted({*ops} - in_table)) or "any op"
            raise UsageError(f"--against {str(path)!r} has no kernel of {absent} on {chip}: {fix}")
    return table.kernels
