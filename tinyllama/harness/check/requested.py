"""The providers that a command names, loaded in the process that is to check them."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tinyllama.harness.check.finding import Candidate
from tinyllama.harness.declare.op import Op
from tinyllama.harness.declare.registry import Registry, discover, load_about, load_file
from tinyllama.harness.kernels.foreign import foreign
from tinyllama.harness.kernels.launch import HAS_TRITON
from tinyllama.harness.machine.errors import UsageError

SECONDS = 300  # for one case; an endless loop of an interpreted kernel is seen long before


@dataclass(frozen=True)
class Request:
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
        registry, module = discover(self.package), ""
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
