"""The kernels that the providers of this tree launch, for what must hold of each."""

from collections.abc import Collection, Iterator

from tinyllama.harness import Op, Provider
from tinyllama.harness.check.launched import launches_of, with_kernels
from tinyllama.harness.kernels.launch import Launch
from tinyllama.ops import OPS

WHOLLY = ("gfx942", "sm_90")  # chips for which more than the largest case is compiled


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
