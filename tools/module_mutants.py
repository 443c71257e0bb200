"""Mutants of the Python code: does a test fail when the harness, the model or a step is changed?

    python -m tools.module_mutants [--only training.data] [--sample 300] [--seed 0] [--jobs 2]
                                   [--seconds 450] [--budget 45]

The changes of `tools.mutation` in `FOLDERS` are put into the order of a seed, and the first are
tried with the tests that import the module and execute the changed lines, in the default lane
(`tools.mutant_tests`; needs `coverage`). First a function is changed in forks of a process that
has collected these tests: about a second a mutant. A change of what runs at import, and one that
survives, is then planted in a copy of the tree, where the tests and their processes import it.
A mutant is killed when one of them fails; one that only raises or does not end is counted apart:
that shows that the code runs, not that it is checked. What a file (--json) holds is not tried
again, so a run can be continued. `tools/mutants.toml` must explain each survivor, or the exit
status is 1.
"""

import argparse
import ast
import hashlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tools import mutant_record
from tools.mutant_record import ROOT, Trial, Tried
from tools.mutant_tests import (
    BUDGET,
    FOLDERS,
    Server,
    TimeOverError,
    chosen,
    module_of,
    nearest,
    servers,
)
from tools.mutation import Change, changes_of, defaults
from tools.tested import SURVIVED


@dataclass(frozen=True)
class Mutant:
    """A change of a module. name: the module and the function or class that it is in."""

    module: str
    file: str
    change: Change

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.module, self.change.place)))

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.change.gives

    @property
    def lines(self) -> range | None:
        """Those of the statement, up to the change; None for what runs when it is imported."""
        if not self.change.place:
            return None
        first = self.change.statement.lineno
        return range(first, (self.change.node.end_lineno or first) + 1)

    @property
    def around(self) -> range | None:
        """The lines of its function."""
        if not (own := self.change.function):
            return None
        return range(own.lineno, (own.end_lineno or own.lineno) + 1)

    @property
    def subject(self) -> str:
        """The name that the change is about: of a function or class, or else of a constant."""
        if self.change.place:
            return self.change.place.rpartition(".")[2]
        names = (one.id for one in ast.walk(self.change.statement) if isinstance(one, ast.Name))
        return next(names, "")

    def tried(self, server: Server, budget: float, planted: bool) -> Trial:
        """How its tests end with the change planted in a copy of the tree, or else swapped in:
        those of the nearest test file, then those of the next four, then those of all others.
        budget: the seconds that each of the three may take unchanged."""
        every = nearest(self.module, self.subject)
        outcome = SURVIVED, "no test runs it"
        for files in (every[:1], every[1:5], every[5:]):
            if outcome[0] != SURVIVED:
                break
            if tests := chosen(files, self.file, self.lines, self.around, server, budget):
                if planted:
                    with server.planted(self.file, self.change.source):
                        outcome = server.run(tests)
                else:
                    outcome = server.swapped(self.file, self.change.source, tests)
        return Trial(self.change.line, self.change.text, self.change.gives, *outcome)


def mutants(part: str = "") -> list[Mutant]:
    """Every mutant of the modules whose name contains ``part``; of two that give the same line of
    a function, the first."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    settings = defaults(texts.values())
    every = [
        Mutant(module_of(file), str(file.relative_to(ROOT)), change)
        for file, text in texts.items()
        if part in module_of(file)
        for change in changes_of(text, settings)
    ]
    return list({one.key: one for one in reversed(every)}.values())[::-1]


def drawn(every: Sequence[Mutant], seed: int) -> list[Mutant]:
    """Mutants in the order of a seed, which a change of other code does not alter."""

    def place(one: Mutant) -> bytes:
        return hashlib.sha256("\n".join((str(seed), *one.key)).encode()).digest()

    return sorted(every, key=place)


def attempts(some: Sequence[Mutant], jobs: int, end: float, budget: float) -> Iterator[Tried]:
    """The trials of these mutants, so many at a time, each as soon as it ended; none of those that
    have not ended by ``end`` (of `time.monotonic`)."""
    files = sorted({file for one in some for file in nearest(one.module)})
    with servers(jobs, end, files) as started, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Server] = SimpleQueue()
        for server in started:
            free.put(server)

        def tried(one: Mutant, planted: bool) -> Trial | None:
            server = free.get()
            try:
                # Else each of hundreds would ask its server, in vain.
                return one.tried(server, budget, planted) if time.monotonic() < end else None
            except TimeOverError:
                return None
            finally:
                free.put(server)

        left = list(some)
        for planted in (False, True):
            now = [one for one in left if planted or one.lines]
            trials = {pool.submit(tried, one, planted): one for one in now}
            try:
                for future in as_completed(trials):
                    found, one = future.result(), trials[future]
                    if found and (planted or found.outcome != SURVIVED):
                        left.remove(one)
                        yield Tried(one.name, found)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Python code and run its tests.")
    parser.add_argument("--only", default="", help="a part of the modules' names")
    parser.add_argument("--sample", type=int, default=300, help="mutants in all (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--seconds", type=float, help="after which nothing more is tried")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"of tests, in seconds (default {BUDGET:.0f})"
    )
    parser.add_argument("--json", type=Path, help="write the trials to this file, and continue it")
    parser.add_argument(
        "--again", action="store_true", help="try survivors and what did not end again"
    )
    args = parser.parse_args(argv)
    # A shell that runs this in the background has it ignore Ctrl-C, and the tests with it.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    end = float("inf") if args.seconds is None else time.monotonic() + args.seconds
    every = mutants(args.only)
    if args.again and not (args.json and args.json.is_file()):
        parser.error("--again tries what a file holds once more: add --json FILE")
    if args.only and args.json:
        parser.error("--json holds a sample of all modules: leave out --only, or --json")
    if not every or args.sample < 1 or args.jobs < 1 or end <= time.monotonic() or args.budget <= 0:
        parser.error(
            f"--only {args.only!r} --sample {args.sample} --jobs {args.jobs} --seconds "
            f"{args.seconds} --budget {args.budget}: use a part of a module's name, as in "
            "training.data, and numbers above 0"
        )
    known = mutant_record.explained()
    wanted = drawn(every, args.seed)[: args.sample]
    before = {one.key: one for one in (mutant_record.read(args.json) if args.json else [])}
    done = {one.key: before[one.key] for one in wanted if one.key in before}
    if args.again:
        done = {key: one for key, one in done.items() if not one.open(known)}
    left = [one for one in wanted if one.key not in done]
    for one in attempts(left, args.jobs, end, args.budget):
        done[one.key] = one
        print(one.text(known), flush=True)
        if args.json:  # hours lie between the first and the last
            kept = {**before, **done}
            trials = [kept[other.key] for other in wanted if other.key in kept]
            mutant_record.write(args.json, args.seed, len(every), trials)
    trials = list(done.values())
    if missing := len(wanted) - len(trials):
        print(f"{missing} of the sample did not end in time, and survivors take longest: no rate")
        return 1
    same = sum(one.trial.outcome == SURVIVED and not one.unexplained(known) for one in trials)
    rate = mutant_record.rate([one.trial for one in trials], same)
    print(f"{rate} of the mutants that ran to an end and are not equivalent were killed")
    return 1 if any(one.unexplained(known) for one in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
