"""The launches of a provider, recorded from the declaration of its op; nothing runs.

Which compilations of a tree's kernels are made, for which chips, follows from the declarations:
`plan` has each once, with the first case that asks for it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import shapes_of
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import Case, Tensor
from tinyllama.harness.kernels.launch import Launch, recorded
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking

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
                            found = compilation(launch, chip)
                            # A kernel of another op is compiled with that one.
                            own = found.kernel.startswith(f"{op.name}.")
                            yield Planned(f"{where}-{found.kernel}", quick and own, found)
                    except Exception as error:  # the test of this case raises it
                        yield Planned(where, quick, error=error)


def with_kernels(ops: Iterable[Op]) -> Iterator[tuple[Op, Provider]]:
    """The providers that launch kernels of Triton's."""
    for op in ops:
        for provider in op.providers.values():
            if "triton" in provider.requires:
                yield op, provider


def plan(
    ops: Iterable[Op], chips: Iterable[str] = CHIPS, *, only_quick: bool = False
) -> dict[str, Planned]:
    """Every distinct compilation by its key; those of `make test` first. only_quick: no others."""
    able = [chip for chip in chips if not lacking(chip)]
    every = [
        planned
        for op, provider in with_kernels(ops)
        for planned in plan_of(provider, op, able, only_quick=only_quick)
    ]
    distinct: dict[str, Planned] = {}
    for planned in sorted(every, key=lambda planned: not planned.quick):
        key = planned.compilation.key if planned.compilation else planned.where
        distinct.setdefault(key, planned)
    return distinct


def launches_of(
    op: Op,
    provider: Provider,
    case: Case,
    dtype: torch.dtype,
    *,
    chip: str | None = None,
    precision: str = "ieee",
) -> list[Launch]:
    """What a provider launches, forward and backward, for a case on a chip: nothing runs.

    precision: "ieee", or "tf32" as after ``torch.set_float32_matmul_precision("high")``.
    """
    with on_chip(chip, precision) as launches:
        _call(op, provider, case, dtype)
    return launches


@contextlib.contextmanager
def on_chip(chip: str | None, precision: str) -> Iterator[list[Launch]]:
    """As `recorded`, with products of float32 in this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"ieee": "highest", "tf32": "high"}[precision])
    try:
        with recorded(chip) as launches:
            yield launches
    finally:
        torch.set_float32_matmul_precision(before)


def _call(op: Op, provider: Provider, case: Case, dtype: torch.dtype) -> None:
    """Forward and backward on tensors of the meta device, of the declared shapes."""

    def empty(declared: Tensor) -> Any:
        wanted = declared.dtype or dtype
        made = [
            torch.empty(shape, dtype=wanted, device="meta", requires_grad=declared.grad)
            for shape in shapes_of(declared, case.dims)
        ]
        return made if declared.many else made[0]

    args = [empty(declared) for declared in op.inputs.values()]
    outputs = provider.call(*args, **{**op.params, **case.params})
    if not op.differentiable:
        return
    used = [output for output in several(outputs) if output.requires_grad]
    leaves = [arg for arg, declared in zip(args, op.inputs.values(), strict=True) if declared.grad]
    torch.autograd.grad(used, leaves, [torch.empty_like(o) for o in used], allow_unused=True)
