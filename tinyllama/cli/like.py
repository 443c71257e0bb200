"""``tinyllama check FILE:FUNCTION --like REFERENCE --shape SHAPES``: a check without a declaration.

The process that makes the checks drafts a declaration, which is then checked as a user's would be.
"""

import argparse
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.errors import UsageError

DTYPES = ("fp32", "bf16", "fp16")


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


def draft_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments of `tinyllama.cli.declared.Draft` for FILE:FUNCTION with --like; None without
    --like. Raises UsageError where one of both is given alone."""
    file, colon, function = str(args.file or "").rpartition(":")
    if args.like is None:
        if colon and not args.file.exists():
            text = f"a function needs a reference: {proposal(file, function)}"
            raise UsageError(f"{args.file}: {text}")
        for name in ("shape", "param", "dtype", "no_grad", "show_declaration"):
            if getattr(args, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} belongs to --like: add --like REFERENCE")
        return None
    if not (colon and args.shape) or args.op or args.candidate:
        raise UsageError("--like takes FILE:FUNCTION and --shape SHAPES, without an --op")
    for named in (file, args.like.rpartition(":")[0]):
        if named and not Path(named).is_file():
            raise UsageError(f"there is no file {named!r}: name one of FILE:FUNCTION")
    return {
        "file": file,
        "function": function,
        "like": args.like,
        "shape": args.shape,
        "params": args.param,
        "dtypes": args.dtype,
        "gradients": not args.no_grad,
        "device": args.device,
    }


def declaration(draft: dict[str, Any]) -> str:
    """The declaration as Python text, made in a process of its own: a reference may be code of a
    user, which is imported. Raises UsageError where none follows."""
    from tinyllama.harness.machine.worker import Worker, WorkerError

    with Worker("like") as worker:
        try:
            worker.make("draft", "tinyllama.cli.declared:Draft", **draft)
            return str(worker.call("draft", "text"))
        except WorkerError as error:
            text = str(error).partition(": ")[2] if error.raised(UsageError) else str(error)
            raise UsageError(text) from error


def proposal(file: str | Path, function: str = "FUNCTION") -> str:
    """The command that checks a function of a file without a declaration."""
    return f"tinyllama check {file}:{function} --like REFERENCE --shape 'N D' (docs/declare.md)"
