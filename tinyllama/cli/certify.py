"""``tinyllama certify``: A/A blocks of this device, and the error rates of the gate on it.

torch is imported by the command, not here, so that ``--help`` is quick.
"""

import argparse
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path, whole_within


def add(subparsers: Any) -> None:
    """Add the command; it sets ``run``, a function of the arguments that returns the status."""
    parser = subparsers.add_parser("certify", help="measure the gate's error rates on this device")
    parser.description = (
        "Gate the ops of this folder against themselves and store the blocks for the device; "
        "further runs add to them. From 20 blocks on, estimate how often a merge of equal code "
        "would be stopped, and which slowdowns would be found."
    )
    add = parser.add_argument
    blocks = whole_within(0, 10**6)
    add("--blocks", type=blocks, default=20, help="blocks to add (default %(default)s; 0: none)")
    add("--results-dir", type=file_path, default=Path("results"), metavar="DIR")
    add("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    parser.set_defaults(run=_certify)


def _certify(args: argparse.Namespace) -> int:
    from tinyllama.cli.certifying import run

    return run(args.results_dir, args.blocks, args.device)
