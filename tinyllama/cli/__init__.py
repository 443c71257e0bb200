"""The command line: ``python -m tinyllama train``, ``doctor``, ``compare`` and ``results``.

Exit status: 0 done; 1 the run failed, or a parameter received no gradient; 2 a value that
cannot be used, said in one line before anything runs; 10 to 15 what ``compare`` found; 130 Ctrl-C.

torch is imported by the commands, not here, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tinyllama
from tinyllama.cli.certify import add_certify
from tinyllama.cli.check import add_check
from tinyllama.cli.kernels import add_kernels
from tinyllama.cli.records import add_commands
from tinyllama.cli.report import add_command as add_report
from tinyllama.cli.tune import add_tune
from tinyllama.model.config import (
    MEMORY,
    PRECISIONS,
    PRESETS,
    ConfigError,
    ModelConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from tinyllama.training.checkpoint import Checkpoint
    from tinyllama.training.data import Batches
    from tinyllama.training.result import Result

OK, RUN_FAILED, BAD_VALUE, CTRL_C = 0, 1, 2, 130

# torch's two ways of saying that an allocation failed, on a GPU and on the CPU.
_ALLOCATION_FAILED = re.compile("out of memory|can't allocate memory", re.IGNORECASE)

_MODEL_OPTIONS = ("hidden_dim", "num_layers", "num_heads", "num_kv_heads")
_TRAIN_OPTIONS = ("batch_size", "accumulate", "seq_len", "learning_rate", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    try:
        args = _parser().parse_args(argv)
        if "run" in args:
            return args.run(args)
        return _train(args) if args.command == "train" else _doctor()
    except ConfigError as error:
        return _say(f"error: {error}", BAD_VALUE)
    except KeyboardInterrupt:
        return _say("interrupted", CTRL_C)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _ALLOCATION_FAILED.search(str(error)):
            return _say(f"error: {error}: use a smaller model or batch", BAD_VALUE)
        raise


def _say(message: str, status: int) -> int:
    print("tinyllama:", " ".join(message.split()), file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of every other bad value."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: use one") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: use one like 3e-4") from None


def _limit(text: str) -> float | str:
    return text if text == "none" else _number(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tinyllama", description="A Tiny LLaMA in tiers of optimization.")
    version = f"tinyllama {tinyllama.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("doctor", help="say what can run on this machine, and why the rest cannot")
    _add_train_options(commands.add_parser("train", help="train, and say how it went"))
    add_commands(commands)
    add_report(commands)
    add_tune(commands)
    add_check(commands)
    add_kernels(commands)
    add_certify(commands)
    return parser


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    model, train = ModelConfig(), TrainConfig()
    add = parser.add_argument
    parser.description = (
        "Train a Tiny LLaMA and print loss, speed, memory and which parameters received a "
        "gradient. With --resume, what is not given is taken from the checkpoint."
    )
    add("--tier", default="v1", help="which tier; doctor lists them (default v1)")
    add(
        "--without",
        metavar="PART",
        action="append",
        default=[],
        help="switch a part of the tier off, such as compile or attention; repeatable",
    )
    add(
        "--memory",
        choices=MEMORY,
        default="fast",
        help="selective: compute all but attention again in backward (v3); small: all of a block, "
        "and update as gradients come (default fast)",
    )
    add("--preset", choices=PRESETS, help="shape of the model; options override it (default small)")
    add("--hidden-dim", type=_whole, metavar="D", help=f"default {model.hidden_dim}")
    add("--num-layers", type=_whole, metavar="L", help=f"default {model.num_layers}")
    add("--num-heads", type=_whole, metavar="H", help=f"default {model.num_heads}")
    add("--num-kv-heads", type=_whole, metavar="G", help=f"default {model.num_kv_heads}")
    add("--batch-size", type=_whole, metavar="B", help=f"default {train.batch_size}")
    add(
        "--accumulate",
        type=_whole,
        metavar="A",
        help=f"micro-batches of B in a step, whose loss is their mean (default {train.accumulate})",
    )
    add("--seq-len", type=_whole, metavar="T", help=f"default {train.seq_len}")
    add(
        "--num-steps",
        type=_whole,
        default=train.num_steps,
        metavar="N",
        help="steps of this run; with --resume they are added to those done (default %(default)s)",
    )
    add("--learning-rate", type=_number, metavar="LR", help=f"default {train.learning_rate}")
    add(
        "--max-grad-norm",
        type=_limit,
        metavar="NORM",
        help="scale gradients down to this norm over all parameters (default none)",
    )
    add("--precision", choices=PRECISIONS, help=f"default {train.precision}")
    add("--use-amp", action="store_true", help="the same as --precision bf16")
    add("--seed", type=_whole, help=f"of weights and data (default {train.seed})")
    add("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    add("--data", type=Path, help="text file or folder to train on (default: random tokens)")
    add("--save", type=Path, metavar="PATH", help="write a checkpoint (safetensors) at the end")
    add("--resume", type=Path, metavar="PATH", help="continue from a checkpoint, of any tier")
    add("--json", type=Path, metavar="PATH", help="write the result as JSON")
    add(
        "--diagnose",
        action="store_true",
        help="show what every op puts out, and its gradient, in the first and the last step",
    )
    add("--diagnose-every", type=_whole, metavar="N", help="the same, in every N-th step as well")


def _doctor() -> int:
    from tinyllama.cli.doctor import print_doctor
    from tinyllama.cli.summary import console

    print_doctor(console(sys.stdout))
    return OK


def _train(args: argparse.Namespace) -> int:
    from tinyllama.cli.summary import ProgressBar, console, print_diagnosis, print_summary
    from tinyllama.model.tiers import resolve
    from tinyllama.training import checkpoint
    from tinyllama.training.data import RandomTokens, TextBytes
    from tinyllama.training.files import check_apart, check_writable
    from tinyllama.training.train import train

    tier = resolve(args.tier).without(*args.without).with_memory(args.memory)
    check_apart(("--data", args.data), ("--save", args.save), ("--json", args.json))
    check_apart(("--resume", args.resume), ("--json", args.json))
    resumed = checkpoint.load(args.resume) if args.resume else None
    model_config, config = _settings(args, resumed)
    if args.json:
        check_writable(args.json, "--json")
    batches: Batches
    if args.data:
        batches = TextBytes(args.data, model_config.vocab_size, config)
    else:
        batches = RandomTokens(model_config.vocab_size, config)
    if resumed:
        _check_data(args, resumed, batches)

    with ProgressBar(config) as bar:
        result = train(
            model_config,
            config,
            tier,
            device=args.device,
            batches=batches,
            resume=resumed,
            save_to=args.save,
            diagnose_at=_diagnosed_steps(args, config.num_steps),
            on_step=bar.update,
        )
    out = console(sys.stdout)
    for diagnosis in result.diagnoses:
        print_diagnosis(diagnosis, out)
    print_summary(result, out)
    if args.json:
        _write_json(args.json, result)
    return _status(result)


def _settings(
    args: argparse.Namespace, resumed: Checkpoint | None
) -> tuple[ModelConfig, TrainConfig]:
    """The configs: options over the preset, over the checkpoint's, over the defaults."""
    model = resumed.model if resumed else ModelConfig()
    if args.preset:
        model = PRESETS[args.preset]
    train = resumed.train if resumed else TrainConfig()
    precision = args.precision
    if args.use_amp:
        if precision not in (None, "bf16"):
            raise ConfigError(
                f"--use-amp means --precision bf16, and --precision is {precision}: leave one away"
            )
        precision = "bf16"
    limit = train.max_grad_norm if args.max_grad_norm is None else args.max_grad_norm
    return (
        replace(model, **_given(args, _MODEL_OPTIONS)),
        replace(
            train,
            num_steps=args.num_steps,
            precision=precision or train.precision,
            max_grad_norm=None if limit == "none" else limit,
            **_given(args, _TRAIN_OPTIONS),
        ),
    )


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _check_data(args: argparse.Namespace, resumed: Checkpoint, batches: Batches) -> None:
    """Text is not found again by itself; other data than before is allowed, and said."""
    if args.data is None and resumed.batches["kind"] == "text":
        raise ConfigError(
            f"checkpoint {str(args.resume)!r} was trained on text of "
            f"{resumed.batches['bytes']} bytes: name it with --data"
        )
    if batches.describe() != resumed.batches:
        _say("note: the data is not what the checkpoint was trained on", OK)


def _diagnosed_steps(args: argparse.Namespace, num_steps: int) -> set[int]:
    every = args.diagnose_every
    if every is None:
        return {1, num_steps} if args.diagnose else set()
    if every < 1:
        raise ConfigError(f"--diagnose-every is {every}: use a whole number of at least 1")
    return {1, num_steps, *range(every, num_steps + 1, every)}


def _write_json(path: Path, result: Result) -> None:
    from tinyllama.training.files import write_whole

    text = json.dumps(result.as_dict(), indent=1, allow_nan=False)
    write_whole(path, lambda part: part.write_text(text + "\n"))


def _status(result: Result) -> int:
    from tinyllama.training.result import COMPLETED, INTERRUPTED

    if result.status == INTERRUPTED:
        return CTRL_C
    return OK if result.status == COMPLETED and not result.lost else RUN_FAILED
