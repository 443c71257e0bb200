"""Mutants of the Python code: does a test fail when the harness, the model or a step is changed?

    python -m tools.module_mutants [--only training.data] [--sample 300] [--seed 0] [--jobs 2]
                                   [--seconds 450] [--budget 45]

The changes of `tools.mutation` in `FOLDERS` are put into the order of a seed, and the first are
tried with the tests that import the module and execute the changed lines, in the default lane
(`tools.mutant_tests`; needs `coverage`). First a function is changed in forks of a process that
has collected these tests: about a second a mutant. A change of what runs at import, and one that
survives, is then planted in a copy of the tree, where the tests and their processes import it.
Each mutant ends before the next is tried, so the first that ended are a sample, too.
A mutant is killed when one of them fails; one that only raises or does not end is counted apart:
that shows that the code runs, not that it is checked. What a file (--json) holds is not tried
again, so a run can be continued after its time (--seconds), Ctrl-C or SIGTERM. `tools/mutants.toml`
must explain each survivor, or the exit status is 1.
"""

import argparse
import ast
import contextlib
import hashlib
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
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
from tools.tested import ENDED, KILLED, RAISED, SURVIVED

STOPS = (signal.SIGINT, signal.SIGTERM)


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

    def tried(self, server: Server, budget: float) -> Trial:
        """How its tests end with the change swapped in, and if it survives or cannot be swapped in,
        planted in a copy of the tree: those of the nearest test file, then those of the next four,
        the next five, and all others. budget: the seconds that each of these may take unchanged."""
        every = nearest(self.module, self.subject)
        parts = every[:1], every[1:5], every[5:10], every[10:]
        outcome = SURVIVED, "no test runs it"
        for planted, files in itertools.product((False, True) if self.lines else (True,), parts):
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


def attempts(
    some: Sequence[Mutant], jobs: int, end: float, budget: float
) -> Generator[Tried, None, None]:
    """The trials of these mutants, so many at a time, each as soon as it ended; none of those that
    have not ended by ``end`` (of `time.monotonic`)."""
    files = sorted({file for one in some for file in nearest(one.module)})
    # A server that is closed answers no more, so that the pool ends.
    with ThreadPoolExecutor(jobs) as pool, servers(jobs, end, files) as started:
        free: SimpleQueue[Server] = SimpleQueue()
        for server in started:
            free.put(server)

        def tried(one: Mutant) -> Trial | None:
            server = free.get()
            try:
                # Else each of hundreds would ask its server, in vain.
                return one.tried(server, budget) if time.monotonic() < end else None
            except TimeOverError:
                return None
            finally:
                free.put(server)

        trials = {pool.submit(tried, one): one for one in some}
        try:
            for future in as_completed(trials):
                if found := future.result():
                    yield Tried(trials[future].name, found)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _stop(*_: object) -> None:
    """The first Ctrl-C or SIGTERM ends the run; another does not disturb how it ends."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


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
    for stop in STOPS:
        signal.signal(stop, _stop)
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
    stopped = False
    try:
        with contextlib.closing(attempts(left, args.jobs, end, args.budget)) as trying:
            for one in trying:
                done[one.key] = one
                print(one.text(known), flush=True)
                if args.json:  # hours lie between the first and the last
                    kept = {**before, **done}
                    trials = [kept[other.key] for other in wanted if other.key in kept]
                    mutant_record.write(args.json, args.seed, len(every), trials)
    except KeyboardInterrupt:
        stopped = True
    # What ended after one that did not took less time, which few survivors do.
    first = [done[one.key] for one in itertools.takewhile(lambda one: one.key in done, wanted)]
    if missing := len(wanted) - len(first):
        print(
            f"{'stopped' if stopped else 'no time is left'}: {missing} of the sample are left out"
        )
    same = sum(one.trial.outcome == SURVIVED and not one.unexplained(known) for one in first)
    outcomes = [one.trial for one in first]
    counts = Counter(one.outcome for one in outcomes)
    said = ", ".join(f"{counts[one]} {one}" for one in (KILLED, RAISED, ENDED, SURVIVED))
    print(f"of the first {len(first)} of seed {args.seed}: {said}, {same} of these explained")
    rate = mutant_record.rate(outcomes, same)
    print(f"{rate} of the mutants that ran to an end and are not equivalent were killed")
    unexplained = any(one.unexplained(known) for one in done.values())
    return 130 if stopped else int(bool(missing) or unexplained)


if __name__ == "__main__":
    sys.exit(main())
