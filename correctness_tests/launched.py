"""The kernels that the providers of this tree launch, by name, for what must hold of each."""

from __future__ import annotations

from collections.abc import Iterator

from tinyllama.harness import Op, Provider
from tinyllama.harness.kernels import Launch
from tinyllama.harness.resources import launches_of
from tinyllama.ops import OPS

# Those that see no large tensor, however large the inputs of their op are.
NEVER_LARGE = {
    "rms_norm_kernels.sum_kernel": "reads one row for each program of a backward pass",
    "adamw._advance": "writes three numbers",
}


def name_of(launch: Launch) -> str:
    """File and function."""
    function = launch.kernel.fn
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def providers() -> Iterator[tuple[Op, Provider]]:
    for op in OPS.values():
        for provider in op.providers.values():
            if op.module.startswith("tinyllama.ops.") and "triton" in provider.requires:
                yield op, provider


def kernels() -> set[str]:
    """Of every case that is declared, in every dtype."""
    return {
        name_of(launch)
        for op, provider in providers()
        for case in op.cases
        if provider.supports(case.dims) is None
        for dtype in provider.dtypes
        for launch in launches_of(op, provider, case, dtype)
    }
