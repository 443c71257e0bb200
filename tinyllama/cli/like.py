"""``tinyllama check FILE:FUNCTION --like REFERENCE --shape SHAPES``: a check without a declaration.

The declaration is written to a temporary file, which is then checked as a user's would be.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError

DTYPES = ("fp32", "bf16", "fp16")
Command = Callable[[argparse.Namespace], int]


def add_options(check: argparse.ArgumentParser) -> None:
    """Add the options of a check without a declaration to the command ``check``."""
    group = check.add_argument_group("without a declaration", "FILE is FILE:FUNCTION")
    option = group.add_argument
    option(
        "--like",
        metavar="REFERENCE",
        help="what FUNCTION must compute: a dotted name, or FILE:FUNCTION",
    )
    option(
        "--shape",
        metavar="SHAPES",
        help="axes of the inputs: 'N D', or 'x: N D, w: D, target: N int<V, mask: N D bool, b: D?'",
    )
    option(
        "--param",
        metavar="NAME=LITERAL",
        action="append",
        default=[],
        help="a parameter of both functions, or of one of them; may be repeated",
    )
    option(
        "--dtype",
        choices=DTYPES,
        action="append",
        default=[],
        help="only this dtype; may be repeated (default: all that REFERENCE takes)",
    )
    option("--no-grad", action="store_true", help="do not compare gradients")
    option(
        "--show-declaration",
        action="store_true",
        help="print the file that declares the same, to be extended, and check nothing",
    )
    check.set_defaults(declaration=None)


def with_declaration(run: Command) -> Command:
    """The command, for which FILE:FUNCTION with --like is declared first."""

    def run_declared(args: argparse.Namespace) -> int:
        file, colon, function = str(args.file or "").rpartition(":")
        if args.like is None:
            if colon and not args.file.exists():
                text = _command(file, function)
                raise UsageError(f"{args.file}: a function needs a reference: {text}")
            for name in ("shape", "param", "dtype", "no_grad", "show_declaration"):
                if getattr(args, name):
                    option = name.replace("_", "-")
                    raise UsageError(f"--{option} belongs to --like: add --like REFERENCE")
            return run(args)
        if not (colon and args.shape) or args.op or args.candidate:
            raise UsageError("--like takes FILE:FUNCTION and --shape SHAPES, without an --op")
        draft = _drafted(args, file, function)
        if draft["problem"] or args.show_declaration:
            print(draft["text"], end="")
        if draft["problem"]:
            raise UsageError(
                f"no declaration follows from --like: {draft['problem']}. Complete the one above, "
                f"save it beside {file}, and check that file"
            )
        if args.show_declaration:
            return 0
        with tempfile.TemporaryDirectory(prefix="declaration-") as folder:
            args.file, args.declaration = Path(file), Path(folder) / "declaration.py"
            args.declaration.write_text(draft["text"], encoding="utf-8")
            args.provider = args.provider or "candidate"
            status = run(args)
        for note in draft["notes"]:
            print(note)
        print(f"{function} was compared with {args.like}: --show-declaration prints how")
        return status

    return run_declared


def proposal(file: Path) -> str:
    """The command that checks a file without a declaration, for each function that it has."""
    from tinyllama.cli.declared import functions_of, parameters_of

    commands = [
        _command(file, name, parameters_of(node, required=True) or [])
        for name, node in functions_of(file)
        if name[0] != "_"
    ]
    if not commands:
        return "it has no function either: see docs/declare.md"
    return f"declare one (docs/declare.md), or run {'; or '.join(commands)}"


def _command(file: str | Path, function: str, inputs: Sequence[str] = ()) -> str:
    """A command line; REFERENCE and axes are to be filled in where they cannot be known."""
    import torch

    homes = {"torch": torch, "torch.nn.functional": torch.nn.functional}
    known = [f"{home}.{function}" for home, module in homes.items() if hasattr(module, function)]
    shape = ", ".join(f"{name}: N D" for name in inputs) if inputs[1:] else "N D"
    like = (*known, "REFERENCE")[0]
    return f"tinyllama check {file}:{function} --like {like} --shape '{shape}'"


def _drafted(args: argparse.Namespace, file: str, function: str) -> dict[str, Any]:
    """The declaration as `Draft.plain` gives it. A reference that is not torch's is code of a user:
    it is imported by a process of its own."""
    from tinyllama.cli.declared import Draft
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.machine.worker import Worker, WorkerError

    asked: dict[str, Any] = {
        "file": file,
        "function": function,
        "like": args.like,
        "shape": args.shape,
        "params": args.param,
        "dtypes": args.dtype,
        "gradients": not args.no_grad,
        "device": str(usable_device(args.device)),
    }
    if args.like.startswith("torch."):
        return Draft(**asked).plain()
    with Worker("like") as worker:
        try:
            worker.make("draft", "tinyllama.cli.declared:Draft", **asked)
            draft: dict[str, Any] = worker.call("draft", "plain")
        except WorkerError as error:
            text = str(error).partition(": ")[2] if error.raised(UsageError) else str(error)
            raise UsageError(text) from error
    return draft
