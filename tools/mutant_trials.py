"""One mutant of a kernel, tried in a process of its own by the providers that run the kernel."""

import contextlib
import hashlib
import importlib
import linecache
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tinyllama.harness.correct.cases import OpCase, References
from tinyllama.harness.correct.checks import Candidate, Outcome, accuracy, run
from tinyllama.harness.correct.launched import launches_of
from tinyllama.harness.kernels.launch import Kernel, identity, jit
from tinyllama.ops import OPS
from tools import mutant_record
from tools.tested import ENDED, KILLED, RAISED, SURVIVED, tested

OTHER_CHECKS = ("empty batch", "determinism")  # beside the accuracy cases
MOST_USERS = 2  # providers that a mutant is tried with
SECONDS = 600.0  # that unchanged functions may take

# -- kernels and the providers that run them ------------------------------------------------------


def kernels() -> dict[str, tuple[Kernel, list[Candidate]]]:
    """Each function under `jit`, and the providers that run it, those with fewest kernels first;
    and those that only tests run, which `tools/mutants.toml` names for them."""
    found: dict[str, tuple[Kernel, list[tuple[int, Candidate]]]] = {}
    for op in OPS.values():
        for provider in op.providers.values():
            if "triton" not in provider.requires:
                continue
            used: dict[str, Kernel] = {}
            for case in op.cases:
                if provider.supports(case.dims) is None:
                    for launch in launches_of(op, provider, case, torch.float32):
                        _add_with_callees(launch.kernel, used)
            for name, kernel in used.items():
                users = found.setdefault(name, (kernel, []))[1]
                users.append((len(used), Candidate(op, provider)))
    known = mutant_record.functions()
    for name in mutant_record.tests().keys() & known.keys():
        found.setdefault(name, (known[name], []))
    return {
        name: (kernel, [one for _, one in sorted(users, key=lambda user: user[0])][:MOST_USERS])
        for name, (kernel, users) in sorted(found.items())
    }


def _add_with_callees(kernel: Kernel, used: dict[str, Kernel]) -> None:
    if identity(kernel) in used:
        return
    used[identity(kernel)] = kernel
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, Kernel):
            _add_with_callees(called, used)


# -- one mutant -----------------------------------------------------------------------------------


def plant(source: str, kernel: Kernel) -> None:
    """Replace a kernel by a changed function in every module that has it."""
    file = f"<{identity(kernel)}>"
    source = f"@jit\n{source}\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space = kernel.fn.__globals__
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), {**space, "jit": jit}, made)
    new = made[kernel.fn.__name__]
    # It must see the globals of its module as they are, not a copy of them.
    new = Kernel(type(new.fn)(new.fn.__code__, space, new.fn.__name__, new.fn.__defaults__))
    for name, module in list(sys.modules.items()):
        if name.startswith("tinyllama."):
            for attribute, value in list(vars(module).items()):
                if value is kernel:
                    setattr(module, attribute, new)


@dataclass(frozen=True)
class Attempt:
    """A changed function and what it is tried on, in a form that another process can read.

    kernel: module and name; users: ops and providers; tests: to run where all checks pass;
    references: a folder of what `compute_references` found for the users; others: more functions,
    as module and name, that are planted beside it, each with its source.
    """

    kernel: tuple[str, str]
    users: list[tuple[str, str]]
    tests: Sequence[str]
    source: str = ""
    references: Path | None = None
    others: Sequence[tuple[tuple[str, str], str]] = ()

    def candidates(self) -> list[Candidate]:
        return [Candidate(OPS[op], OPS[op][provider]) for op, provider in self.users]

    def ended(self) -> tuple[str, str]:
        """The outcome, and the first check or test that fails or the first error."""
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of wrong numbers, which the checks are there to find
        for (module, name), source in [*self.others, (self.kernel, self.source)]:
            plant(source, getattr(importlib.import_module(module), name))
        with _looked_up(self.references):
            for candidate in self.candidates():
                fault = accuracy.first_fault(candidate)
                for finding in [fault] if fault else run(candidate, OTHER_CHECKS):
                    if finding.outcome is Outcome.FAILED:
                        return KILLED, finding.check
                    if finding.outcome is Outcome.CRASHED:
                        return RAISED, finding.message
        return tested(self.tests) if self.tests else (SURVIVED, "")

    def tried(self, source: str, seconds: float) -> tuple[str, str]:
        """How it ends in a process of its own, which has so many seconds."""
        try:
            return in_fresh_process(replace(self, source=source).ended, seconds)
        except TimeoutError:
            return ENDED, ""
        except ChildProcessError as error:
            return RAISED, str(error)


def compute_references(op: str, provider: str, folder: Path) -> None:
    """Those of a provider's cases, which are the same for every mutant, each in a file: for some
    ops they take hundreds of MB, and a mutant that is killed at once reads one of them."""
    torch.set_num_threads(1)
    user = Candidate(OPS[op], OPS[op][provider])
    for case in user.covered():
        _file(folder, case).write_bytes(pickle.dumps(case.references(user.inputs(case))))


def _file(folder: Path, case: OpCase) -> Path:
    return folder / hashlib.sha256(str(case).encode()).hexdigest()


@contextlib.contextmanager
def _looked_up(folder: Path | None) -> Iterator[None]:
    compute = OpCase.references

    def look_up(case: OpCase, inputs: Any) -> References:
        if folder and (file := _file(folder, case)).exists():
            found: References = pickle.loads(file.read_bytes())
            return found
        return compute(case, inputs)

    with mock.patch.object(OpCase, "references", look_up):
        yield


_STARTING = threading.Lock()  # threads may start processes, and `start` looks at all of them


def forkserver() -> Any:
    """A context of multiprocessing whose processes have imported this file."""
    context = multiprocessing.get_context("forkserver")
    # Under a dispatch mode the first random number imports torch._dynamo.
    context.set_forkserver_preload(["tools.mutant_trials", "torch._dynamo"])
    return context


def in_fresh_process(function: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What a function returns in a new process, which has so many seconds.

    The process is forked from a server that has imported this file and computes nothing: where
    there is a GPU, autograd's first use starts threads for it, on tensors of a CPU too, and
    autograd raises in a fork of a process that has them. What the process prints is lost.

    Raises TimeoutError for one that does not end, and ChildProcessError for one that ends its
    process, or raises.
    """
    context = forkserver()
    here, there = context.Pipe(duplex=False)
    # Plain pickles: those of multiprocessing would share the memory of tensors.
    process = context.Process(target=_answer, args=(there, pickle.dumps(function)))
    with _STARTING:
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


def _answer(connection: Connection, function: bytes) -> None:
    with open(os.devnull, "w") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())
    connection.send_bytes(pickle.dumps(pickle.loads(function)()))
