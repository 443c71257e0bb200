"""Mutants of the Triton kernels: does a check fail when a kernel is changed in one place?

    python -m tools.mutants [--only rope,silu_mul] [--sample 40] [--seed 0] [--json mutants.json]

A kernel's function, and those it calls, are changed one operator, number, mask or call at a time.
A seeded sample of these mutants is tried on the CPU, each in a process of its own. A mutant is
killed when a check of `tinyllama.harness.correct.checks` fails, or a test that `tools/mutants.toml`
names for what the derived cases cannot ask of the kernel. A mutant that only raises, ends its
process or does not end is counted apart: that shows that the code runs, not that it is checked.
`tools/mutants.toml` must explain each survivor, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tinyllama.harness.correct.checks import Candidate
from tinyllama.harness.kernels.launch import Kernel, identity
from tools import mutant_record
from tools.mutant_record import SURVIVED, Trial
from tools.mutant_trials import SECONDS, Attempt, in_fresh_process, kernels
from tools.mutation import mutants_of

TIMES = 5.0  # as long as the unchanged function a mutant may take


@dataclass(frozen=True)
class Plan:
    """sample: mutants of each function, drawn from a seed."""

    sample: int
    seed: int
    tests: dict[str, list[str]]

    def tried(self, kernel: Kernel, users: list[Candidate]) -> tuple[int, list[Trial]]:
        """The number of mutants that a function has, and the trials of those drawn.

        Raises RuntimeError for a function that fails unchanged: it would seem to kill all.
        """
        name = identity(kernel)
        attempt = Attempt(
            (kernel.fn.__module__, kernel.fn.__name__),
            [(user.op.name, user.provider.name) for user in users],
            self.tests.get(name, []),
        )
        attempt = replace(attempt, references=in_fresh_process(attempt.compute_references))
        start = time.monotonic()
        outcome, check = attempt.tried(kernel.src, SECONDS)
        seconds = 10 + TIMES * (time.monotonic() - start)
        if outcome != SURVIVED:
            raise RuntimeError(f"{name} fails unchanged: {outcome}, {check}")
        every = mutants_of(kernel)
        chosen = random.Random(f"{self.seed} {name}").sample(every, min(self.sample, len(every)))
        return len(every), [
            Trial(one.line, one.text, one.gives, *attempt.tried(one.source, seconds))
            for one in chosen
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Triton kernels and run the checks.")
    parser.add_argument("--only", default="", help="parts of functions' names, separated by commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants a function (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add the trials to this file")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    functions = {n: one for n, one in kernels().items() if any(part in n for part in parts)}
    if not functions or args.sample < 1:
        parser.error(
            f"--only {args.only!r} --sample {args.sample}: use a part of a function's name, as in "
            "rope.rotate_kernel, and a sample of at least 1"
        )
    plan = Plan(args.sample, args.seed, mutant_record.tests())
    explained = mutant_record.explained()
    trials: list[Trial] = []
    left = 0
    for name, (kernel, users) in functions.items():
        of, own = plan.tried(kernel, users)
        trials += own
        by, source = [str(user.provider) for user in users], mutant_record.digest(kernel.src)
        made = mutant_record.KernelTrials(name, source, by, of, args.seed, own)
        left += len(made.unexplained(explained))
        print(made.text(explained), flush=True)
        if args.json:  # hours lie between the first and the last
            mutant_record.add(args.json, made)
    print(f"{mutant_record.rate(trials)} of the mutants that ran to an end were killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
