"""Checks in processes of their own: what ends one is a finding, and the rest goes on.

A process says which case it is about to try. Where it ends, that case has a fault, and the checks
go on with the next one in a new process. What it sends is JSON, and never unpickled. On a GPU a
second process interprets the kernels on the CPU, and makes the checks of memory as well.
"""

import contextlib
import faulthandler
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

from tinyllama.harness.check import accuracy, independent_judge
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.crash import GpuLostError, place_in
from tinyllama.harness.check.finding import Candidate, Provided, merged
from tinyllama.harness.check.launched import kernel_launched
from tinyllama.harness.check.names import APART, INTERPRETED, LAUNCHED
from tinyllama.harness.check.run import Finding, Outcome, Rank, run
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, discover, load_about, load_file
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.worker import Worker, WorkerError, end_all

PACKAGE = "tinyllama.ops"  # the ops of the tree, on which a file may register providers
GROUP = 24 * 3600.0  # seconds for all cases of a group of checks, each of which has its own limit
RESERVE = 2**30  # bytes of memory that are left to other processes


# -- what is asked for -----------------------------------------------------------------------------

CASE_SECONDS = 300  # for one case; an endless loop of an interpreted kernel is seen long before


@dataclass(frozen=True)
class Request:
    """What is checked, on a device, with inputs from a seed: the providers that a file declares, of
    each op or of one, or those of an op of the tree or of a package; of these the one of a name.

    candidate: ``FILE:function``, which is checked as a provider of the op, in the place of its own.
    seconds: for one case. declaration: a file that declares the op instead, about functions of
    ``file``.
    """

    file: str | None
    op: str | None
    provider: str | None
    device: str
    seed: int
    candidate: str | None = None
    seconds: int = CASE_SECONDS
    declaration: str | None = None

    def candidates(self) -> list[Candidate]:
        """What is checked, the reference last: it is seldom wrong, and some checks take long on it.

        Raises UsageError for a name that is not declared, and for an op whose ``fits`` raises.
        """
        ops, module = self._ops()
        candidates = [
            Candidate(op, provider, torch.device(self.device), self.seed)
            for op in ops
            for provider in sorted(op.providers.values(), key=lambda p: p.name == "eager")
            if module in ("", provider.module)
        ]
        names = dict.fromkeys(candidate.provider.name for candidate in candidates)
        if names and self.provider is not None:
            _check_known("--provider", self.provider, names)
            candidates = [c for c in candidates if c.provider.name == self.provider]
        for candidate in candidates:
            check_fits(candidate.op)
        return candidates

    def _ops(self) -> tuple[list[Op], str]:
        """The ops, and the module that declares the providers; "" for all of these."""
        registry, module = discover(PACKAGE), ""
        ops = list(registry.values())
        if self.file is not None:
            with self._loading(self.file):
                if self.declaration is None:
                    module = load_file(self.file, registry).__name__
                else:
                    module = load_about(self.declaration, self.file, registry).__name__
            ops = [*registry.values(), *_elsewhere(module, registry)]
        if self.op is None:
            return ops, module
        _check_known("--op", self.op, [op.name for op in ops])
        ops = [op for op in ops if op.name == self.op]
        if self.candidate is not None:
            with self._loading(self.candidate.rpartition(":")[0]):
                module = _register(self.candidate, ops[0])
        return ops, module

    @contextlib.contextmanager
    def _loading(self, file: str) -> Iterator[None]:
        """The file may import its neighbours. On a CPU, code that asks for a GPU where it is
        imported or called is answered."""
        sys.path.append(str(Path(file).resolve().parent))
        with foreign() if self.device == "cpu" else contextlib.nullcontext():
            yield


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


def _elsewhere(module: str, registry: Mapping[str, Op]) -> Iterator[Op]:
    """Ops that are declared in other files or packages, on which a module registered providers."""
    listed = {id(op) for op in registry.values()}
    for loaded in list(sys.modules.values()):
        for op in [value for value in vars(loaded).values() if isinstance(value, Op)]:
            registers = any(provider.module == module for provider in op.providers.values())
            if registers and id(op) not in listed:
                listed.add(id(op))
                yield op


def _register(candidate: str, op: Op) -> str:
    """Make ``FILE:function`` a provider of an op, of the module that is returned.

    Raises UsageError for a function that is not there, DeclarationError for one that takes other
    arguments.
    """
    file, _, name = candidate.rpartition(":")
    function = getattr(load_file(file, Registry()), name, None)
    if not callable(function):
        raise UsageError(f"--candidate {candidate!r}: {file} has no function {name!r}")
    op.provider("candidate", requires=("triton",) if HAS_TRITON else ())(function)
    return op.providers["candidate"].module


def _check_known(option: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise UsageError(f"{option} {name!r:.80} does not exist: use one of {', '.join(names)}")


# -- in a process that makes the checks -----------------------------------------------------------


class Checks:
    """The providers of a request, and the checks on them.

    log: a file to which each case is written before it is tried.
    """

    def __init__(self, log: str, **request: Any) -> None:
        self.request, self.log = Request(**request), Path(log)
        if self.request.device == "cpu":
            limit_memory()
        self.candidates = {
            str(candidate.provider): replace(candidate, announce=self.announce)
            for candidate in self.request.candidates()
        }

    def announce(self, case: OpCase) -> None:
        """Note a case, which has so much time from now on."""
        self.log.write_text(str(case), encoding="utf-8")
        faulthandler.dump_traceback_later(self.request.seconds, exit=True)

    def provided(self) -> list[Provided]:
        """The providers that are checked."""
        from_file = self.request.file is not None
        return [
            Provided(
                name,
                from_file and candidate.op.module == candidate.provider.module,
                tuple(map(str, candidate.plain_cases())),
                candidate.missing(),
            )
            for name, candidate in self.candidates.items()
        ]

    def findings(self, provider: str, only: list[str], earlier: list[Finding]) -> list[Finding]:
        candidate = self.candidates[provider]
        try:
            if only == [LAUNCHED]:
                declares = self.request.candidate is None
                return [kernel_launched(candidate, declares)]
            return list(run(candidate, only, earlier))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def answer(self, provider: str, number: int, seed: int, file: str) -> None:
        """Write the results of a case to a file."""
        faulthandler.dump_traceback_later(self.request.seconds, exit=True)
        try:
            independent_judge.answer(self.candidates[provider], number, seed, Path(file))
        finally:
            faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """Let an allocation fail that the machine has no memory for, before the system ends this
    process, or another one; on Linux."""
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return
    import resource

    (available,) = re.findall(r"^MemAvailable: +(\d+) kB", facts.read_text(), re.MULTILINE)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max(int(available) * 1024 - RESERVE, RESERVE)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


# -- in the process that judges -------------------------------------------------------------------


def processes(device: str) -> dict[str, dict[str, str]]:
    """The processes that check on a device: where each one runs, and with which variables.

    One that judges on the CPU sees no GPU, so that code which asks for one does as without it. It
    has one thread: tensors are small, and on a busy machine a second one only spins.
    """
    gpus = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hidden = {**dict.fromkeys(gpus, ""), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        return {"cpu": hidden}
    return {device: {}, "cpu": {**hidden, "TRITON_INTERPRET": "1"}}


def check(
    request: Request, only: Sequence[str], progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Provided, Finding | None]]:
    """Each provider of a request, with None; then each with every finding of these checks, as soon
    as it is known.

    progress: gets what is tried now, what was seen, and how long that took. Raises WorkerError
    when the file cannot be loaded, or has no such op or provider.
    """
    first = [name for name in only if name == LAUNCHED]  # what is interpreted rests on it
    together = [name for name in only if name in accuracy.PLAIN]
    alone = [[name] for name in only if name not in (*first, *together, APART)]
    last = [name for name in only if name == APART]
    groups = [*filter(None, [first, together]), *alone, *filter(None, [last])]
    runs: list[_Run] = []
    try:
        with tempfile.TemporaryDirectory(prefix="check-") as folder, ThreadPoolExecutor() as pool:
            starts = processes(request.device).items()
            runs += [_Run(request, *start, Path(folder)) for start in starts]
            try:
                providers = runs[0].call("provided")
                if names := ", ".join(provided.name for provided in providers):
                    text = f"{len(only)} checks of {names} on {request.device}: {', '.join(only)}"
                    progress(text)
                yield from ((provided, None) for provided in providers)
                for provided in providers:
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
    earlier: list[Finding] = []
    for number, names in enumerate(groups, 1):
        label = " to ".join(dict.fromkeys((names[0], names[-1])))
        label = f"{provided.name}: {number} of {len(groups)}: {label}"
        progress(label)
        began = time.monotonic()
        if names == [APART]:
            findings = [runs[0].judged_apart(provided, earlier)]
        else:
            answers = [pool.submit(run.findings, provided.name, names) for run in runs]
            findings, *interpreted = [answer.result() for answer in answers]
            if interpreted:
                by_check = {f.check: f for f in interpreted[0] if f.check in INTERPRETED}
                launched = runs[-1].launched(provided.name)
                findings = [merged(f, by_check.get(f.check), launched) for f in findings]
            findings = [_unless_told(finding, earlier) for finding in findings]
        earlier += findings
        tried = any(finding.outcome is not Outcome.BLOCKED for finding in findings)
        faults = [f"{finding.check}: {finding.rank.value}" for finding in findings if finding.rank]
        result = "; ".join(faults) or ("no fault" if tried else "not tried")
        progress(f"{label}: {result} ({time.monotonic() - began:.1f} s)")
        yield from findings


def _unless_told(finding: Finding, earlier: Sequence[Finding]) -> Finding:
    """An error that ended an earlier check, too, is told once."""
    crashes = (f for f in earlier if f.outcome is Outcome.CRASHED)
    first = next((crash for crash in crashes if crash.message == finding.message), None)
    if first is None or finding.outcome is not Outcome.CRASHED:
        return finding
    text = f"ended by the error of {first.check}: {finding.message}"
    return replace(finding, outcome=Outcome.BLOCKED, special=None, message=text)


class _Run:
    """A worker on one device, and another one after each that ended; it starts when it is called.

    env: variables of its environment. interprets: whether it interprets for another one on a GPU.
    """

    def __init__(self, request: Request, device: str, env: Mapping[str, str], folder: Path) -> None:
        self.request, self.env = replace(request, device=device), env
        self.interprets = device != request.device
        self.log = folder / device.replace(":", "-")
        self._findings: dict[str, list[Finding]] = {}
        self._worker: Worker | None = None

    def call(self, method: str, *args: Any, **limit: float) -> Any:
        """What a method of the worker's `Checks` returns. Raises WorkerError, also where the file
        cannot be loaded."""
        if self._worker is None:
            self._worker = Worker("check", preload=[PACKAGE], env=self.env)
            request = {"log": str(self.log), **asdict(self.request)}
            try:
                self._worker.make("checks", f"{__name__}:Checks", **request)
            except WorkerError:
                self.close()
                raise
        return self._worker.call("checks", method, *args, **limit)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def launched(self, provider: str) -> bool:
        """Whether a kernel is launched here, as far as that was checked."""
        findings = self._findings.get(provider, ())
        return all(finding.outcome.good for finding in findings if finding.check == LAUNCHED)

    def findings(self, provider: str, names: Sequence[str]) -> list[Finding]:
        """Of a group of checks, after those of earlier groups; beside a GPU of those that need no
        GPU."""
        if self.interprets:
            names = [n for n in names if n in (*accuracy.PLAIN, *INTERPRETED, LAUNCHED)]
        earlier = self._findings.setdefault(provider, [])
        findings = self._of_group(provider, list(names), earlier) if names else []
        earlier += findings
        return findings

    def _of_group(self, provider: str, names: list[str], earlier: list[Finding]) -> list[Finding]:
        self.log.write_text("")
        try:
            call = "findings", provider, names, earlier
            findings: list[Finding] = self.call(*call, timeout=GROUP)
            return findings
        except WorkerError as error:
            text, details, rank = self._text(error), error.details, _rank(error)
        if rank is None:
            return [Finding(name, Outcome.BLOCKED, "", text, details) for name in names]
        self.close()
        case = self.log.read_text(encoding="utf-8")
        crash = Finding(names[0], Outcome.CRASHED, case, text, details, special=rank)
        rest = f"not tried, since the process ended: {text}"
        return [crash, *(Finding(name, Outcome.BLOCKED, message=rest) for name in names[1:])]

    def judged_apart(self, provided: Provided, earlier: Sequence[Finding]) -> Finding:
        """A candidate's values, compared here."""
        if self.request.candidate is None or provided.missing:
            text = (
                "use --candidate with an installed op: else its process alone knows the reference"
            )
            return Finding(APART, Outcome.UNSUPPORTED, message=provided.missing or text)
        if not all(f.outcome.good for f in earlier if f.check in accuracy.PLAIN):
            return Finding(APART, Outcome.BLOCKED, message="the plain cases fail already")
        op = discover(PACKAGE, plugins=False)[str(self.request.op)]
        case_name, cases = "", independent_judge.cases_of(op)
        try:
            for number, case in enumerate(cases):
                case_name = str(case).replace(f"{op.name}-eager", provided.name, 1)
                if text := self._faults_apart(provided.name, number, case):
                    return Finding(APART, Outcome.FAILED, case_name, text)
        except WorkerError as error:
            self.close()
            text, rank = self._text(error), _rank(error)
            return Finding(APART, Outcome.CRASHED, case_name, text, error.details, special=rank)
        text = f"{len(cases)} cases, inputs from a secret seed"
        return Finding(APART, Outcome.PASSED, message=text)

    def _faults_apart(self, provider: str, number: int, case: OpCase) -> str:
        """What is wrong in a case; empty where nothing is. Raises WorkerError."""

        def ask(seed: int, file: Path) -> None:
            self.call("answer", provider, number, seed, str(file))

        with tempfile.TemporaryDirectory(prefix="judged-") as folder:
            try:
                return independent_judge.faults(case, ask, Path(folder) / "results")
            except WorkerError:
                raise
            except Exception as error:  # the answer may be any
                return f"its results cannot be read: {type(error).__name__}: {error}"

    def _text(self, error: WorkerError) -> str:
        """How a process ended, with the author's line."""
        file = self.request.file
        place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
        if re.search(r"^Timeout \(", error.details, re.MULTILINE):
            return f"{place}no end after {self.request.seconds} s"
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
