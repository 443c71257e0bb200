"""``tinyllama plan``: what a training step would take on many GPUs."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path, number, whole_within
from tinyllama.harness.machine.errors import UsageError
from tinyllama.model.config import PRESETS

# Of an NVIDIA H200 in a DGX H200, bytes a second of one GPU in one direction, by NVIDIA's
# datasheets: NVLink 900 GB/s in both directions, and one ConnectX-7 of 400 Gb/s for each GPU.
INSIDE, BETWEEN = 450.0, 50.0
UNMEASURED = "tensor and pipeline parallelism: not planned, nothing was measured of either"


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("plan", help="time and memory of a step on many GPUs")
    parser.description = (
        "Compute time, memory and tokens/s of a training step of tier v3 in bf16, from declared "
        "operations and bytes, recorded timings of single ops, and given link speeds: with all "
        "parameters on every GPU, and sharded. On recorded steps it is within 10%, but for memory."
    )
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("--gpus", type=whole_within(1, 10**6), required=True, metavar="N", help="in all")
    option("--params", metavar="SIZE", help="a published shape: 7B, 8B, 13B, 70B or 405B")
    option("--preset", choices=PRESETS, help="or one of this project's own")
    option("--seq-len", type=whole_within(1, 2**24), default=4096, metavar="T", help="default 4096")
    option(
        "--batch-size",
        type=whole_within(1, 2**20),
        default=1,
        metavar="B",
        help="sequences of each GPU in a step (default 1)",
    )
    option(
        "--per-node",
        type=whole_within(1, 10**6),
        default=8,
        metavar="N",
        help="GPUs that are linked inside a node (default 8)",
    )
    option(
        "--inside",
        type=number,
        default=INSIDE,
        metavar="GB/s",
        help="link of a GPU to those of its node, in one direction (default %(default)g: NVLink "
        "of an H200)",
    )
    option(
        "--between",
        type=number,
        default=BETWEEN,
        metavar="GB/s",
        help="link of a GPU to other nodes (default %(default)g: a network card of 400 Gb/s each)",
    )
    option(
        "--results-dir",
        type=file_path,
        default=Path("results/nvidia-h200"),
        help="records of the device, with timings of ops in bf16 (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plans; the exit status."""
    from tinyllama.bench.planner import SHAPES, Links, Rates, Work, plans
    from tinyllama.harness.report.terminal import console

    if (args.params is None) == (args.preset is None):
        raise UsageError("name the model by one of --params and --preset")
    if args.params is not None and args.params not in SHAPES:
        raise UsageError(f"--params {args.params!r:.80} is unknown: use one of {', '.join(SHAPES)}")
    for name in ("inside", "between"):
        speed = getattr(args, name)
        if not 1e-3 <= speed <= 1e6:
            raise UsageError(f"--{name} is {speed!r:.80}: use GB/s, from 0.001 to 1000000")
    model = SHAPES[args.params] if args.params else PRESETS[args.preset]
    rates = Rates(_records(args.results_dir))
    work = Work(model, args.batch_size, args.seq_len)
    links = Links(per_node=args.per_node, inside=args.inside * 1e9, between=args.between * 1e9)
    out = console()
    said = {
        "model": f"{model.parameters:,} parameters: hidden {model.hidden_dim}, {model.num_layers} "
        f"layers, {model.num_heads} heads, {model.num_kv_heads} kv heads, ffn {model.ffn_dim}, "
        f"vocabulary {model.vocab_size}",
        "step": f"tier v3, bf16, {args.gpus} GPUs x {args.batch_size} x {args.seq_len} tokens",
        "rates": f"ops of {rates.record.device}, commit {rates.record.short_commit}, "
        f"{rates.record.date[:10]}; copy {rates.copy / 1e12:.2f} TB/s, product "
        f"{rates.product / 1e12:.0f} TFLOP/s, both measured",
        "links": f"given, not measured: {args.inside:g} GB/s inside a node of {args.per_node}, "
        f"{args.between:g} GB/s between nodes",
    }
    for name, value in said.items():
        out.print(f"{name:<13}{value}", soft_wrap=True)
    for plan in plans(work, args.gpus, links, rates):
        parts = ", ".join(
            f"{name} {getattr(plan, name) * 1e3:,.2f} ms"
            for name in ("forward", "backward", "optimizer", "exposed")
        )
        out.print(f"{plan.way}, memory {plan.memory}", style="bold")
        out.print(f"  step       {plan.seconds * 1e3:,.2f} ms: {parts}", soft_wrap=True)
        spent, exposed = plan.communication * 1e3, plan.exposed * 1e3
        out.print(f"  links      {spent:,.2f} ms of communication, {exposed:,.2f} ms of it exposed")
        out.print(f"  speed      {plan.tokens_per_second:,.0f} tokens/s")
        out.print(
            f"  memory     {plan.bytes / 2**30:,.1f} GiB a GPU: parameters and moments "
            f"{plan.state / 2**30:,.1f}, activations or gradients {plan.passing / 2**30:,.1f}",
            soft_wrap=True,
        )
    out.print(UNMEASURED, soft_wrap=True)
    return 0


def _records(folder: Path) -> Iterable[Any]:
    from tinyllama.harness.records.results import load

    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise UsageError(
            f"--results-dir {str(folder)!r} has no records: name the folder of a device"
        )
    try:
        return [load(path) for path in paths]
    except (OSError, ValueError) as error:
        raise UsageError(f"--results-dir {str(folder)!r}: {error}; name another") from error
