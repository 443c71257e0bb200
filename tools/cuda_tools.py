"""What the tools share that run ops under a program of the CUDA toolkit."""

import argparse
import shutil

from tinyllama.harness.machine.device import cannot, default_device
from tinyllama.ops import OPS

SECONDS = 1800.0  # that a program may take


class ToolError(RuntimeError):
    """Why a tool cannot do its work here; exit status 2."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--only``, whose value `op_names` reads."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--only", default="", metavar="OP,OP", help="only these ops")
    return made


def op_names(only: str) -> list[str]:
    """The ops of ``--only``, or all. Raises ToolError for one that does not exist."""
    names = [name for name in only.split(",") if name] or list(OPS)
    if unknown := [name for name in names if name not in OPS]:
        raise ToolError(f"--only {unknown[0]!r} is no op: use some of {', '.join(OPS)}")
    return names


def program(name: str) -> str:
    """The path of a program. Raises ToolError where it is missing, or a GPU is."""
    path = shutil.which(name)
    if path is None:
        raise ToolError(f"{name} is not on the PATH: it comes with the CUDA toolkit")
    if reason := cannot("gpu", default_device()):
        raise ToolError(reason)
    return path
