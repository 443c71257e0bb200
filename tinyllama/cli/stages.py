"""``tinyllama stages``: the stages of the debugging journey, measured and checked."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tinyllama.cli.argument_types import file_path, whole_within
from tinyllama.harness.machine.files import check_results_dir

OUTPUT = Path("results/stages")


def add(subparsers: Any) -> None:
    """Add the command to the subcommands of a parser."""
    parser = subparsers.add_parser("stages", help="run the model with one part broken at a time")
    parser.description = (
        "Run the stages of the debugging journey: each is the same model with one part broken. "
        "For each, print its cost and its check, which is red with the fault and green after the "
        "fix. Stages 1 and 6 take a minute and teach most. Uses the published shapes on a GPU, and "
        "the tiny preset on a CPU."
    )
    option = parser.add_argument
    number = whole_within(1, 6)
    option("stage", nargs="*", type=number, metavar="N", help="stages 1 to 6 (default all)")
    option("--list", action="store_true", help="print the stages, and run nothing")
    option("--device", help="cpu, cuda or cuda:N (default: the first GPU, else cpu)")
    text = "logs, profiles and the comparison (default %(default)s)"
    option("--output", type=file_path, default=OUTPUT, metavar="DIR", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run and print; 0 if each check was red with the fault and green after the fix, else 1."""
    if args.list:
        from tinyllama.workshop.stages import STAGES

        for stage in STAGES.values():
            print(f"{stage.number}  {stage.title} (check: {stage.check})")
        return 0
    check_results_dir(args.output, "--output")
    from tinyllama.cli.summary import print_diagnosis
    from tinyllama.harness.machine.device import usable_device
    from tinyllama.harness.report.terminal import console
    from tinyllama.workshop import running
    from tinyllama.workshop.stages import STAGES

    device = usable_device(args.device)
    numbers = sorted(set(args.stage)) or list(STAGES)
    stages = running.run(numbers, device, lambda text: print(text, file=sys.stderr, flush=True))
    for measured in stages[1:]:
        print(running.report(measured, stages[0], device))
        if measured.observations and measured.observations.diagnosis:
            print_diagnosis(measured.observations.diagnosis, console())
            print()
    print(running.comparison(stages, device), end="")
    for path in running.save(args.output, stages, device):
        print(f"wrote {path}")
    return 0 if all(measured.as_promised for measured in stages) else 1
