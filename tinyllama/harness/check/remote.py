"""Checks in processes of their own: what ends one is a finding, and the rest goes on.

A process (`tinyllama.harness.check.process`) says which case it is about to try. Where it ends,
that case has a fault, and the checks go on with the next one in a new process. What it sends is
JSON, and never unpickled. On a GPU a second process interprets the kernels on the CPU, and makes
the checks of memory as well. The caller of `check` needs no torch.
"""

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinyllama.harness.check.finding import (
    Finding,
    GpuLostError,
    Outcome,
    Provided,
    Rank,
    merged,
)
from tinyllama.harness.check.names import APART, INTERPRETED, LAUNCHED, PLAIN
from tinyllama.harness.machine.worker import Worker, WorkerError, end_all

PACKAGE = "tinyllama.ops"  # the ops of the tree
GROUP = 24 * 3600.0  # seconds for all cases of a group of checks, each of which has its own limit
CASE_SECONDS = 300  # for one case; an endless loop of an interpreted kernel is seen long before
# One thread: tensors are small, and on a busy machine a second one only spins.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# A process that judges on the CPU sees no GPU, so that code which asks for one does as without it.
HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")


@dataclass(frozen=True)
class Request:
    """What is checked, with inputs from a seed: the providers that a file declares, of each op or
    of one, or those of an op of the tree or of a package; of these the one of a name.

    device: its name; None: the first GPU, else the CPU.
    candidate: ``FILE:function``, which is checked as a provider of the op, in place of its own.
    seconds: for one case.
    made_by: ``module:name`` of the class whose object makes the checks, as
        `tinyllama.harness.check.process.Checks`; options: more arguments of it.
    """

    file: str | None
    op: str | None
    provider: str | None
    device: str | None
    seed: int
    candidate: str | None = None
    seconds: int = CASE_SECONDS
    made_by: str = "tinyllama.harness.check.process:Checks"
    options: Mapping[str, Any] = field(default_factory=dict)


def check(
    request: Request, only: Sequence[str], progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Provided, Finding | None]]:
    """Each provider of a request, with None; then each with every finding of these checks, as soon
    as it is known.

    progress: gets what is tried now, what was seen, and how long that took. Raises WorkerError
    when the file cannot be loaded, or has no such op or provider.
    """
    first = [name for name in only if name == LAUNCHED]  # what is interpreted rests on it
    together = [name for name in only if name in PLAIN]
    alone = [[name] for name in only if name not in (*first, *together, APART)]
    last = [name for name in only if name == APART]
    groups = [*filter(None, [first, together]), *alone, *filter(None, [last])]
    runs: list[_Run] = []
    try:
        with tempfile.TemporaryDirectory(prefix="check-") as folder, ThreadPoolExecutor() as pool:
            env = {**ONE_THREAD, **HIDDEN} if request.device == "cpu" else ONE_THREAD
            runs.append(_Run(request, env, Path(folder) / "log"))
            try:
                device = runs[0].device()
                if device != "cpu":
                    env = {**ONE_THREAD, **HIDDEN, "TRITON_INTERPRET": "1"}
                    interpreting = replace(request, device="cpu")
                    runs.append(_Run(interpreting, env, Path(folder) / "log-interpreting", True))
                    runs[1].start()
                providers = runs[0].call("provided")
                if names := ", ".join(provided.name for provided in providers):
                    progress(f"{len(only)} checks of {names} on {device}")
                yield from ((provided, None) for provided in providers)
                for provided in providers:
                    for finding in _of_groups(runs, pool, provided, groups, progress):
                        yield provided, finding
            except BaseException:  # an interrupt, too: nothing need be answered any more
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
    count = sum(map(len, groups))
    for names in groups:
        number = len(earlier) + 1
        numbers = f"{number} to {number + len(names) - 1}" if names[1:] else f"{number}"
        label = f"{provided.name}: {numbers} of {count}: {', '.join(names)}"
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
        faults = [f for f in findings if f.rank]
        texts = [f"{f.check}: {f.verdict}" if names[1:] else f.verdict for f in faults]
        result = ", ".join(texts) or ("no fault" if tried else "not tried")
        progress(f"{label}: {result} ({time.monotonic() - began:.1f} s)")
        yield from findings


def _unless_told(finding: Finding, earlier: Sequence[Finding]) -> Finding:
    """An error that ended an earlier check, too, says nothing of this one."""
    crashes = (f for f in earlier if f.outcome is Outcome.CRASHED)
    first = next((crash for crash in crashes if crash.message == finding.message), None)
    if first is None or finding.outcome is not Outcome.CRASHED:
        return finding
    text = f"ended by the error of {first.check}: {finding.message}"
    return replace(finding, outcome=Outcome.BLOCKED, special=None, message=text)


class _Run:
    """A worker, and another one after each that ended; it starts when it is called.

    env: variables of its environment. log: a file that names the case that it tries. interprets:
    whether it interprets kernels for another one on a GPU.
    """

    def __init__(
        self, request: Request, env: Mapping[str, str], log: Path, interprets: bool = False
    ) -> None:
        self.request, self.env, self.log, self.interprets = request, env, log, interprets
        self._findings: dict[str, list[Finding]] = {}
        self._worker: Worker | None = None
        self._loaded = False

    def start(self) -> Worker:
        """A process, which imports what it needs while nobody waits."""
        if self._worker is None:
            preload = [self.request.made_by.partition(":")[0]]
            self._worker = Worker("check", preload=preload, env=self.env, own_caches=False)
        return self._worker

    def device(self) -> str:
        """The name of the device that the request means. Raises WorkerError for one that is not
        there."""
        usable = "tinyllama.harness.machine.device:usable_device"
        self.start().make("device", usable, device=self.request.device)
        return str(self.start().call("device", "__str__"))

    def call(self, method: str, *args: Any, **limit: float) -> Any:
        """What a method of the worker's `Checks` returns. Raises WorkerError, also where the file
        cannot be loaded."""
        worker = self.start()
        if not self._loaded:
            options = {"log": str(self.log), "request": self.request, **self.request.options}
            try:
                worker.make("checks", self.request.made_by, **options)
            except WorkerError:
                self.close()
                raise
            self._loaded = True
        return worker.call("checks", method, *args, **limit)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker, self._loaded = None, False

    def launched(self, provider: str) -> bool:
        """Whether a kernel is launched here, as far as that was checked."""
        findings = self._findings.get(provider, ())
        return all(finding.outcome.good for finding in findings if finding.check == LAUNCHED)

    def findings(self, provider: str, names: Sequence[str]) -> list[Finding]:
        """Of a group of checks, after those of earlier groups; beside a GPU of those that need no
        GPU."""
        if self.interprets:
            names = [n for n in names if n in (*PLAIN, *INTERPRETED, LAUNCHED)]
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
        if not all(f.outcome.good for f in earlier if f.check in PLAIN):
            return Finding(APART, Outcome.BLOCKED, message="the plain cases fail already")
        from tinyllama.harness.check import independent_judge
        from tinyllama.harness.declare.registry import discover

        op = discover(PACKAGE, plugins=False)[str(self.request.op)]
        case_name, cases = "", independent_judge.cases_of(op)
        try:
            for number, case in enumerate(cases):
                case_name = str(case).replace(f"{op.name}-eager", provided.name, 1)

                def ask(seed: int, file: Path, number: int = number) -> None:
                    self.call("answer", provided.name, number, seed, str(file))

                if text := independent_judge.faults(case, ask):
                    return Finding(APART, Outcome.FAILED, case_name, text)
        except WorkerError as error:
            self.close()
            text, rank = self._text(error), _rank(error)
            return Finding(APART, Outcome.CRASHED, case_name, text, error.details, special=rank)
        text = f"{len(cases)} cases, inputs from a secret seed"
        return Finding(APART, Outcome.PASSED, message=text)

    def _text(self, error: WorkerError) -> str:
        """How a process ended, with the author's line."""
        file = self.request.file
        place = "" if file is None else place_in(error.details, str(Path(file).resolve()))
        if re.search(r"^Timeout \(", error.details, re.MULTILINE):
            return f"{place}no end after {self.request.seconds} s"
        number = _signal(error)
        return f"{place}{error}{f' ({signal.Signals(number).name})' if number else ''}"


def place_in(details: str, file: str) -> str:
    """``FILE:LINE: `` of the innermost line of a file in the traceback of a process that ended."""
    fatal = "(most recent call first)" in details
    lines = re.findall(rf'^ *File "{re.escape(file)}", line (\d+)', details, re.MULTILINE)
    return f"{file}:{lines[0 if fatal else -1]}: " if lines else ""


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
