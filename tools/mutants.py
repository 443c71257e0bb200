"""Mutants of the Triton kernels: does a check fail when a kernel is changed in one place?

    python -m tools.mutants [--only rope,silu_mul] [--sample 40] [--seed 0] [--json mutants.json]
                            [--jobs 24] [--seconds 450]

A kernel's function, and those it calls, are changed one operator, number, mask or call at a time.
A seeded sample of these mutants is tried on the CPU, each in a process of its own. A mutant is
killed when a check of `tinyllama.harness.correct.checks` fails, or a test that `tools/mutants.toml`
names for what the derived cases cannot ask of the kernel. A mutant that only raises, ends its
process or does not end is counted apart: that shows that the code runs, not that it is checked.
`tools/mutants.toml` must explain each survivor, or the exit status is 1. It also names functions
that are left out, since a GPU alone runs them.

The first mutant of each function is tried, then the second of each, and so on: a run that is
stopped, or whose time is over, has tried about as many of each. The file (--json) is written every
few seconds. A function's trials that it holds are kept, and not made again, unless the function's
source has changed.
"""

import argparse
import heapq
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tinyllama.harness.correct.checks import Candidate
from tinyllama.harness.kernels.launch import Kernel
from tools import mutant_record
from tools.mutant_record import ENDED, SURVIVED, KernelTrials, Trial
from tools.mutant_trials import SECONDS, Attempt, compute_references, in_fresh_process, kernels
from tools.mutation import Mutant, mutants_of

TIMES = 5.0  # as long as the unchanged function a mutant may take
WRITTEN_EVERY = 5.0  # seconds; hours may lie between the first trial and the last


@dataclass
class Subject:
    """A function, its mutants to try in this order, and the trials so far."""

    attempt: Attempt
    source: str
    left: list[Mutant]
    made: KernelTrials


def subject(
    name: str, kernel: Kernel, users: Sequence[Candidate], sample: int, seed: int, json: Path | None
) -> Subject:
    """sample: mutants of the function, drawn from a seed; of two that give the same line, the
    first. json: a file whose trials are kept."""
    every = list({one.gives: one for one in reversed(mutants_of(kernel))}.values())[::-1]
    random.Random(f"{seed} {name}").shuffle(every)
    attempt = Attempt(
        (kernel.fn.__module__, kernel.fn.__name__),
        [(user.op.name, user.provider.name) for user in users],
        mutant_record.tests().get(name, []),
    )
    source = mutant_record.digest(kernel.src)
    made = KernelTrials(name, source, [str(user.provider) for user in users], 0, seed, [])
    for one in mutant_record.load(json) if json else []:
        if (one.kernel, one.source) == (name, source):
            made = one
    done = {trial.gives for trial in made.trials}
    left = [one for one in every[:sample] if one.gives not in done]
    return Subject(attempt, kernel.src, left, replace(made, mutants=len(every)))


@dataclass
class Run:
    """Trials of several functions, so many at a time, until all are made or the time is over.

    end: of `time.monotonic`. unsound: the functions that fail unchanged, with what fails. They
    would seem to kill every mutant, so none of theirs is tried. Those that the same providers run
    are planted and run unchanged together: where one fails, all of them are unsound.
    """

    jobs: int
    end: float = float("inf")
    unsound: dict[str, str] = field(default_factory=dict)

    def trials(self, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Trial]]:
        """Each trial, as soon as it ended."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self.jobs) as pool:
            try:
                users = sorted({user for one in subjects for user in one.attempt.users})
                work = [partial(compute_references, *user, Path(folder)) for user in users]
                list(pool.map(in_fresh_process, work))
                for one in subjects:
                    one.attempt = replace(one.attempt, references=Path(folder))
                yield from self._trials(subjects, pool.submit)
            finally:  # also if the caller is stopped: what runs is waited for
                for process in multiprocessing.active_children():
                    process.kill()

    def _trials(
        self, subjects: Sequence[Subject], submit: Callable[..., Future[tuple[str, str, float]]]
    ) -> Iterator[tuple[Subject, Trial]]:
        groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for which, one in enumerate(subjects):
            groups.setdefault(tuple(one.attempt.users), []).append(which)
        together = {group[0]: group for group in groups.values()}
        tasks = [(-1, which) for which in together]  # turn (-1: unchanged), subject
        bounds = dict.fromkeys(range(len(subjects)), SECONDS)
        running: dict[Future[tuple[str, str, float]], tuple[int, int]] = {}
        while True:
            while tasks and len(running) < self.jobs and time.monotonic() < self.end:
                turn, which = task = heapq.heappop(tasks)
                one = subjects[which]
                source = one.source if turn < 0 else one.left[turn].source
                attempt = one.attempt if turn >= 0 else _all([subjects[i] for i in together[which]])
                running[submit(self._tried, attempt, source, bounds[which])] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                turn, which = running.pop(future)
                one = subjects[which]
                outcome, check, took = future.result()
                if outcome == ENDED and time.monotonic() >= self.end:
                    continue  # it had less time than it may take
                if turn >= 0:
                    mutant = one.left[turn]
                    yield one, Trial(mutant.line, mutant.text, mutant.gives, outcome, check)
                elif outcome == SURVIVED:
                    for member in together[which]:
                        bounds[member] = 10 + TIMES * took
                        for later in range(len(subjects[member].left)):
                            heapq.heappush(tasks, (later, member))
                else:
                    names = [subjects[member].made.kernel for member in together[which]]
                    self.unsound |= dict.fromkeys(names, f"{outcome}, {check}")

    def _tried(self, attempt: Attempt, source: str, seconds: float) -> tuple[str, str, float]:
        """The outcome, the check, and the seconds that it took."""
        start = time.monotonic()
        outcome, check = attempt.tried(source, max(0.0, min(seconds, self.end - start)))
        return outcome, check, time.monotonic() - start


def _all(group: Sequence[Subject]) -> Attempt:
    """The functions of a group together, with the tests of each."""
    first, *others = group
    tests = dict.fromkeys(test for one in group for test in one.attempt.tests)
    planted = [(one.attempt.kernel, one.source) for one in others]
    return replace(first.attempt, tests=list(tests), others=planted)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Triton kernels and run the checks.")
    parser.add_argument("--only", default="", help="parts of functions' names, separated by commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants a function (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seconds", type=float, help="after which nothing more is tried")
    parser.add_argument("--json", type=Path, help="write the trials to this file, and continue it")
    args = parser.parse_args(argv)
    # A shell that runs this in the background has it ignore Ctrl-C.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    end = float("inf") if args.seconds is None else time.monotonic() + args.seconds
    parts = args.only.split(",")
    functions = {n: one for n, one in kernels().items() if any(part in n for part in parts)}
    for name, why in mutant_record.on_a_gpu().items():
        if functions.pop(name, None):
            print(f"{name} is left out: {why}")
    if not functions or args.sample < 1 or args.jobs < 1 or end <= time.monotonic():
        parser.error(
            f"--only {args.only!r} --sample {args.sample} --jobs {args.jobs} --seconds "
            f"{args.seconds}: use a part of a function's name, as in rope.rotate_kernel, and "
            "numbers above 0"
        )
    every = [
        subject(name, kernel, users, args.sample, args.seed, args.json)
        for name, (kernel, users) in functions.items()
    ]
    known = mutant_record.explained()
    run = Run(args.jobs, end)
    written = time.monotonic()
    left = sum(len(one.left) for one in every)
    try:
        for one, trial in run.trials([one for one in every if one.left]):
            left -= 1
            one.made.trials.append(trial)
            print(mutant_record.Tried(one.made.kernel, trial).text(known), flush=True)
            if args.json and time.monotonic() > written + WRITTEN_EVERY:
                mutant_record.add(args.json, [one.made for one in every])
                written = time.monotonic()
    finally:
        if args.json:
            mutant_record.add(args.json, [one.made for one in every])
    made = [one.made for one in every if one.made.trials]
    for function in made:
        print(function.text(known))
    for name, why in run.unsound.items():
        print(f"{name} fails unchanged, so its mutants were not tried: {why}")
    if left:
        print(f"{left} mutants of the sample were not tried")
    rate = mutant_record.rate([trial for one in made for trial in one.trials])
    print(f"{rate} of the mutants that ran to an end were killed")
    return 1 if run.unsound or any(one.unexplained(known) for one in made) else 0


if __name__ == "__main__":
    sys.exit(main())
