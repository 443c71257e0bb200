"""``tinyllama certify``: A/A blocks of this device, and the error rates of the gate on it.

torch is imported by the command, not here, so that ``--help`` is quick.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path, number, whole
from tinyllama.model.config import ConfigError


def add(subparsers: Any) -> None:
    """Add the command; it sets ``run``, a function of the arguments that returns the status."""
    parser = subparsers.add_parser("certify", help="measure the gate's error rates on this device")
    parser.description = (
        "Gate this tree against itself and store the blocks for the device; further runs add to "
        "them. From 20 blocks on, estimate how often a merge of equal code would be stopped, and "
        "which slowdowns would be found."
    )
    add = parser.add_argument
    add("--blocks", type=whole, default=20, help="blocks to add (default %(default)s; 0: none)")
    add("--seconds", type=number, help="time budget in seconds")
    add(
        "--only",
        default="*",
        metavar="PATTERN",
        help="only benchmarks of these names, as '*-triton-*'",
    )
    add("--merges", type=whole, default=100_000, help="simulated merges (default %(default)s)")
    add("--results-dir", type=file_path, default=Path("results"), metavar="DIR")
    add("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    add(
        "--validate",
        action="store_true",
        help="instead add real work to most benchmarks, and check that the gate finds it",
    )
    parser.set_defaults(run=_certify)


def _certify(args: argparse.Namespace) -> int:
    from tinyllama.cli.certifying import run

    limits = (("blocks", args.blocks, 0, 10**6), ("merges", args.merges, 1000, 10**7))
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise ConfigError(f"--{name} is {value!r:.80}: use {least} or more, up to {most}")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ConfigError(f"--seconds is {args.seconds:g}: use a finite number above 0")
    return run(args)
