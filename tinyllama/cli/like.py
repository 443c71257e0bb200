"""``tinyllama check FILE:FUNCTION --like REFERENCE --shape SHAPES``: a check without a declaration.

The declaration is written to a temporary file, which is then checked as a user's would be.
"""

import argparse
import tempfile
from collections.abc import Callable
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
                text = f"a function needs a reference: {proposal(file, function)}"
                raise UsageError(f"{args.file}: {text}")
            for name in ("shape", "param", "dtype", "no_grad", "show_declaration"):
                if getattr(args, name):
                    option = name.replace("_", "-")
                    raise UsageError(f"--{option} belongs to --like: add --like REFERENCE")
            return run(args)
        if not (colon and args.shape) or args.op or args.candidate:
            raise UsageError("--like takes FILE:FUNCTION and --shape SHAPES, without an --op")
        for named in (file, args.like.rpartition(":")[0]):
            if named and not Path(named).is_file():
                raise UsageError(f"there is no file {named!r}: name one of FILE:FUNCTION")
        draft = _drafted(args, file, function)
        if args.show_declaration:
            print(draft["text"], end="")
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


def proposal(file: str | Path, function: str = "FUNCTION") -> str:
    """The command that checks a function of a file without a declaration."""
    return f"tinyllama check {file}:{function} --like REFERENCE --shape 'N D' (docs/declare.md)"


def _drafted(args: argparse.Namespace, file: str, function: str) -> dict[str, Any]:
    """The declaration as `Draft.plain` gives it, in a process of its own: a reference may be code
    of a user, which is imported."""
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.machine.worker import Worker, WorkerError

    options: dict[str, Any] = {
        "file": file,
        "function": function,
        "like": args.like,
        "shape": args.shape,
        "params": args.param,
        "dtypes": args.dtype,
        "gradients": not args.no_grad,
        "device": str(usable_device(args.device)),
    }
    with Worker("like") as worker:
        try:
            worker.make("draft", "tinyllama.cli.declared:Draft", **options)
            draft: dict[str, Any] = worker.call("draft", "plain")
        except WorkerError as error:
            text = str(error).partition(": ")[2] if error.raised(UsageError) else str(error)
            raise UsageError(text) from error
    return draft
