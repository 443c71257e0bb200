"""Checks in processes of their own: what ends one is a finding, and the rest goes on.

A process says which case it is about to try. Where it ends, that case has a fault, and the checks
go on with the next case in a new process. What it sends is JSON, and never unpickled. On a GPU a
second process interprets the kernels on the CPU, and makes the checks of memory as well.
"""

import contextlib
import faulthandler
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness.check import accuracy, apart
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import GpuLostError, place_in
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.check.names import APART, INTERPRETED, LAUNCHED
from tinyllama.harness.check.run import Candidate, Finding, Outcome, Rank, run
from tinyllama.harness.check.verdict import Provided, merged
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, discover, load_about, load_file
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.worker import Worker, WorkerError, end_all

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


# -- in a process that makes the checks -----------------------------------------------------------


class Checks:
    """The providers that are asked about, and the checks on them.

    log: a file to which each case is written before it is tried.
    """

    def __init__(self, log: str, **asked: object) -> None:
        self.asked = Asked(**asked)  # type: ignore[arg-type]
        self.log = Path(log)
        if self.asked.device == "cpu":
            limit_memory()
        device, seed = torch.device(self.asked.device), self.asked.seed
        self.candidates = {
            str(provider): Candidate(op, provider, device, seed, announce=self.announce)
            for op in self._ops()
            # The reference last: it is seldom wrong, and some checks take long on it.
            for provider in sorted(op.providers.values(), key=lambda each: each.name == "eager")
            if self.module in ("", provider.module)
        }
        names = [candidate.provider.name for candidate in self.candidates.values()]
        if names and (wanted := self.asked.provider) is not None:
            if wanted not in names:
                raise UsageError(_unknown("--provider", wanted, dict.fromkeys(names)))
            self.candidates = {
                name: one for name, one in self.candidates.items() if one.provider.name == wanted
            }
        for candidate in self.candidates.values():
            check_fits(candidate.op)

    def _ops(self) -> list[Op]:
        """The ops that are asked about; ``module`` becomes the file that declares their providers,
        "" for all of them. Raises UsageError for a name that is not declared."""
        asked, ops = self.asked, discover(self.asked.package)
        self.module = ""
        known = list(ops.values())
        if asked.file is not None:
            with self._loading(asked.file):
                if asked.declaration is None:
                    self.module = load_file(asked.file, ops).__name__
                else:
                    self.module = load_about(asked.declaration, asked.file, ops).__name__
            known = [*ops.values(), *_elsewhere(self.module, ops)]
        if asked.op is None:
            return known
        if asked.op not in (op.name for op in known):
            raise UsageError(_unknown("--op", asked.op, (op.name for op in known)))
        known = [op for op in known if op.name == asked.op]
        if asked.candidate is not None:
            with self._loading(asked.candidate.rpartition(":")[0]):
                self.module = _register(asked.candidate, known[0])
        return known

    @contextlib.contextmanager
    def _loading(self, file: str) -> Iterator[None]:
        """The file may import its neighbours. On a CPU, code that asks for a GPU where it is
        imported or called is answered."""
        sys.path.append(str(Path(file).resolve().parent))
        with foreign() if self.asked.device == "cpu" else contextlib.nullcontext():
            yield

    def announce(self, case: OpCase) -> None:
        """Note a case, which has so much time from now on."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(str(case)) + "\n")
        faulthandler.dump_traceback_later(self.asked.seconds, exit=True)

    def provided(self) -> list[Provided]:
        """The providers that are checked."""
        return [
            Provided(
                name,
                self.asked.file is not None and one.op.module == one.provider.module,
                tuple(map(str, one.plain())),
                one.op.name,
                one.missing(),
            )
            for name, one in self.candidates.items()
        ]

    def findings(
        self, provider: str, only: list[str], plain: list[str], bounded: bool, ended: dict[str, str]
    ) -> list[dict[str, str]]:
        """As plain data. ended: cases that ended a process before."""
        candidate = replace(self.candidates[provider], ended=ended)
        try:
            if only == [LAUNCHED]:
                return [self._launched(candidate).as_dict()]
            return [one.as_dict() for one in run(candidate, only, plain=plain, bounded=bounded)]
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _launched(self, candidate: Candidate) -> Finding:
        """Whether some plain case launches a kernel, where the provider declares one. A GPU runs
        kernels that nobody sees being launched; on a CPU all are interpreted."""
        declared = "triton" in candidate.provider.requires and self.asked.candidate is None
        missing = candidate.missing() or ("" if declared else "it declares no kernel")
        if missing or candidate.device.type != "cpu":
            text = missing or "it is seen where kernels are interpreted: use --device cpu"
            return Finding(LAUNCHED, Outcome.UNSUPPORTED, message=text)
        for case in reversed(candidate.plain()):  # small ones may be left to torch
            bounds = Bounds()
            try:
                with candidate.limits(bounds):
                    candidate.results(candidate.inputs(case))
            except Exception as error:
                if not bounds.kernels:
                    text = f"the call raised {type(error).__name__}: {error}"
                    return Finding(LAUNCHED, Outcome.BLOCKED, str(case), text)
            if bounds.kernels:
                return Finding(LAUNCHED, Outcome.PASSED)
        text = (
            'no kernel launched, though requires=("triton",) declares one: does a branch (is_cuda) '
            "leave tensors on the CPU to torch?"
        )
        return Finding(LAUNCHED, Outcome.FAILED, message=text, special=Rank.REFUSED)

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


def check_fits(op: Op) -> None:
    """Raise UsageError where the op's ``fits`` raises an error for a case of the op's own."""
    for case in op.cases:
        try:
            op.fits({**op.numbers(case.dims), **op.params, **case.params})
        except Exception as error:
            raise UsageError(
                f"op {op.name!r}: fits raises {type(error).__name__}: {error} for the case {case}: "
                "let it return what is wrong with the sizes, or None"
            ) from error


def _elsewhere(module: str, known: Mapping[str, Op]) -> Iterator[Op]:
    """Ops that are declared in other files or packages, on which a module registered providers."""
    met = {id(op) for op in known.values()}
    for loaded in list(sys.modules.values()):
        for op in [value for value in vars(loaded).values() if isinstance(value, Op)]:
            if id(op) not in met and any(p.module == module for p in op.providers.values()):
                met.add(id(op))
                yield op


def _register(named: str, op: Op) -> str:
    """Make ``FILE:function`` a provider of an op, of the module that is returned.

    Raises UsageError for a function that is not there, DeclarationError for one that takes other
    arguments.
    """
    file, _, name = named.rpartition(":")
    function = getattr(load_file(file, Registry()), name, None)
    if not callable(function):
        raise UsageError(f"--candidate {named!r}: {file} has no function {name!r}")
    op.provider("candidate", requires=("triton",) if HAS_TRITON else ())(function)
    return op.providers["candidate"].module


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


# -- in the process that judges -------------------------------------------------------------------


def processes(device: str) -> dict[str, dict[str, str]]:
    """The processes that check on a device: where each one runs, and with which variables.

    One that judges on the CPU sees no GPU, so that code which asks for one does as without it.
    """
    gpus = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hidden = dict.fromkeys(gpus, "")
    if device == "cpu":
        return {"cpu": hidden}
    return {device: {}, "cpu": {**hidden, "TRITON_INTERPRET": "1"}}


def check(
    asked: Asked, only: Sequence[str], progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Provided, Finding | None]]:
    """Each provider that is asked about, with None; then each with every finding of these checks,
    as soon as it is known.

    progress: is told what is tried now, what was seen, and how long that took. Raises WorkerError
    when the file cannot be loaded, or has no such op or provider.
    """
    first = [name for name in only if name == LAUNCHED]  # what is interpreted rests on it
    together = [name for name in only if name in accuracy.ALL]
    alone = [[name] for name in only if name not in (*first, *together, APART)]
    last = [name for name in only if name == APART]
    groups = [*filter(None, [first, together]), *alone, *filter(None, [last])]
    runs: list[_Run] = []
    try:
        with tempfile.TemporaryDirectory(prefix="check-") as folder, ThreadPoolExecutor() as pool:
            starts = processes(asked.device).items()
            runs += [_Run(asked, *start, Path(folder)) for start in starts]
            try:
                every = runs[0].call("provided")
                if names := ", ".join(provided.name for provided in every):
                    text = f"{len(only)} checks of {names} on {asked.device}: {', '.join(only)}"
                    progress(text)
                yield from ((provided, None) for provided in every)
                for provided in every:
                    for finding in _of_groups(runs, pool, provided, groups, progress):
                        yield provided, finding
            except BaseException:  # Ctrl-C, too: nothing need be answered any more
                end_all()
                raise
            finally:
                for run in runs:
                    run.close()
    finally:
        end_all(False)


def _of_groups(
    runs: Sequence["_Run"],
    pool: ThreadPoolExecutor,
    provided: Provided,
    groups: Sequence[Sequence[str]],
    progress: Callable[[str], None],
) -> Iterator[Finding]:
    """The findings of each group of checks on a provider, in all processes at once."""
    known: list[Finding] = []
    for number, names in enumerate(groups, 1):
        label = " to ".join(dict.fromkeys((names[0], names[-1])))
        doing = f"{provided.name}: {number} of {len(groups)}: {label}"
        progress(doing)
        began = time.monotonic()
        if names == [APART]:
            new = [runs[0].judged_apart(provided, known)]
        else:
            asking = [pool.submit(run.findings, provided.name, names) for run in runs]
            answers = [answer.result() for answer in asking]
            launched = runs[-1].launched(provided.name)
            new = [_following(one, known) for one in _merged(*answers, launched=launched)]
        known += new
        tried = any(finding.outcome is not Outcome.BLOCKED for finding in new)
        faults = [f"{finding.check}: {finding.rank.value}" for finding in new if finding.rank]
        said = "; ".join(faults) or ("no fault" if tried else "not tried")
        progress(f"{doing}: {said} ({time.monotonic() - began:.1f} s)")
        yield from new


def _merged(
    findings: Sequence[Finding], interpreted: Sequence[Finding] = (), *, launched: bool
) -> Iterator[Finding]:
    others = {finding.check: finding for finding in interpreted if finding.check in INTERPRETED}
    for finding in findings:
        other = others.get(finding.check)
        yield finding if other is None else merged(finding, other, launched)


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
    """A worker on one device, and another one after each that ended; it starts when it is asked.

    env: variables of its environment. beside: whether it interprets beside another one on a GPU.
    """

    def __init__(self, asked: Asked, device: str, env: Mapping[str, str], folder: Path) -> None:
        self.asked, self.env = replace(asked, device=device), env
        self.beside = device != asked.device
        self.log = folder / device.replace(":", "-")
        self._found: dict[str, list[Finding]] = {}
        self._worker: Worker | None = None

    def call(self, method: str, *args: Any, **limit: float) -> Any:
        """What a method of the worker's `Checks` returns. Raises WorkerError, also where the file
        cannot be loaded."""
        if self._worker is None:
            self._worker = Worker("check", preload=[self.asked.package], env=self.env)
            where = {"log": str(self.log), **asdict(self.asked)}
            try:
                self._worker.make("checks", f"{__name__}:Checks", **where)
            except WorkerError:
                self.close()
                raise
        return self._worker.call("checks", method, *args, **limit)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def launched(self, provider: str) -> bool:
        """Whether a kernel is launched here, as far as that was asked for."""
        known = self._found.get(provider, ())
        return all(one.outcome.good for one in known if one.check == LAUNCHED)

    def findings(self, provider: str, names: Sequence[str]) -> list[Finding]:
        """Of a group of checks, behind what earlier groups found; beside a GPU of those that need
        no GPU."""
        if self.beside:
            names = [one for one in names if one in (*accuracy.PLAIN, *INTERPRETED, LAUNCHED)]
        before = self._found.setdefault(provider, [])
        new = self._findings(provider, list(names), before) if names else []
        before += new
        return new

    def _findings(self, provider: str, names: list[str], before: list[Finding]) -> list[Finding]:
        faults = accuracy.plain_faults(before)
        bounded = all(one.outcome.good for one in before if one.check == accuracy.BOUNDS)
        ended: dict[str, str] = {}
        ranks: dict[str, Rank] = {}
        while True:
            self.log.write_text("")
            try:
                asked = (provider, names, faults, bounded, ended)
                plain = self.call("findings", *asked, timeout=GROUP)
            except WorkerError as error:
                text, details, rank = self._said(error), error.details, _rank(error)
            else:
                every = [Finding.of(one) for one in plain]
                return [
                    replace(one, special=ranks[one.case])
                    if one.outcome is Outcome.CRASHED and one.case in ranks
                    else one
                    for one in every
                ]
            if rank is None:
                return [Finding(name, Outcome.BLOCKED, "", text, details) for name in names]
            self.close()
            cases = self.log.read_text(encoding="utf-8").splitlines()
            case = json.loads(cases[-1]) if cases else ""
            varied = set(names) & set(accuracy.ALL)
            if not varied or not case or case in ended or len(ended) + 1 == MOST_ENDED:
                crash = Finding(names[0], Outcome.CRASHED, case, text, details, special=rank)
                rest = f"not tried, since {len(ended) + 1} processes ended: {text}"
                blocked = [Finding(name, Outcome.BLOCKED, message=rest) for name in names[1:]]
                return [crash, *blocked]
            ended[case], ranks[case] = text, rank

    def judged_apart(self, provided: Provided, before: Sequence[Finding]) -> Finding:
        """A candidate's values, compared here."""
        provider, missing = provided.name, provided.missing
        plain = [one.outcome for one in before if one.check in accuracy.PLAIN]
        try:
            op_name = str(self.asked.op if self.asked.candidate else provided.op)
            known = discover(self.asked.package, plugins=False)
            if self.asked.file is not None and (provided.own or op_name not in known):
                reason = (
                    f"the candidate declares op {op_name!r}, so its process alone knows the "
                    "reference: use --candidate with an installed op"
                )
                return Finding(APART, Outcome.UNSUPPORTED, message=reason)
            if not all(one.good for one in plain):
                return Finding(APART, Outcome.BLOCKED, message="the plain cases fail already")
            cases = apart.cases_of(known[op_name])
            stated: apart.Traits = self.call("traits", provider)
        except WorkerError as error:
            return Finding(APART, Outcome.CRASHED, message=self._said(error), special=_rank(error))
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
                results: dict[str, apart.Stored] = self.call("answer", provider, inputs, folder)
                return results

            try:
                wrong = apart.compared(case, stated, ask, Path(folder))
            except WorkerError as error:
                self.close()
                crash = Finding(APART, Outcome.CRASHED, name, self._said(error), error.details)
                return replace(crash, special=_rank(error))
            except UNREADABLE as error:
                wrong = f"what it gave cannot be read: {type(error).__name__}: {error}"
        return Finding(APART, Outcome.FAILED, name, wrong) if wrong else None

    def _said(self, error: WorkerError) -> str:
        """How a process ended, with the author's line."""
        file = self.asked.file
        place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
        if _timed_out(error):
            return f"{place}no end after {self.asked.seconds} s"
        number = _signal(error)
        return f"{place}{error}{f' ({signal.Signals(number).name})' if number else ''}"


def _rank(error: WorkerError) -> Rank | None:
    """Of what ended a call of a worker: a signal, but for SIGKILL, by which the system takes memory
    back, or a lost GPU is unsafe; a process that ended otherwise gave no result. None for an error
    that was raised outside of the candidate."""
    if error.raised(GpuLostError) or _signal(error) not in (0, signal.SIGKILL):
        return Rank.UNSAFE
    if error.types:
        return None
    return Rank.REFUSED if _signal(error) else Rank.WRONG


def _signal(error: WorkerError) -> int:
    """The number of the signal that ended a worker; 0 if none did."""
    ended = re.search(r"ended with status -(\d+)$", str(error))
    return int(ended[1]) if ended else 0


def _timed_out(error: WorkerError) -> bool:
    return re.search(r"^Timeout \(", error.details, re.MULTILINE) is not None


def _unknown(option: str, name: str | None, known: Iterable[str]) -> str:
    return f"{option} {name!r:.80} does not exist: use one of {', '.join(known)}"
