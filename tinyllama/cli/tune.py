"""``tinyllama tune``: search the configurations of kernels on a device, write its chip's table.

torch is imported by the command, not here, so that ``--help`` is quick.
"""

import argparse
import itertools
import os
from typing import TYPE_CHECKING, Any

from tinyllama.cli.argument_types import check_known, file_path
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import write_json
from tinyllama.harness.machine.parsed import json_of

if TYPE_CHECKING:
    from tinyllama.harness.check.cases import OpCase
    from tinyllama.harness.measure.tuning import Search

PACKAGE = "tinyllama.ops"


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    tune = subparsers.add_parser("tune", help="search the kernels' configurations on a GPU")
    tune.description = (
        "Time every configuration that the kernels declare, on the timed cases of their ops, and "
        "write the fastest to the table of this chip. Nothing is searched in any other run. With "
        "--show, print what a chip's table chooses, and search nothing."
    )
    option = tune.add_argument
    option("--op", action="append", metavar="NAME", help="only this op; repeatable")
    text = "a case of these sizes instead of the timed ones, of one op; repeatable"
    option("--sizes", type=_sizes, action="append", metavar="D=512,...", help=text)
    option("--show", action="store_true", help="print the choices in force; needs no GPU")
    option("--chip", metavar="NAME", help="with --show: the chip (default: this GPU's)")
    dtypes = ("fp32", "bf16", "fp16")
    option("--dtype", action="append", choices=dtypes, help="default fp32 and bf16")
    text = "of float32 matrix products"
    option("--precision", choices=("ieee", "tf32"), default="ieee", help=text)
    text = "folder of one table (default: each op's own)"
    option("--output", type=file_path, metavar="DIR", help=text)
    tune.set_defaults(run=run)


def _sizes(text: str) -> dict[str, int]:
    """``D=512,F=2048`` as a mapping. Raises ArgumentTypeError for anything else."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and value.isdecimal() for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} are no sizes: write them as D=512,F=2048")
    return {name: int(value) for name, _, value in pairs}


def run(args: argparse.Namespace) -> int:
    """Search, print and write the table; the exit status."""
    import torch

    from tinyllama.harness.kernels.chips import chip_of
    from tinyllama.harness.kernels.configs import SPACES
    from tinyllama.harness.machine.device import default_device, device_name
    from tinyllama.harness.measure.tuning import compiled_ahead, merged, search
    from tinyllama.harness.records.results import current_commit, now, versions

    cases = _cases(args)
    device = default_device()
    if args.show:
        return _show_choices(cases, args.chip or chip_of(device), args.precision)
    if args.chip:
        raise UsageError("--chip is for --show: a search is of the GPU that is here")
    if device.type == "cpu":
        raise UsageError("tune needs a GPU: on a CPU kernels are interpreted, and no time counts")
    if args.output and not args.output.is_dir():
        raise UsageError(f"--output {str(args.output)!r} is not a folder: make it first")
    for case in cases:
        if not args.output and case.op.folder is None:
            raise UsageError(
                f"op {case.op.name!r} is one file, which has no table: make it a folder, "
                f"{case.op.name}/__init__.py, or name one with --output"
            )
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    compiled_ahead(PACKAGE, cases, device, os.cpu_count() or 1)
    written = set()
    for case in cases:
        for result in search(case, device):
            _show(case, result)
            path = (args.output or SPACES[result.space].tables) / f"{chip_of(device)}.json"
            stored = json_of(path.read_text(encoding="utf-8")) if path.is_file() else {}
            table = {
                "chip": chip_of(device),
                "device": device_name(device),
                "versions": versions(),
                "commit": current_commit(),
                "date": now(),
                "spaces": merged(stored.get("spaces", {}), [result]),
            }
            path.parent.mkdir(exist_ok=True)
            write_json(path, table)
            written.add(path)
    print("\n".join(f"wrote {path}" for path in sorted(written)))
    return 0


def _cases(args: argparse.Namespace) -> "list[OpCase]":
    from tinyllama.harness import Case
    from tinyllama.harness.check.cases import OpCase
    from tinyllama.harness.kernels.precision import SHORT
    from tinyllama.model.config import PLANS
    from tinyllama.ops import OPS

    check_known("--op", args.op, OPS)
    ops = [op for op in OPS.values() if not args.op or op.name in args.op]
    sized = [Case(**sizes) for sizes in args.sizes or ()]
    if sized and len(ops) != 1:
        raise UsageError("--sizes are those of one op: name it with --op")
    for case in sized:
        dims = set(ops[0].timed[0].dims)
        if set(case.dims) != dims:
            raise UsageError(f"--sizes of {ops[0].name} are {', '.join(sorted(dims))}: give all")
    dtypes = args.dtype or ["fp32", "bf16"]
    cases = []
    for op in ops:
        providers = [op.providers[name] for name in ("triton", *PLANS) if name in op.providers]
        for provider, case in itertools.product(providers, sized or op.timed[1:]):
            for dtype, short in SHORT.items():
                op_case = OpCase(op, provider, case, dtype)
                if short in dtypes and dtype in op.dtypes and op_case.unsupported() is None:
                    cases.append(op_case)
    if not cases:
        names = ", ".join(args.op or ("the ops",))
        text = f"{names}: nothing to search in {', '.join(dtypes)}"
        raise UsageError(f"{text}: choose others with --op and --dtype")
    return cases


def _show_choices(cases: "list[OpCase]", chip: str, precision: str) -> int:
    """Print which configuration each kernel of the cases takes on a chip, and where that is said;
    the exit status."""
    import torch

    from tinyllama.harness.check.evaluate import shapes_of
    from tinyllama.harness.check.launched import launches_of, on_chip
    from tinyllama.harness.kernels.configs import SPACES, recorded_keys
    from tinyllama.harness.kernels.resources import CHIPS

    check_known("--chip", [chip] if chip else None, CHIPS)
    for case in cases:
        with recorded_keys() as keys:
            launches_of(
                *(case.op, case.provider, case.case, case.dtype),
                chip=chip or None,
                precision=precision,
            )
            if case.provider.name in case.op.asks:
                (shape,) = shapes_of(next(iter(case.op.inputs.values())), case.case.dims)
                with on_chip(chip or None, precision):
                    x = torch.empty(shape, dtype=case.dtype, device="meta")
                    case.op.asks[case.provider.name](x, case.dtype)
        print(f"{case}, {chip or 'no chip'}")
        for (name, text), key in sorted(keys.items()):
            config, listed = SPACES[name].on(chip, **key)
            by_vendor = dict(config.constants).get("BM") == 0
            what = "the vendor's BLAS, and kernels behind it" if by_vendor else config
            print(f"    {name}, {text}: {what} ({'table' if listed else 'default'})")
    return 0


def _show(case: "OpCase", result: "Search") -> None:
    print(f"{case}: {result.space} {result.key}: {result.best} ({result.gain:.2f} times as fast)")
    for config, seconds in sorted(result.seconds.items(), key=lambda item: item[1]):
        spilled = result.spilled.get(config)
        spills = f", {spilled} registers spilled" if spilled else ""
        print(f"    {seconds * 1e6:9.1f} us  {config}{spills}")
    for config, reason in result.failed.items():
        print(f"    left out   {config}: {reason}")
