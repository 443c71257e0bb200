"""The kernels that the providers of this tree launch, for what must hold of each."""

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from correctness_tests.support import limits
from tinyllama.harness import Case, Op, Provider
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.launched import launches_of, with_kernels
from tinyllama.harness.kernels.launch import HAS_TRITON, Launch
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking
from tinyllama.ops import OPS

MODES = {
    "fp32": (torch.float32, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp16": (torch.float16, "ieee"),
}
WHOLLY = ("gfx942", "sm_90")  # chips for which more than the largest case is compiled


@dataclass(frozen=True)
class Planned:
    """One compilation, and the first case that asks for it; or what kept it from being known.

    quick: it is compiled by `make test` already."""

    where: str
    quick: bool
    compilation: Compilation | None = None
    error: Exception | None = None


def cases_of(op: Op, chip: str, mode: str) -> Iterator[tuple[Case, bool]]:
    """The cases that are compiled for a chip, and whether `make test` compiles them already."""
    for case in op.timed:
        yield case, chip in WHOLLY and mode == "bf16" and case is op.timed[-1]
    if chip in WHOLLY:
        for case in op.cases:
            yield case, False


def plan_of(
    provider: Provider, op: Op, chips: list[str], *, only_quick: bool = False
) -> Iterator[Planned]:
    for chip in chips:
        for mode, (dtype, precision) in MODES.items():
            for case, quick in cases_of(op, chip, mode):
                covered = OpCase(op, provider, case, dtype).unsupported() is None
                if covered and (quick or not only_quick):
                    where = f"{provider}-{case}-{mode}-{chip}"
                    try:
                        launches = launches_of(
                            op, provider, case, dtype, chip=chip, precision=precision
                        )
                        for launch in launches:
                            compiled = compilation(launch, chip)
                            # A kernel of another op is compiled with that one.
                            of_this_op = compiled.kernel.startswith(f"{op.name}.")
                            yield Planned(
                                f"{where}-{compiled.kernel}", quick and of_this_op, compiled
                            )
                    except Exception as error:  # the test of this case raises it
                        yield Planned(where, quick, error=error)


def plan(
    ops: Iterable[Op], chips: Iterable[str] = CHIPS, *, only_quick: bool = False
) -> dict[str, Planned]:
    """Every distinct compilation by its key; those of `make test` first. only_quick: no others."""
    able = [chip for chip in chips if not lacking(chip)]
    pairs = [
        planned
        for op, provider in with_kernels(ops)
        for planned in plan_of(provider, op, able, only_quick=only_quick)
    ]
    distinct: dict[str, Planned] = {}
    for planned in sorted(pairs, key=lambda planned: not planned.quick):
        key = planned.compilation.key if planned.compilation else planned.where
        distinct.setdefault(key, planned)
    return distinct


def tree_ops() -> list[Op]:
    """The ops of this tree, without those of ``--ops`` files and installed packages."""
    return [op for op in OPS.values() if op.module.startswith("tinyllama.ops.")]


def providers() -> Iterator[tuple[Op, Provider]]:
    """Those of this tree that launch kernels of their own op."""
    for op, provider in with_kernels(tree_ops()):
        if not provider.borrows:
            yield op, provider


def every_launch(ops: Collection[str] | None = None) -> Iterator[Launch]:
    """Of every case that is declared, in every dtype; ops: of these alone, by name."""
    for op, provider in providers():
        if ops is not None and op.name not in ops:
            continue
        for case in op.cases:
            if provider.supports(case.dims) is None:
                for dtype in provider.dtypes:
                    yield from launches_of(op, provider, case, dtype)


def large_kernels() -> set[str]:
    """The identities of the kernels that may see a tensor of more than 2^31 elements."""
    return {launch.identity for launch in every_launch()} - small_kernels()


def small_kernels() -> set[str]:
    return {f"{op.name}.{name}" for op in OPS.values() for name in op.small_kernels}


@functools.cache
def planned(*, only_quick: bool) -> dict[str, Planned]:
    """Every distinct compilation of this tree's kernels by its key; only_quick: of `make test`."""
    return plan(OPS.values(), only_quick=only_quick)


MINOR = limits.triton_minor() if HAS_TRITON else ""
LIMITS = {op.name: limits.of_op(op.name, op.folder) for op in OPS.values()}
KNOWN = [entry for declared in LIMITS.values() for entry in declared.of(MINOR)]
