"""The command line: ``tinyllama COMMAND``, or ``python -m tinyllama COMMAND``.

Each command is a file of this folder with a function ``add(subparsers)``: it adds the command's
parser and sets ``run``, a function of the parsed arguments that returns the exit status.

Exit status: 0 success; 1 the run failed, a parameter received no gradient, or a file could not be
written; 2 a value cannot be used, which one line reports before anything runs; 130 Ctrl-C or
SIGTERM. docs/gate.md has the statuses of ``gate``.

Commands import torch when they run, so that ``--help`` is quick.
"""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import tinyllama
from tinyllama.harness.machine.errors import RunFailedError, UsageError
from tinyllama.harness.machine.interrupts import sigterm_as_interrupt

NAMES = "doctor train report tune check kernels gate certify profile stages exercise"
COMMANDS = [import_module(f"tinyllama.cli.{name}") for name in NAMES.split()]
DESCRIPTION = "Check and time GPU kernels, gate merges, and train a Tiny LLaMA in four versions."
RUN_FAILED, BAD_VALUE, CTRL_C = 1, 2, 130

# An allocation that fails on the CPU has no type of its own in torch.
_ALLOCATION_FAILED = re.compile("out of memory|can('t|not) allocate memory", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    try:
        with sigterm_as_interrupt():
            args = parser().parse_args(argv)
            _check_empty(args)
            status: int = args.run(args)
            sys.stdout.flush()
            return status
    except UsageError as error:
        return _say(f"error: {error}", BAD_VALUE)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RUN_FAILED
    except (OSError, RunFailedError) as error:
        return _say(f"error: {error}", RUN_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", CTRL_C)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _ALLOCATION_FAILED.search(str(error)):
            return _say(f"error: {error}: use a smaller model or batch", BAD_VALUE)
        raise


def _check_empty(args: argparse.Namespace) -> None:
    """Raise UsageError for an empty text, as of a variable that is not set: a command would take it
    for an option that is not given."""
    for name, value in vars(args).items():
        if "" in (value if isinstance(value, list) else [value]):
            raise UsageError(f"{name.replace('_', '-')} is empty: give a value, or leave it out")


def parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = _Parser(prog="tinyllama", description=DESCRIPTION)
    version = f"tinyllama {tinyllama.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that reports its errors as those of any other bad value."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _say(message: str, status: int) -> int:
    print("tinyllama:", " ".join(message.split()), file=sys.stderr)
    return status
