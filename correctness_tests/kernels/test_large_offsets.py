"""Offsets past 2^31: every kernel on tensors of more elements than 32 bits count.

Entries along the first axis do not depend on each other. So the first and the last few are held to
the float64 reference of those alone, by the rule that holds every provider; upstream gradients in
between are zero, so that the gradients of weights come from the ends. With an offset of 32 bits
the last entries would be read and written 2^32 elements before their place. Such a case takes tens
of GiB of a GPU; on a CPU the same runs with a few entries in between.
"""

import contextlib
import fcntl
import functools
import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import large_kernels, providers, small_kernels
from tinyllama.harness import Case, Large, Op, Provider
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import SLACK
from tinyllama.harness.check.evaluate import Inputs, Leaves, copied, mutated_results
from tinyllama.harness.check.guards import PoisonedMemory
from tinyllama.harness.declare.offsets import Entry, zero
from tinyllama.harness.declare.specs import size_of
from tinyllama.harness.kernels.launch import Launch, recorded
from tinyllama.harness.measure.memory import Allocations, forget_peak, live_bytes, peak_bytes

BEYOND = 2**31
ENDS = 2  # entries compared at each end
SMALL = 2 * ENDS + 1  # entries on a CPU
GIB = 2**30
MOST = 64 * GIB
SPARE = 2 * GIB  # for libraries, and what an allocator cannot use


@dataclass(frozen=True)
class Stretched:
    """A declared case, on the provider that declares it."""

    op: Op
    provider: Provider
    large: Large

    def __str__(self) -> str:
        return f"{self.provider}-" + "".join(f"{n}{size}" for n, size in self.dims.items())

    @property
    def dims(self) -> dict[str, int]:
        return {self.large.along: self.size, **self.large.dims}

    @property
    def size(self) -> int:
        """Entries, of which the last few begin past 2^31."""
        return -(-BEYOND // size_of(self.large.entry, self.large.dims)) + ENDS

    @property
    def of_ends(self) -> OpCase:
        """What is compared: the ends, side by side."""
        many = any(declared.many for declared in self.op.inputs.values())
        along: Any = (2 * ENDS, 33) if many else 2 * ENDS  # a second tensor stays small
        dims: Mapping[str, Any] = {self.large.along: along, **self.large.dims}
        case = Case(values=self.large.values, **dims)
        dtype = torch.bfloat16 if torch.bfloat16 in self.op.dtypes else self.op.dtypes[0]
        return OpCase(self.op, self.provider, case, dtype)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The constants of the op's module that the case declares."""
        module = importlib.import_module(self.op.module)
        with contextlib.ExitStack() as stack:
            for name, value in self.large.settings.items():
                stack.enter_context(mock.patch.object(module, name, value))
            yield


LARGE = [Stretched(op, provider, large) for op, provider in providers() for large in provider.large]


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[None]:
    """One such case at a time, however many workers share the GPU, and none of its memory kept."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with open(folder / "large.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if device.type != "cpu":
            gc.collect()
            torch.cuda.empty_cache()


def first(ends: torch.Tensor) -> torch.Tensor:
    return ends[0]


# -- running a large case -------------------------------------------------------------------------


def stretched(ends: torch.Tensor, size: int, between: Entry) -> torch.Tensor:
    far = ends.new_empty((size, *ends.shape[1:]))
    far[:ENDS], far[-ENDS:] = ends[:ENDS], ends[-ENDS:]
    far[ENDS:-ENDS] = between(ends)
    return far


def stretched_leaves(large: Stretched, ends: Leaves, size: int) -> Leaves:
    """Inputs by name; of a list the first tensor is long."""

    def of(name: str, value: Any) -> Any:
        declared = large.op.inputs[name]
        if declared.axes[:1] != (large.large.along,):
            return copied(value)
        head, *rest = value if declared.many else [value]
        long = stretched(head, size, large.large.between.get(name, first))
        return [long, *copied(rest)] if declared.many else long

    return {name: of(name, value) for name, value in ends.items()}


def long_first(large: Stretched, output: str, value: torch.Tensor) -> torch.Tensor:
    """An output with the long axis first, or back again; a transpose has it last."""
    last = large.op.outputs[output].axes[-1:] == (large.large.along,)
    return value.mT if last and value.dim() == 2 else value


def results(large: Stretched, inputs: Inputs, size: int) -> dict[str, torch.Tensor]:
    """Outputs, gradients and what is written in place, by name, of so many entries."""
    op, call = large.of_ends.op, large.of_ends.provider.call
    args = stretched_leaves(large, inputs.args, size)

    def far(name: str, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.dim():  # an output without that axis is a mean over it
            return gradient * (size / (2 * ENDS))
        return long_first(large, name, stretched(long_first(large, name, gradient), size, zero))

    upstream = [far(name, dy) for name, dy in inputs.upstream.items() if dy is not None]
    leaves = [args[name].requires_grad_() for name in op.differentiable]
    with PoisonedMemory():
        outputs = call(*args.values(), **inputs.params)
        results_by_name = {}
        if leaves:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results_by_name = dict(zip(op.outputs, outputs, strict=True))
            gradients = torch.autograd.grad(list(results_by_name.values()), leaves, upstream)
            names = [f"grad {name}" for name in op.differentiable]
            results_by_name.update(zip(names, gradients, strict=True))
        for fresh in inputs.fresh:
            call(*{**args, **stretched_leaves(large, fresh, size)}.values(), **inputs.params)
    return {name: value.detach() for name, value in results_by_name.items()} | mutated_results(
        op, args
    )


def of_ends(
    large: Stretched, results_by_name: dict[str, torch.Tensor], size: int
) -> dict[str, torch.Tensor]:
    """The results that the ends alone would have. Raises AssertionError where those in between
    are not finite, or their gradients not zero."""
    ends = {}
    for name, value in results_by_name.items():
        outputs = large.op.outputs
        value = long_first(large, name, value) if name in outputs else value
        if value.shape[:1] == (size,):
            for part in value[ENDS:-ENDS].split(-(-size // 64)):
                assert part.isfinite().all(), f"{name} in between is not finite"
                assert "grad " not in name or not part.any(), f"{name} in between is not zero"
            value = torch.cat((value[:ENDS], value[-ENDS:]))
            value = long_first(large, name, value) if name in outputs else value
        elif name in outputs:
            value = value * (size / (2 * ENDS))
        ends[name] = value
    return ends


def assert_right(large: Stretched, device: torch.device, size: int) -> None:
    assert size not in large.large.dims.values(), "the long axis is found by its size"
    case = large.of_ends
    inputs = case.inputs(device)
    with large.settings():
        results_by_name = of_ends(large, results(large, inputs, size), size)
    slack = SLACK * case.provider.slack.get(case.dtype, 1.0)
    compared = case.judge(results_by_name, inputs, slack=slack)
    wrong = [str(comparison) for comparison in compared if not comparison.passed]
    assert not wrong, "\n".join([str(large), *wrong])
    assert all(comparison.sees_zero for comparison in compared), "zeros would pass"


@functools.cache
def planned(index: int) -> tuple[int, list[Launch]]:
    """The bytes that a case takes at its full size, and what it launches there: nothing runs."""
    large = LARGE[index]
    inputs = large.of_ends.inputs("meta")
    with large.settings(), recorded() as launches, Allocations() as seen:
        results(large, inputs, large.size)
    return seen.peak, launches


@pytest.mark.long
@pytest.mark.large_memory
@pytest.mark.parametrize("index", range(len(LARGE)), ids=[str(large) for large in LARGE])
def test_what_lies_past_2_to_the_31_is_right(index: int, alone: None, device: torch.device) -> None:
    if device.type == "cpu":
        assert_right(LARGE[index], device, SMALL)
        return
    torch.cuda.empty_cache()
    needed, free = planned(index)[0] + SPARE, torch.cuda.mem_get_info(device)[0]
    if needed > free:
        pytest.skip(f"takes {needed / GIB:.0f} GiB, free on this GPU: {free / GIB:.0f}")
    before = live_bytes(device)
    forget_peak(device)
    assert_right(LARGE[index], device, LARGE[index].size)
    assert peak_bytes(device) - before <= needed


# -- the cases ------------------------------------------------------------------------------------


def reach(launch: Launch) -> int:
    """The farthest offset in a tensor of a launch, and one more."""
    tensors = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
    return max(
        1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in tensors
    )


def test_every_provider_with_kernels_has_a_case() -> None:
    """A new one fails here; `Large` says what to declare."""
    assert not {str(provider) for _, provider in providers() if not provider.large}


@pytest.mark.parametrize("index", range(len(LARGE)), ids=[str(large) for large in LARGE])
def test_a_case_fits_a_large_gpu_and_its_last_entries_lie_past_2_to_the_31(index: int) -> None:
    large = LARGE[index]
    offset = (large.size - ENDS) * size_of(large.large.entry, large.large.dims)
    assert BEYOND <= offset < 2 * BEYOND, "in 32 bits it is negative"
    supported = large.provider.supports(large.dims)
    assert supported is None, supported
    taken, launches = planned(index)
    if launches or not large.op.small_kernels:  # else what is that long is left to torch
        assert max(map(reach, launches), default=0) > BEYOND, "no kernel sees a tensor that long"
    assert BEYOND * large.of_ends.dtype.itemsize < taken <= MOST, f"{taken / GIB:.1f} GiB"


@pytest.mark.long
def test_every_kernel_meets_a_tensor_past_2_to_the_31() -> None:
    launches = [launch for index in range(len(LARGE)) for launch in planned(index)[1]]
    far = {launch.identity for launch in launches if reach(launch) > BEYOND}
    # The harness's own, which copies inputs of other layouts, belongs to no op.
    assert far - {"copying.dense_kernel"} - small_kernels() == large_kernels()
