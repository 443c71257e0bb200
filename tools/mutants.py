"""Mutants of the Triton kernels: does a named check fail when a kernel is changed in one place?

    python tools/mutants.py [--only rope,silu_mul] [--sample 40] [--seed 0] [--json mutants.json]

A kernel's function, and those it calls, are changed one operator, number, mask or function at a
time; a seeded sample of the changes is tried, each in a process of its own, on the CPU. Killed
means that a check of `tinyllama.harness.correct.checks` failed, or a test that
`tools/mutants.toml` names for what the derived cases cannot ask of the kernel. A mutant that only
raises, ends its process or does not come to an end is counted apart: that shows that code is run,
not that it is checked.
What survives must be explained in `tools/mutants.toml`, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import linecache
import multiprocessing
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tinyllama.harness.correct.cases import OpCase, References
from tinyllama.harness.correct.checks import Candidate, Outcome, accuracy, guards, run
from tinyllama.harness.correct.evaluate import Inputs
from tinyllama.harness.correct.launched import launches_of
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.kernels.launch import Kernel, jit
from tinyllama.harness.machine.worker import Worker
from tinyllama.ops import OPS
from tools import mutant_record
from tools.mutant_record import ENDED, KILLED, RAISED, SURVIVED, Trial
from tools.mutation import Mutant, mutants_of, qualified

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("out of bounds", "empty batch", "determinism")  # beside the accuracy cases
MOST_USERS = 2  # providers that a mutant is tried with
SECONDS = 300.0  # that an unchanged function may take
TIMES = 5.0  # as long as that a mutant may take; then it counts as one that does not end

# -- who is tried on what -----------------------------------------------------------------------


def candidates() -> dict[str, tuple[Kernel, list[Candidate]]]:
    """Each function under `jit`, and the providers that run it, those with fewest kernels first."""
    found: dict[str, tuple[Kernel, list[tuple[int, Candidate]]]] = {}
    for op in OPS.values():
        for provider in op.providers.values():
            if "triton" not in provider.requires:
                continue
            candidate = Candidate(op, provider)
            used: dict[str, Kernel] = {}
            for case in op.cases:
                if provider.supports(case.dims) is None:
                    for launch in launches_of(op, provider, case, torch.float32):
                        _reach(launch.kernel, used)
            for name, kernel in used.items():
                found.setdefault(name, (kernel, []))[1].append((len(used), candidate))
    return {
        name: (kernel, [one for _, one in sorted(users, key=lambda user: user[0])][:MOST_USERS])
        for name, (kernel, users) in sorted(found.items())
    }


def _reach(kernel: Kernel, used: dict[str, Kernel]) -> None:
    """A kernel and the functions it calls, and theirs."""
    if qualified(kernel) in used:
        return
    used[qualified(kernel)] = kernel
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, Kernel):
            _reach(called, used)


# -- one mutant -----------------------------------------------------------------------------------


def plant(source: str, kernel: Kernel) -> None:
    """Put a changed function in the place of a kernel's, in every module that has it."""
    file = f"<{qualified(kernel)}>"
    source = f"@jit\n{source}\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space = kernel.fn.__globals__
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), {**space, "jit": jit}, made)
    new = made[kernel.fn.__name__]
    # It must see the globals of its module as they are, not a copy of them.
    new = Kernel(type(new.fn)(new.fn.__code__, space, new.fn.__name__, new.fn.__defaults__))
    for name, module in list(sys.modules.items()):
        if name.startswith("tinyllama.ops"):
            for attribute, value in list(vars(module).items()):
                if value is kernel:
                    setattr(module, attribute, new)


@dataclass(frozen=True)
class Watched(Candidate):
    """A candidate whose accesses out of bounds end a call, and are noted."""

    # One for all calls: the kernels of a later one may read a table that an earlier one made.
    known: guards.KnownMemory = field(default_factory=guards.KnownMemory)

    def inputs(self, case: OpCase) -> Inputs:
        with self.known:
            return super().inputs(case)

    def results(
        self, inputs: Inputs, memory: PoisonedMemory | None = None
    ) -> dict[str, torch.Tensor]:
        with self.known, guards.watched(self.known.watch):
            return super().results(inputs, memory)


def attempt(
    source: str,
    kernel: Kernel,
    users: list[Candidate],
    tests: Sequence[str],
    references: dict[str, References],
) -> tuple[str, str]:
    """In a process of its own: the first check that fails, or the first thing that is raised.

    references: those of the users' cases, which are the same for every mutant.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of wrong numbers, which the checks are there to find
    plant(source, kernel)
    with _known(references):
        for candidate in users:
            watched = Watched(candidate.op, candidate.provider)
            found = accuracy.first(watched)
            if watched.known.strays:
                return KILLED, "out of bounds"
            for finding in [found] if found else run(candidate, OTHERS):
                if finding.outcome is Outcome.FAILED:
                    return KILLED, finding.check
                if finding.outcome is Outcome.CRASHED:
                    return RAISED, finding.message
    return tested(tests) if tests else (SURVIVED, "")


@contextlib.contextmanager
def _known(references: dict[str, References]) -> Iterator[None]:
    compute = OpCase.references

    def look_up(case: OpCase, inputs: Any) -> References:
        return references.get(str(case)) or compute(case, inputs)

    with mock.patch.object(OpCase, "references", look_up):
        yield


def references_of(users: list[Candidate]) -> dict[str, References]:
    """By the name of the case, on the inputs that its accuracy is checked with."""
    return {
        str(case): case.references(user.inputs(case)) for user in users for case in user.covered()
    }


def tested(names: Sequence[str]) -> tuple[str, str]:
    """The first of these tests that fails, by its name, or what one of them raises."""
    import pytest

    first: list[tuple[str, str]] = []

    class Noted:
        @pytest.hookimpl
        def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
            if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
                wrong = call.excinfo.errisinstance(AssertionError)
                test = item.nodeid.partition("[")[0]
                first.append((KILLED, test) if wrong else (RAISED, call.excinfo.exconly()))

    options = ["-c", str(ROOT / "pytest.ini"), "-p", "tinyllama.harness.plugins.suite"]
    options += ["--device", "cpu", "--exitfirst", "-W", "ignore"]
    status = pytest.main([*options, *(str(ROOT / name) for name in names)], plugins=[Noted()])
    if not first and status != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests {names} cannot be run: pytest ended with {status!r}")
    return first[0] if first else (SURVIVED, "")


class Forks:
    """In a worker: what forks a process for each trial, and computes nothing itself.

    Where there is a GPU, autograd's first use starts threads for it, on tensors of a CPU too, and
    in a fork of a process that has them autograd raises.
    """

    def __init__(self) -> None:
        self._references: dict[tuple[str, str], dict[str, References]] = {}

    def outcome(
        self,
        source: str,
        kernel: tuple[str, str],
        users: list[tuple[str, str]],
        tests: Sequence[str],
        seconds: float,
    ) -> tuple[str, str]:
        """How a trial ended, and its check. kernel: module and name; users: ops and providers."""
        function = getattr(importlib.import_module(kernel[0]), kernel[1])
        candidates = [Candidate(OPS[op], OPS[op][provider]) for op, provider in users]
        references: dict[str, References] = {}
        for user, candidate in zip(users, candidates, strict=True):
            if user not in self._references:
                self._references[user] = forked(functools.partial(references_of, [candidate]))
            references |= self._references[user]
        trial = functools.partial(attempt, source, function, candidates, tests, references)
        try:
            return forked(trial, seconds)
        except TimeoutError:
            return ENDED, ""
        except ChildProcessError as error:
            return RAISED, str(error)


def forked(function: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What a function returns in a fork of this process.

    Raises TimeoutError for one that does not end, and ChildProcessError for one that ends its
    process, or raises.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def answer() -> None:
        there.send_bytes(pickle.dumps(function()))

    process = fork.Process(target=answer)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        if not here.poll(seconds):
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        return pickle.loads(here.recv_bytes())
    except EOFError:
        process.join()
        text = f"the process ended with status {process.exitcode}"
        raise ChildProcessError(text) from None
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def forks() -> Iterator[Worker]:
    """A new process that mutants are tried from."""
    preload = ("torch._dynamo",)  # under a dispatch mode the first random number imports it
    with Worker("the process that mutants are forked from", cwd=ROOT, preload=preload) as worker:
        worker.make("forks", "tools.mutants:Forks")
        yield worker


def tried(
    worker: Worker,
    mutant: Mutant,
    kernel: Kernel,
    users: list[Candidate],
    tests: Sequence[str] = (),
    seconds: float = SECONDS,
) -> Trial:
    function = kernel.fn.__module__, kernel.fn.__name__
    names = [(user.op.name, user.provider.name) for user in users]
    ended = worker.call("forks", "outcome", mutant.source, function, names, tests, seconds)
    return Trial(mutant.line, mutant.text, mutant.gives, *ended)


# -- all ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """sample: mutants of each function, drawn from a seed."""

    sample: int
    seed: int
    tests: dict[str, list[str]]

    def tried(self, worker: Worker, kernel: Kernel, users: list[Candidate]) -> tuple[int, list]:
        """How many mutants a function has, and the trials of those drawn.

        Raises RuntimeError for a function that fails a check as it is: it would seem to kill all.
        """
        name, tests = qualified(kernel), self.tests.get(qualified(kernel), [])
        start = time.monotonic()
        same = tried(worker, Mutant(name, 0, "", "", kernel.src), kernel, users, tests)
        seconds = 10 + TIMES * (time.monotonic() - start)
        if same.outcome != SURVIVED:
            raise RuntimeError(f"{name} fails unchanged: {same.outcome}, {same.check}")
        every = mutants_of(kernel)
        draw = random.Random(f"{self.seed} {name}")
        chosen = draw.sample(every, min(self.sample, len(every)))
        return len(every), [
            tried(worker, mutant, kernel, users, tests, seconds) for mutant in chosen
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Triton kernels and run the checks.")
    parser.add_argument("--only", default="", help="parts of functions' names, with commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was tried here, beside what is there")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    functions = {n: one for n, one in candidates().items() if any(part in n for part in parts)}
    if not functions or args.sample < 1:
        parser.error(
            f"--only {args.only!r} --sample {args.sample}: use a part of a function's name, as in "
            "rope.rotate_kernel, and a whole number of at least 1"
        )
    plan = Plan(args.sample, args.seed, mutant_record.tests())
    explained = mutant_record.explained()
    trials: list[Trial] = []
    left = 0
    with forks() as worker:
        for name, (kernel, users) in functions.items():
            of, own = plan.tried(worker, kernel, users)
            trials += own
            by, source = [str(user.provider) for user in users], mutant_record.digest(kernel.src)
            made = mutant_record.Tried(name, source, by, of, args.seed, own)
            left += len(made.unexplained(explained))
            print(made.text(explained), flush=True)
            if args.json:  # hours lie between the first and the last
                mutant_record.add(args.json, made)
    print(f"{mutant_record.rate(trials)} of those that ran to an end were killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
