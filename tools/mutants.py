#!/usr/bin/env python3
"""Mutants of the Triton kernels: does a named check fail when a kernel is changed in one place?

    python tools/mutants.py [--only rope] [--sample 40] [--seed 0] [--json build/mutants.json]

A kernel's function, and those it calls, are changed one operator, number, mask or function at a
time; a seeded sample of the changes is tried, each in a process of its own, on the CPU. Killed
means that a check of `tinyllama.harness.checks` failed. A mutant that only raises, ends its process
or does not come to an end is counted apart: that shows that code is run, not that it is checked.
What survives must be explained in `tools/mutants.toml`, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import linecache
import multiprocessing
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mutate this checkout

import torch

from tinyllama.harness.checks import Candidate, Outcome, accuracy, guards, run
from tinyllama.harness.kernels import Kernel, jit
from tinyllama.harness.resources import launches_of
from tinyllama.harness.worker import Worker
from tinyllama.ops import OPS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = Path(__file__).with_suffix(".toml")
OTHERS = ("out of bounds", "empty batch", "determinism")  # beside the accuracy cases
MOST_USERS = 2  # providers that a mutant is tried with
SECONDS = 300.0  # until a mutant counts as one that does not end
KILLED, SURVIVED, RAISED, ENDED = "killed", "survived", "raised", "did not end"
SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.BitAnd: ast.BitOr,
    ast.USub: ast.UAdd,
}
CALLS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "exp": "exp2", "exp2": "exp"}


@dataclass(frozen=True)
class Mutant:
    """One change. line: in the kernel's file; text: what stands there instead of what."""

    kernel: str
    line: int
    text: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.text}"


@dataclass(frozen=True)
class Trial:
    """How a mutant ended. check: the one that failed, or what was raised."""

    mutant: Mutant
    outcome: str
    check: str = ""


# -- changes ----------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """Functions that make a changed copy of a node."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        yield lambda new: _set(new, op=SWAPPED[type(new.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield lambda new: _set(new, ops=[SWAPPED[type(new.ops[0])]()])
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda new: _set(new, value=new.value + 1)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called in CALLS:
            yield lambda new: _set(new, func=_set(new.func, attr=CALLS[called]))
        if called == "where":
            yield lambda new: _set(new, args=[new.args[0], new.args[2], new.args[1]])
        if any(word.arg == "mask" for word in node.keywords):
            kept = [word for word in node.keywords if word.arg not in ("mask", "other")]
            yield lambda new: _set(new, keywords=kept)


def _set(node: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def mutants_of(kernel: Kernel) -> list[Mutant]:
    """Every change of a function's body; its signature and docstring stay."""
    first = kernel.fn.__code__.co_firstlineno
    tree = ast.parse(kernel.src)  # from its `def` on, without decorators
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    places = [
        node
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for node in ast.walk(statement)
    ]
    found = []
    for place in places:
        for change in changes(place):
            new, old = change(copy.deepcopy(place)), copy.deepcopy(place)
            text = f"{ast.unparse(old)} -> {ast.unparse(new)}"
            source = ast.unparse(_Replace(place, new).visit(copy_but(tree, place)))
            line = first + getattr(place, "lineno", 1)
            found.append(Mutant(qualified(kernel), line, text, source))
    return found


def copy_but(tree: ast.AST, place: ast.AST) -> ast.AST:
    """A copy of a tree in which one node is still the same object, so that it can be found."""
    return copy.deepcopy(tree, {id(place): place})


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def qualified(kernel: Kernel) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


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


def attempt(source: str, kernel: Kernel, users: list[Candidate], answer: Any) -> None:
    """In a process of its own: the first check that fails, or the first thing that is raised."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of wrong numbers, which the checks are there to find
    plant(source, kernel)
    for candidate in users:
        known = guards.KnownMemory()
        with known, guards.watched(known.watch):
            found = accuracy.first(candidate)
        if known.strays:
            answer.put((KILLED, "out of bounds"))
            return
        for finding in [found] if found else run(candidate, OTHERS):
            if finding.outcome in (Outcome.FAILED, Outcome.CRASHED):
                failed = finding.outcome is Outcome.FAILED
                answer.put((KILLED, finding.check) if failed else (RAISED, finding.message))
                return
    answer.put((SURVIVED, ""))


class Forks:
    """In a worker: what forks a process for each trial, and computes nothing itself.

    Where there is a GPU, autograd's first use starts threads for it, on tensors of a CPU too, and
    in a fork of a process that has them autograd raises.
    """

    def outcome(
        self, source: str, kernel: tuple[str, str], users: list[tuple[str, str]]
    ) -> tuple[str, str]:
        """How a trial ended, and its check. kernel: module and name; users: ops and providers."""
        function = getattr(importlib.import_module(kernel[0]), kernel[1])
        candidates = [Candidate(OPS[op], OPS[op][provider]) for op, provider in users]
        fork = multiprocessing.get_context("fork")
        answer = fork.SimpleQueue()
        process = fork.Process(target=attempt, args=(source, function, candidates, answer))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return ENDED, ""
        if answer.empty():
            return RAISED, f"the process ended with status {process.exitcode}"
        return answer.get()


@contextlib.contextmanager
def forks() -> Iterator[Worker]:
    """A new process that mutants are tried from."""
    with Worker("the process that mutants are forked from", cwd=ROOT) as worker:
        worker.make("forks", "tools.mutants:Forks")
        yield worker


def tried(worker: Worker, mutant: Mutant, kernel: Kernel, users: list[Candidate]) -> Trial:
    function = kernel.fn.__module__, kernel.fn.__name__
    names = [(user.op.name, user.provider.name) for user in users]
    return Trial(mutant, *worker.call("forks", "outcome", mutant.source, function, names))


# -- all ------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate the Triton kernels and run the checks.")
    parser.add_argument("--only", default="", help="functions whose name contains this")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every trial here")
    args = parser.parse_args(argv)
    explained = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["equivalent"]
    known = {f"{one['kernel']}: {one['change']}" for one in explained}
    functions = {name: one for name, one in candidates().items() if args.only in name}
    if not functions or args.sample < 1:
        parser.error(
            f"--only {args.only!r} --sample {args.sample}: use a part of a function's name, as in "
            "rope.rotate_kernel, and a whole number of at least 1"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    with forks() as worker:
        for name, (kernel, users) in functions.items():
            every = mutants_of(kernel)
            draw = random.Random(f"{args.seed} {name}")
            chosen = draw.sample(every, min(args.sample, len(every)))
            own = [tried(worker, mutant, kernel, users) for mutant in chosen]
            trials += own
            _say(name, users, own, len(every), known)
            if args.json:  # hours lie between the first and the last
                _write(args.json, trials)
    rate = _rate(trials)
    print(f"{rate:.1%} of those that ran to an end were killed ({len(trials)} mutants)")
    left = [t for t in trials if t.outcome == SURVIVED and t.mutant.name not in known]
    return 1 if left else 0


def _write(path: Path, trials: list[Trial]) -> None:
    data = [{**asdict(t.mutant), "outcome": t.outcome, "check": t.check} for t in trials]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _rate(trials: list[Trial]) -> float:
    killed, survived = (sum(t.outcome == one for t in trials) for one in (KILLED, SURVIVED))
    return killed / max(1, killed + survived)


def _say(name: str, users: list[Candidate], own: list[Trial], of: int, known: set[str]) -> None:
    counts = {
        outcome: sum(t.outcome == outcome for t in own)
        for outcome in (KILLED, SURVIVED, RAISED, ENDED)
    }
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    by = ", ".join(str(user.provider) for user in users)
    print(f"{name} by {by}: {said}; {len(own)} of {of} mutants", flush=True)
    for trial in own:
        if trial.outcome == SURVIVED:
            note = " (explained)" if trial.mutant.name in known else ""
            print(f"    line {trial.mutant.line}: {trial.mutant.text}{note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
