"""Checks in a process of their own: what ends that process is a finding, and the rest goes on.

The process says which case it is about to try. Where it ends, that case has a fault, and the checks
go on with the next case in a new process. What it sends is JSON, and never unpickled.
"""

import contextlib
import faulthandler
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check import accuracy, apart
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import place_in
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.check.run import CHECKS, Candidate, Finding, Outcome, run
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, discover, load_about, load_file
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.worker import Worker, WorkerError

APART = "judged apart"  # of these checks alone, the candidate is not in the process that decides
ALL = (*CHECKS, APART)
MOST_ENDED = 6  # processes of one group of checks that may end before its rest is not tried
SECONDS = 300  # for one case; an endless loop of an interpreted kernel is seen long before
GROUP = 24 * 3600.0  # seconds for all cases of a group of checks, each of which has its own limit
# What reading an answer of another process, which may be any, raises.
UNREADABLE = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError)
RESERVE = 2**30  # bytes of memory that are left to other processes


@dataclass(frozen=True)
class Asked:
    """What is checked, on a device, with inputs from a seed: the providers that a file declares, of
    each op or of one, or those of an op of the tree or of a package; of these the one of a name.

    package: has the ops of the tree, on which the file may register providers. candidate:
    ``FILE:function``, which is checked as a provider of the op, in the place of its own. seconds:
    for one case. declaration: a file that declares the op instead, about functions of ``file``.
    """

    package: str
    file: str | None
    op: str | None
    provider: str | None
    device: str
    seed: int
    candidate: str | None = None
    seconds: int = SECONDS
    declaration: str | None = None


class Checks:
    """In the worker: the providers that are asked about, and the checks on them.

    log: a file to which each case is written before it is tried.
    """

    def __init__(self, log: str, **asked: object) -> None:
        self.asked = Asked(**asked)  # type: ignore[arg-type]
        self.log = Path(log)
        if self.asked.device == "cpu":
            limit_memory()
        self.candidates = {
            str(one.provider): one
            for one in self._declared()
            if self.asked.provider in (None, one.provider.name)
        }

    def _declared(self) -> Iterator[Candidate]:
        """Raises UsageError for a name that is not declared; the message has those that are."""
        asked, ops = self.asked, discover(self.asked.package)
        before: set[str] = set()
        every = list(ops.values())
        if asked.file is not None:
            before = {str(provider) for op in every for provider in op.providers.values()}
            sys.path.append(str(Path(asked.file).resolve().parent))  # it may import its neighbours
            with self._loading():
                if asked.declaration is None:
                    name = load_file(asked.file, ops).__name__
                else:
                    name = load_about(asked.declaration, asked.file, ops).__name__
            elsewhere = list(_elsewhere(name, ops))
            others = [one for op in elsewhere for one in op.providers.values()]
            before |= {str(provider) for provider in others if provider.module != name}
            every = [*ops.values(), *elsewhere]
            if asked.op not in (None, *(op.name for op in every)):
                raise UsageError(_unknown("--op", asked.op, [op.name for op in every]))
        elif asked.op not in ops:
            raise UsageError(_unknown("--op", asked.op, ops))
        elif asked.candidate is not None and asked.op is not None:
            before = {str(provider) for provider in ops[asked.op].providers.values()}
            with self._loading():
                _register(asked.candidate, ops[asked.op])
        found = [
            Candidate(op, provider, torch.device(asked.device), asked.seed, announce=self.announce)
            for op in every
            if asked.op in (None, op.name)
            # The reference last: it is seldom wrong, and some checks take long on it.
            for provider in sorted(op.providers.values(), key=lambda one: one.name == "eager")
            if str(provider) not in before
        ]
        names = dict.fromkeys(one.provider.name for one in found)
        if names and asked.provider not in (None, *names):
            raise UsageError(_unknown("--provider", asked.provider, names))
        yield from found

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        """On a CPU, code that asks for a GPU where it is imported or called is answered."""
        return foreign() if self.asked.device == "cpu" else contextlib.nullcontext()

    def announce(self, case: OpCase) -> None:
        """Note a case, which has so much time from now on."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(str(case)) + "\n")
        faulthandler.dump_traceback_later(self.asked.seconds, exit=True)

    def providers(self) -> dict[str, bool]:
        """Those that are checked, and whether the reference is of the same file."""
        return {
            name: self.asked.file is not None and one.op.module == one.provider.module
            for name, one in self.candidates.items()
        }

    def findings(
        self, provider: str, only: list[str], plain: list[str], bounded: bool, ended: dict[str, str]
    ) -> list[dict[str, str]]:
        """As plain data. ended: cases that ended a process before."""
        candidate = replace(self.candidates[provider], ended=ended)
        try:
            return [one.as_dict() for one in run(candidate, only, plain=plain, bounded=bounded)]
        finally:
            faulthandler.cancel_dump_traceback_later()

    def named(self, provider: str) -> tuple[str, str | None]:
        """The name of a candidate's op, and why it cannot run here."""
        one = self.candidates[provider]
        return one.op.name, one.missing()

    def traits(self, provider: str) -> apart.Traits:
        one = self.candidates[provider]
        return apart.traits(one.provider, apart.cases_of(one.op))

    def answer(self, provider: str, inputs: Any, folder: str) -> dict[str, apart.Stored]:
        """The results for the inputs of a folder."""
        one = self.candidates[provider]
        faulthandler.dump_traceback_later(self.asked.seconds, exit=True)
        try:
            return apart.answer(one.op, one.provider, inputs, one.device, Path(folder))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _elsewhere(module: str, known: Mapping[str, Op]) -> Iterator[Op]:
    """Ops that are declared in other files or packages, on which a module registered providers."""
    met = {id(op) for op in known.values()}
    for one in list(sys.modules.values()):
        for op in [value for value in vars(one).values() if isinstance(value, Op)]:
            if id(op) not in met and any(p.module == module for p in op.providers.values()):
                met.add(id(op))
                yield op


def _register(named: str, op: Op) -> None:
    """Make ``FILE:function`` a provider of an op.

    Raises UsageError for a function that is not there, DeclarationError for one that takes other
    arguments.
    """
    file, _, name = named.rpartition(":")
    sys.path.append(str(Path(file).resolve().parent))
    function = getattr(load_file(file, Registry()), name, None)
    if not callable(function):
        raise UsageError(f"--candidate {named!r}: {file} has no function {name!r}")
    op.provider("candidate", requires=("triton",) if HAS_TRITON else ())(function)


def limit_memory() -> None:
    """Let an allocation fail that the machine has no memory for, before the system ends the
    process; on Linux."""
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return
    import resource

    (available,) = re.findall(r"^MemAvailable: +(\d+) kB", facts.read_text(), re.MULTILINE)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = max(int(available) * 1024 - RESERVE, RESERVE)
    if most == resource.RLIM_INFINITY or wanted < most:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def check(
    asked: Asked, only: Sequence[str], progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[str, list[Finding], bool]]:
    """Each provider that is asked about, the findings of these checks on it, and whether the file
    that declares it declares its reference too.

    progress: is told what is tried now, what was seen, and how long that took. Raises WorkerError
    when the file cannot be loaded, or has no such op or provider.
    """
    together = [name for name in only if name in accuracy.ALL]
    others = [name for name in only if name not in together and name != APART]
    groups = [*([together] if together else []), *([name] for name in others)]
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        one = _Run(asked, Path(folder) / "cases")
        try:
            for provider, own in one.worker.call("checks", "providers").items():
                found: list[Finding] = []
                for names in (*groups, *([[APART]] if APART in only else [])):
                    progress(f"{provider}: trying {', '.join(names)}")
                    began = time.monotonic()
                    if names == [APART]:
                        seen = [one.judged_apart(provider, own, found)]
                    else:
                        every = one.findings(provider, names, found)
                        seen = [_following(new, found) for new in every]
                    found += seen
                    said = ", ".join(f"{one.check} {one.outcome.value}" for one in seen)
                    progress(f"{provider}: {said} ({time.monotonic() - began:.1f} s)")
                yield provider, found, own
        finally:
            one.worker.close()


def _following(finding: Finding, before: Sequence[Finding]) -> Finding:
    """A crash that an earlier check met, too, follows from that one. A cause is one that was found
    before."""
    cause = finding.cause
    if finding.outcome is Outcome.CRASHED:
        alike = (one.cause or one.check for one in before if one.message == finding.message)
        cause = next(alike, cause)
    known = {one.check for one in before if not one.outcome.good}
    return replace(finding, cause=cause if known.intersection(cause.split(" and ")) else "")


class _Run:
    """A worker, and another one after each that ended."""

    def __init__(self, asked: Asked, log: Path) -> None:
        self.asked, self.log = asked, log
        self.worker = self._started()

    def findings(self, provider: str, names: list[str], before: list[Finding]) -> list[Finding]:
        """Of a group of checks; before: those of earlier groups."""
        faults = accuracy.plain_faults(before)
        bounded = all(one.outcome.good for one in before if one.check == accuracy.BOUNDS)
        ended: dict[str, str] = {}
        while True:
            self.log.write_text("")
            try:
                plain = self.worker.call(
                    "checks", "findings", provider, names, faults, bounded, ended, timeout=GROUP
                )
                return [Finding.of(one) for one in plain]
            except WorkerError as error:
                text, details = self._said(error), error.details
            self.worker.close()
            self.worker = self._started()
            cases = self.log.read_text(encoding="utf-8").splitlines()
            case = json.loads(cases[-1]) if cases else ""
            varied = set(names) & set(accuracy.ALL)
            if not varied or not case or case in ended or len(ended) + 1 == MOST_ENDED:
                return [Finding(name, Outcome.CRASHED, case, text, details) for name in names]
            ended[case] = text

    def judged_apart(self, provider: str, own: bool, before: Sequence[Finding]) -> Finding:
        """A candidate's values, compared here. own: its op is of its own file."""
        plain = [one.outcome for one in before if one.check in accuracy.PLAIN]
        try:
            said, missing = self.worker.call("checks", "named", provider)
            op_name = str(self.asked.op if self.asked.candidate else said)
            known = discover(self.asked.package, plugins=False)
            if self.asked.file is not None and (own or op_name not in known):
                reason = (
                    f"the candidate declares op {op_name!r}, so its process alone knows the "
                    "reference: use --candidate with an installed op"
                )
                return Finding(APART, Outcome.UNSUPPORTED, message=reason)
            if not all(one.good for one in plain):
                return Finding(APART, Outcome.BLOCKED, message="the plain cases fail already")
            cases = apart.cases_of(known[op_name])
            stated: apart.Traits = self.worker.call("checks", "traits", provider)
        except WorkerError as error:
            return Finding(APART, Outcome.CRASHED, message=self._said(error))
        tried = 0
        for case, declined in zip(cases, stated.declines, strict=True):
            if declined is None and not missing:
                tried += 1
                if finding := self._apart(provider, case, stated):
                    return finding
        if not tried:  # what passed elsewhere was run, whatever it says now
            outcome = Outcome.FAILED if Outcome.PASSED in plain else Outcome.UNSUPPORTED
            return Finding(APART, outcome, message=missing or "it covers none of the cases")
        text = f"{tried} of {len(cases)} cases, inputs from a secret seed"
        return Finding(APART, Outcome.PASSED, message=text)

    def _apart(self, provider: str, case: OpCase, stated: apart.Traits) -> Finding | None:
        """What is wrong in a case; None where nothing is."""
        name = str(case).replace(f"{case.op.name}-eager", provider, 1)
        with tempfile.TemporaryDirectory(prefix="apart-") as folder:

            def ask(inputs: Inputs) -> Mapping[str, apart.Stored]:
                found: dict[str, apart.Stored] = self.worker.call(
                    "checks", "answer", provider, inputs, folder
                )
                return found

            try:
                wrong = apart.compared(case, stated, ask, Path(folder))
            except WorkerError as error:
                text, details = self._said(error), error.details
                self.worker.close()
                self.worker = self._started()
                return Finding(APART, Outcome.CRASHED, name, text, details)
            except UNREADABLE as error:
                wrong = f"what it gave cannot be read: {type(error).__name__}: {error}"
        return Finding(APART, Outcome.FAILED, name, wrong) if wrong else None

    def _said(self, error: WorkerError) -> str:
        """How a process ended, with the author's line."""
        file = self.asked.file
        place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
        if error.details.startswith("Timeout (") or "\nTimeout (" in error.details:
            return f"{place}no end after {self.asked.seconds} s"
        return f"{place}{error}"

    def _started(self) -> Worker:
        worker = Worker("check", preload=[self.asked.package])
        try:
            worker.make("checks", f"{__name__}:Checks", log=str(self.log), **asdict(self.asked))
        except WorkerError:
            worker.close()
            raise
        return worker


def _unknown(option: str, name: str | None, known: Iterable[str]) -> str:
    return f"{option} {name!r:.80} does not exist: use one of {', '.join(known)}"
