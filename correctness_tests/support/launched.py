"""The kernels that the providers of this tree launch, for what must hold of each."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

import torch

from tinyllama.harness import Op, Provider
from tinyllama.harness.correct.launched import WHOLLY, Planned, launches_of, plan, with_kernels
from tinyllama.harness.kernels.launch import Launch
from tinyllama.ops import OPS


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


def chosen_kernels() -> set[str]:
    """The identities of the kernels that a chip's table alone chooses: in 16 bits, in the largest
    case that is timed."""
    found = {
        launch.identity
        for op, provider in providers()
        if torch.bfloat16 in provider.dtypes and provider.supports(op.timed[-1].dims) is None
        for chip in WHOLLY
        for launch in launches_of(op, provider, op.timed[-1], torch.bfloat16, chip=chip)
    }
    return found - large_kernels() - small_kernels()


def small_kernels() -> set[str]:
    return {f"{op.name}.{name}" for op in OPS.values() for name in op.small_kernels}


@functools.cache
def planned(*, only_quick: bool) -> dict[str, Planned]:
    """Every distinct compilation of this tree's kernels by its key; only_quick: of `make test`."""
    return plan(OPS.values(), only_quick=only_quick)
