"""A process that makes the checks: it imports the candidate, and runs what is asked for."""

import contextlib
import faulthandler
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tinyllama.harness.check import independent_judge
from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.finding import Finding, Provided
from tinyllama.harness.check.launched import kernel_launched
from tinyllama.harness.check.names import LAUNCHED
from tinyllama.harness.check.remote import PACKAGE, Request
from tinyllama.harness.check.run import run
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, discover, load_file
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.device import usable_device
from tinyllama.harness.machine.errors import UsageError

RESERVE = 2**30  # bytes of memory that are left to other processes


class Checks:
    """The providers of a request, and the checks on them.

    log: a file to which each case is written before it is tried.
    Raises UsageError for a name that is not declared, and for an op whose ``fits`` raises.
    """

    def __init__(self, log: str, request: Request) -> None:
        self.request, self.log = request, Path(log)
        self._device = usable_device(request.device)
        if self._device.type == "cpu":
            limit_memory()
        self.candidates = {str(c.provider): c for c in self._candidates()}

    def _candidates(self) -> list[Candidate]:
        """What is checked, the reference last: it is seldom wrong, and some checks take long
        on it."""
        request = self.request
        ops, module = self.ops()
        candidates = [
            Candidate(op, provider, self._device, request.seed, announce=self.announce)
            for op in ops
            for provider in sorted(op.providers.values(), key=lambda p: p.name == "eager")
            if module in ("", provider.module)
        ]
        names = dict.fromkeys(candidate.provider.name for candidate in candidates)
        if names and request.provider is not None:
            _check_known("--provider", request.provider, names)
            candidates = [c for c in candidates if c.provider.name == request.provider]
        for candidate in candidates:
            _check_fits(candidate.op)
        return candidates

    def ops(self) -> tuple[list[Op], str]:
        """The ops, and the module that declares the providers that are checked; "": all of them."""
        request, module = self.request, ""
        if request.file is None:
            ops = list(discover(PACKAGE).values())
        else:
            with self.loading(request.file):
                registry = Registry()
                module = load_file(request.file, registry).__name__
            ops = [*registry.values(), *_elsewhere(module, registry)]
        if request.op is None:
            return ops, module
        _check_known("--op", request.op, [op.name for op in ops])
        ops = [op for op in ops if op.name == request.op]
        if request.candidate is not None:
            with self.loading(request.candidate.rpartition(":")[0]):
                module = _register(request.candidate, ops[0])
        return ops, module

    @contextlib.contextmanager
    def loading(self, file: str) -> Iterator[None]:
        """The file may import its neighbours. On a CPU, code that asks for a GPU where it is
        imported or called is answered."""
        sys.path.append(str(Path(file).resolve().parent))
        with foreign() if self._device.type == "cpu" else contextlib.nullcontext():
            yield

    def announce(self, case: OpCase) -> None:
        """Note a case, which has so much time from now on."""
        self.log.write_text(str(case), encoding="utf-8")
        faulthandler.dump_traceback_later(self.request.seconds, exit=True)

    def device(self) -> str:
        """The name of the device that was chosen."""
        return str(self._device)

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
        """The findings of these checks, which follow earlier ones."""
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


def _check_fits(op: Op) -> None:
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
        # isinstance would ask an object of torch that warns of its class.
        for op in [value for value in vars(loaded).values() if issubclass(type(value), Op)]:
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
