"""The kernels that the providers of this tree launch, by name, for what must hold of each."""

from __future__ import annotations

from collections.abc import Iterator

from tinyllama.harness import Op, Provider
from tinyllama.harness.kernels.launch import Launch
from tinyllama.harness.kernels.resources import launches_of
from tinyllama.ops import OPS

# Those that see no large tensor, however large the inputs of their op are.
NEVER_LARGE = {
    "rms_norm_kernels.sum_kernel": "reads one row for each program of a backward pass",
    "adamw._advance": "writes three numbers",
}
# Those that launch another op's kernels only, where a chip's table chooses so.
BORROWED = {"linear-triton": "transposes operands by the kernel of `transpose`"}


def name_of(launch: Launch) -> str:
    """File and function."""
    function = launch.kernel.fn
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def providers() -> Iterator[tuple[Op, Provider]]:
    for op in OPS.values():
        for provider in op.providers.values():
            ours = op.module.startswith("tinyllama.ops.") and str(provider) not in BORROWED
            if ours and "triton" in provider.requires:
                yield op, provider


def every_launch() -> Iterator[Launch]:
    """Of every case that is declared, in every dtype."""
    for op, provider in providers():
        for case in op.cases:
            if provider.supports(case.dims) is None:
                for dtype in provider.dtypes:
                    yield from launches_of(op, provider, case, dtype)


def kernels() -> set[str]:
    """By name."""
    return {name_of(launch) for launch in every_launch()}
