"""``tinyllama train``: train a model, and print how it went."""

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tinyllama.cli.argument_types import add_options, file_path, whole_within
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.files import check_apart, check_writable, write_json
from tinyllama.model.config import MEMORY, PRESETS, TIER_NAMES, ModelConfig, TrainConfig

if TYPE_CHECKING:
    from tinyllama.training.checkpoint import Checkpoint
    from tinyllama.training.data import Batches
    from tinyllama.training.ranks import Ranks

STATUS = {"completed": 0, "failed": 1, "interrupted": 130}
NO_RANK = 1  # exit status when another rank was lost
NO_GRADIENT = 1  # exit status when the run completed and a parameter received no gradient

Config = TypeVar("Config", ModelConfig, TrainConfig)


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("train", help="train, and print how it went")
    parser.description = (
        "Train a Tiny LLaMA and print loss, speed, memory and which parameters received a "
        "gradient. With --resume, what is not given is taken from the checkpoint."
    )
    parser.set_defaults(run=run)
    workload_options(parser, num_steps=TrainConfig().num_steps)
    option = parser.add_argument
    path: dict[str, Any] = {"type": file_path, "metavar": "PATH"}
    option("--data", **path, help="text file or folder to train on (default: random tokens)")
    option("--save", **path, help="write a checkpoint (safetensors) at the end")
    every = {"type": whole_within(1, 2**31 - 1), "metavar": "N"}
    option("--save-every", **every, help="and after every N steps, to the same file")
    option("--resume", **path, help="continue from a checkpoint, of any tier")
    option("--json", **path, help="write the result as JSON")
    text = "show the output of every op, and its gradient, in the first and the last step"
    option("--diagnose", action="store_true", help=text)
    text = "split parameters, gradients and moments over the ranks of torchrun (FSDP2; v1 to v3)"
    option("--shard", action="store_true", help=text)
    seconds = {"type": whole_within(1, 86400), "default": 600, "metavar": "SECONDS"}
    text = "how long a rank waits for the others before the job fails (default %(default)s)"
    option("--rank-timeout", **seconds, help=text)


def workload_options(parser: argparse.ArgumentParser, *, num_steps: int) -> None:
    """Add the options that say which step is run; `settings` reads them."""
    option = parser.add_argument
    option("--tier", choices=TIER_NAMES, default="v1", help="doctor lists them (default v1)")
    text = "switch a part of the tier off, such as compile or attention; repeatable"
    option("--without", metavar="PART", action="append", default=[], help=text)
    text = (
        "selective: recompute all but attention in the backward pass (v3, v4); small: recompute "
        "all of a block, and update each layer when its gradients exist (default fast)"
    )
    option("--memory", choices=MEMORY, default="fast", help=text)
    text = (
        "launches of a block of v4: fused (default; what this chip's table chooses for each "
        "product), single (one launch a pass), or which products have fused kernels: all, none, "
        "or names joined by +, such as out+down"
    )
    option("--plan", metavar="PLAN", help=text)
    text = "shape of the model; options override it (default small)"
    option("--preset", choices=PRESETS, help=text)
    add_options(parser, ModelConfig(), TrainConfig(num_steps=num_steps))
    parser.set_defaults(num_steps=num_steps)
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")


def run(args: argparse.Namespace) -> int:
    """Train and print; the exit status."""
    if args.resume is None:
        settings(args, None)  # refuses what cannot be used before torch is imported
    from tinyllama.training.ranks import launched

    ranks = replace(launched(), seconds=args.rank_timeout)
    if ranks.count == 1:
        return _run(args, ranks)
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        # So that torchrun shows the error of the rank that failed first.
        status: int = record(_run)(args, ranks)  # type: ignore[assignment]
        return status
    except UsageError as error:
        raise UsageError(f"rank {ranks.rank} of {ranks.count}: {error}") from error
    except ConnectionError as error:
        print(f"tinyllama: error: rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(NO_RANK)  # an orderly exit waits for the GPU, and that waits for the lost rank


def _run(args: argparse.Namespace, ranks: "Ranks") -> int:
    import tinyllama
    from tinyllama.cli.summary import print_diagnosis, print_summary, progress_bar
    from tinyllama.harness.machine.device import current
    from tinyllama.harness.records.results import versions
    from tinyllama.harness.report.terminal import console
    from tinyllama.model.tiers import resolve
    from tinyllama.training import checkpoint
    from tinyllama.training.data import RandomTokens, TextBytes
    from tinyllama.training.ranks import device_of, joined
    from tinyllama.training.train import NotSavedError, train

    tier = resolve(args.tier).without(*args.without).with_memory(args.memory)
    tier = tier.with_plan(args.plan)
    check_apart(("--data", args.data), ("--save", args.save), ("--json", args.json))
    check_apart(("--resume", args.resume), ("--json", args.json))
    resumed = checkpoint.load(args.resume) if args.resume else None
    model, config = settings(args, resumed)
    device = current(device_of(ranks, args.device))
    ranks.part(config.batch_size)
    if args.save_every and args.save is None:
        raise UsageError(f"--save-every {args.save_every} has no file: use it with --save")
    if ranks.first:
        check_writable(args.json, "--json")
        check_writable(args.save, "--save")
    batches: Batches = RandomTokens(model.vocab_size, config)
    if args.data:
        batches = TextBytes(args.data, model.vocab_size, config)
    if resumed:
        _check_data(args, resumed, batches)

    not_saved: NotSavedError | None = None
    bar = progress_bar(config) if ranks.first else nullcontext()
    with joined(ranks, device), bar as on_step:
        ranks.check_alike(
            {
                "tier": str(tier.table),
                "model": str(model),
                "training": str(config),
                "data": str(batches.describe()),
                "steps done": resumed.steps if resumed else 0,
                "versions": {"tinyllama": tinyllama.__version__, **versions()},
                "--shard": args.shard,
                "--save-every": args.save_every,
                "--diagnose": args.diagnose,
            }
        )
        try:
            result = train(
                model,
                config,
                tier,
                device=device,
                batches=batches,
                resume=resumed,
                save_to=args.save,
                save_every=args.save_every,
                diagnosed=args.diagnose,
                on_step=on_step,
                ranks=ranks,
                in_shards=args.shard,
            )
        except NotSavedError as error:
            result, not_saved = error.result, error
    if ranks.first:
        out = console()
        for diagnosis in result.diagnoses:
            print_diagnosis(diagnosis, out)
        print_summary(result, out)
        if args.json:
            write_json(args.json, result.as_dict())
    if not_saved:
        raise not_saved
    return STATUS[result.status] or (NO_GRADIENT if result.lost else 0)


def settings(
    args: argparse.Namespace, resumed: "Checkpoint | None"
) -> tuple[ModelConfig, TrainConfig]:
    """The configs: options over the preset, over the checkpoint's, over the defaults."""
    model = PRESETS[args.preset] if args.preset else resumed.model if resumed else ModelConfig()
    train = resumed.train if resumed else TrainConfig()
    options = {name: value for name, value in vars(args).items() if value is not None}
    if resumed is None and args.num_heads is not None and args.num_kv_heads is None:
        if args.num_heads % 2:
            raise UsageError(f"--num-heads {args.num_heads} is odd: give --num-kv-heads, too")
        options["num_kv_heads"] = args.num_heads // 2  # as the published program has them
    if args.max_grad_norm == "none":
        options["max_grad_norm"] = None
    return _with(model, options), _with(train, options)


def _with(config: Config, options: dict[str, Any]) -> Config:
    """A config with the fields that options of the same name give."""
    names = {field.name for field in fields(config)} & options.keys()
    return replace(config, **{name: options[name] for name in names})


def _check_data(args: argparse.Namespace, resumed: "Checkpoint", batches: "Batches") -> None:
    """A checkpoint does not contain its text, so --data must name it; other data gives a note."""
    if args.data is None and resumed.batches["kind"] == "text":
        raise UsageError(
            f"checkpoint {str(args.resume)!r} was trained on text of "
            f"{resumed.batches['bytes']} bytes: name it with --data"
        )
    if batches.describe() != resumed.batches:
        note = "the data is not what the checkpoint was trained on"
        print(f"tinyllama: note: {note}", file=sys.stderr)
