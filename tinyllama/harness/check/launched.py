"""The launches of a provider, recorded from the declaration of its op; nothing runs."""

import contextlib
import dis
from collections.abc import Iterable, Iterator
from types import FunctionType

import torch
from torch._library.triton import set_wrap_triton_enabled

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.evaluate import without_values
from tinyllama.harness.check.finding import Finding, Outcome, Rank
from tinyllama.harness.check.names import LAUNCHED
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.kernels.bounds import Bounds
from tinyllama.harness.kernels.launch import Launch, recorded


def with_kernels(ops: Iterable[Op]) -> Iterator[tuple[Op, Provider]]:
    """The providers that launch kernels of Triton's."""
    for op in ops:
        for provider in op.providers.values():
            if "triton" in provider.requires:
                yield op, provider


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
    """As `recorded`, with products of float32 in this precision. A kernel under
    ``torch.library.wrap_triton`` is launched as any other: its operator does nothing on meta."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"ieee": "highest", "tf32": "high"}[precision])
    try:
        with set_wrap_triton_enabled(False), recorded(chip) as launches:
            yield launches
    finally:
        torch.set_float32_matmul_precision(before)


def _call(op: Op, provider: Provider, case: Case, dtype: torch.dtype) -> None:
    """Forward and backward on tensors of the meta device, of the declared shapes."""
    args = dict(zip(op.inputs, without_values(op, case, dtype), strict=True))
    leaves = [args[name].requires_grad_() for name in op.differentiable if args[name] is not None]
    outputs = provider.call(*args.values(), **{**op.params, **case.params})
    if not leaves:
        return
    used = [output for output in several(outputs) if output.requires_grad]
    torch.autograd.grad(used, leaves, [torch.empty_like(o) for o in used], allow_unused=True)


def kernel_launched(candidate: Candidate, declares: bool) -> Finding:
    """Whether some plain case launches a kernel, where the provider ``declares`` one, or its code
    names one: then it is a warning. A GPU runs kernels that nobody sees being launched; on a CPU
    all are interpreted."""
    declares = declares and "triton" in candidate.provider.requires
    names_one = declares or _names_kernel(candidate.provider.call)
    reason = candidate.missing() or ("" if names_one else "it has no kernel of Triton")
    if reason or candidate.device.type != "cpu":
        reason = reason or "it is seen where kernels are interpreted: use --device cpu"
        return Finding(LAUNCHED, Outcome.UNSUPPORTED, message=reason)
    for case in reversed(candidate.plain_cases()):  # small ones may be left to torch
        bounds, text = Bounds(), ""
        try:
            with candidate.limits(bounds):
                candidate.results(candidate.inputs(case))
        except Exception as error:
            text = f"the call raised {type(error).__name__}: {error}"
        if bounds.kernels:
            return Finding(LAUNCHED, Outcome.PASSED)
        if text:
            return Finding(LAUNCHED, Outcome.BLOCKED, str(case), text)
    why = 'requires=("triton",) declares one' if declares else "its code names one"
    text = f"no kernel launched, though {why}: does a branch (is_cuda) leave the CPU to torch?"
    rank = Rank.REFUSED if declares else Rank.WARNING
    return Finding(LAUNCHED, Outcome.FAILED, message=text, special=rank)


def _names_kernel(value: object, depth: int = 5) -> bool:
    """Whether the code of a function or class names a kernel of Triton, or a function that does."""
    if hasattr(value, "fn") and hasattr(value, "run"):
        return True
    members = vars(value).values() if isinstance(value, type) else (value,)
    functions = (getattr(member, "__func__", member) for member in members)
    return depth > 0 and any(
        _names_kernel(function.__globals__.get(instruction.argval), depth - 1)
        for function in functions
        if isinstance(function, FunctionType) and not function.__module__.startswith("torch.")
        for instruction in dis.get_instructions(function)
        if instruction.opname == "LOAD_GLOBAL"
    )
