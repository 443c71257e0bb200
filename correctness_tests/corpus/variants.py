"""What a variant of the corpus is, how it is loaded, and whether a finding is of its fault."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.check.finding import Provided, fails
from tinyllama.harness.check.run import CHECKS, Candidate, Finding, Rank, run
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.kernels.foreign import foreign, gpus_hidden
from tinyllama.ops import OPS

FOLDER = Path(__file__).parent / "ops"
MARKER = "\n# variants\n"
RANKS = {
    "wrong": Rank.WRONG,
    "unsafe": Rank.UNSAFE,
    "refused": Rank.REFUSED,
    "warning": Rank.WARNING,
}

# The classes of faults, each with the checks that are about it, the quickest first. Checks may be
# renamed and merged: this is the one place that knows them.
CLASSES = {
    "tail": (
        *("outputs", "gradients", "untouched inputs", "out of bounds", "unwritten memory"),
        *("fresh contents", "sizes", "special values"),
    ),
    "layout": ("input layouts", "gradient layouts", "fresh contents", "sizes", "backward twice"),
    "gradient missing": (
        *("gradients", "absent gradients", "wanted gradients", "scaled upstream"),
        *("second derivative", "backward twice"),
    ),
    "accumulation": ("outputs", "gradients", "extreme values", "special values", "sizes"),
    "overflow": (
        *("outputs", "extreme values", "scaled upstream", "special values", "gradient layouts"),
        "sizes",
    ),
    "race": ("outputs", "gradients", "races", "program order", "determinism"),
    "order": ("outputs", "program order", "races", "determinism"),
    "stale state": (
        *("fresh contents", "backward twice", "determinism", "unwritten memory"),
        "special values",
    ),
    "aliasing": (
        *("untouched inputs", "fresh contents", "backward twice"),
        "special values",
    ),
    "out of bounds": ("out of bounds", "untouched inputs", "sizes"),
    "offset": ("large offsets", "sizes"),
    "configuration": ("outputs", "configurations", "resources"),
    "framework": (
        *("autocast", "fresh contents", "second derivative", "compiled", "backward twice"),
        *("captured", "side stream"),
    ),
    "empty": ("outputs", "empty batch", "special values", "sizes"),
    "constant": ("outputs", "gradients", "scaled upstream", "special values", "sizes"),
}


class EditError(ValueError):
    """An edit that does not fit its file."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A file of the corpus with some edits, and the truth about it.

    path: the file; name: of the variant, "" for the file as it is. edits: (old, new) texts; each
        old text stands in the file exactly once. fault: its class, one of `CLASSES`; "" if the
        variant is right. result: a text in the message of the finding, such as "grad x". rank: how
        much the fault matters, one of `RANKS`. eager: the provider ``eager`` is judged, not the
        kernel. as_reference: used as the op's reference, it is contradicted by independent code.
    open: what today's checks say, where that is wrong. slow: why `make test` leaves it out. gpu:
        why it needs a GPU.
    """

    name: str
    edits: Sequence[tuple[str, str]] = ()
    fault: str = ""
    result: str = ""
    rank: str = ""
    eager: bool = False
    open: str = ""
    slow: str = ""
    gpu: str = ""
    as_reference: bool = False
    path: Path = Path()

    def __str__(self) -> str:
        return f"{self.path.stem}-{self.name}".rstrip("-")

    def text(self) -> str:
        """The file's text above its variants, with the edits.

        Raises EditError for an old text that the file has not exactly once.
        """
        text = self.path.read_text(encoding="utf-8").partition(MARKER)[0] + "\n"
        for old, new in self.edits:
            if (times := text.count(old)) != 1:
                raise EditError(f"{self}: {self.path.name} has {old!r} {times} times: fix the edit")
            text = text.replace(old, new)
        return text

    def write(self, folder: Path) -> Path:
        """Write the text to a file of its own in a folder: Triton reads a kernel's source."""
        path = folder / f"{self}.py".replace(" ", "_").replace("-", "_")
        path.write_text(self.text(), encoding="utf-8")
        return path


def right(name: str = "", *edits: tuple[str, str], **truth: Any) -> Variant:
    """A variant that no check may accuse."""
    return Variant(name=name, edits=edits, **truth)


def wrong(
    name: str, *edits: tuple[str, str], fault: str, rank: str = "wrong", **truth: Any
) -> Variant:
    """A variant with one fault. Raises ValueError for an unknown class or rank, or no edit."""
    if fault not in CLASSES or rank not in RANKS or not edits:
        raise ValueError(
            f"{name}: fault {fault!r}, rank {rank!r}, {len(edits)} edits: use one of "
            f"{', '.join(CLASSES)}; one of {', '.join(RANKS)}; and an edit"
        )
    return Variant(name=name, edits=edits, fault=fault, rank=rank, **truth)


def variants() -> list[Variant]:
    """Every variant of every file, in the order of names."""
    return [each for path in sorted(FOLDER.glob("*.py")) for each in variants_of(path)]


def variants_of(path: Path) -> list[Variant]:
    """The variants that a file lists. Only what stands below its marker is executed."""
    above, marker, below = path.read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise ValueError(f"{path} has no line {MARKER.strip()!r}: list its variants below one")
    names: dict[str, Any] = {}
    exec(compile("\n" * (above + marker).count("\n") + below, str(path), "exec"), names)
    return [replace(each, path=path) for each in names["VARIANTS"]]


class Loaded:
    """A variant that is imported from a file of its own in a folder; a context manager."""

    def __init__(self, variant: Variant, folder: Path, device: str = "cpu") -> None:
        self.variant, self.folder, self.device = variant, folder, torch.device(device)

    def __enter__(self) -> Candidate:
        """The judged provider: of the only op with a provider that the file declares, this one.

        Raises ValueError where the file declares no such provider, or several.
        """
        with ExitStack() as stack:
            stack.enter_context(providers_restored(OPS.values()))
            registry, before = (
                Registry(),
                {id(p) for op in OPS.values() for p in op.providers.values()},
            )
            for op in OPS.values():
                registry.add(op)
            if self.device.type == "cpu":
                stack.enter_context(gpus_hidden())
            stack.enter_context(foreign())
            load_file(self.variant.write(self.folder), registry)
            declared = [
                Candidate(op, provider, self.device)
                for op in registry.values()
                for provider in op.providers.values()
                if id(provider) not in before and self._is_judged(op, provider)
            ]
            if len(declared) != 1:
                names = [str(candidate.provider) for candidate in declared]
                raise ValueError(f"{self.variant} declares {names}: declare one provider to judge")
            self._stack = stack.pop_all()
            return declared[0]

    def _is_judged(self, op: Op, provider: Provider) -> bool:
        if self.variant.eager:
            return provider.name == "eager"
        return provider.name not in ("eager", "torch")

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def findings(candidate: Candidate, checks: Sequence[str]) -> Iterator[Finding]:
    """The finding of each check, in the order given. A later check works around the faults of plain
    cases that earlier ones found, and does not tell an access out of bounds again."""
    before: list[Finding] = []
    for check in checks:
        for finding in run(candidate, (check,), before):
            before.append(finding)
            yield finding


def accuses(candidate: Candidate, finding: Finding) -> bool:
    """Whether a finding ends `tinyllama check` with status 1."""
    plain = tuple(map(str, candidate.plain_cases())) if finding.rank is Rank.REFUSED else ()
    return fails(finding, Provided(str(candidate.provider), False, plain))


def finds(variant: Variant, candidate: Candidate, finding: Finding) -> bool:
    """Whether a finding is the fault of a wrong variant: its message has the result, and its rank
    is right. A warning is found by advice alone, a refusal also by an accusation."""
    if variant.result not in finding.message:
        return False
    if variant.rank == "warning":
        return finding.rank is Rank.WARNING
    return accuses(candidate, finding) or finding.rank is RANKS[variant.rank]


def checks_for(variant: Variant) -> list[str]:
    """Those about the class of its fault first, then all others."""
    return list(dict.fromkeys((*CLASSES.get(variant.fault, ()), *CHECKS)))
