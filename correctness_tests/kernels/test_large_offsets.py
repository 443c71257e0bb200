"""Offsets past 2^31: every kernel on tensors of more elements than 32 bits count.

Entries along the first axis do not depend on each other. So the first and the last few are held to
the float64 reference of those alone, by the rule that holds every provider; upstream gradients in
between are zero, so that the gradients of weights come from the ends. With an offset of 32 bits
the last entries would be read and written 2^32 elements before their place. Such a case takes tens
of GiB of a GPU; on a CPU the same runs with a few entries in between (`test_far_offsets` goes
further there).
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import NEVER_LARGE, kernels, name_of, providers
from tinyllama.harness import Case
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.compare import SLACK
from tinyllama.harness.correct.evaluate import Inputs, Leaves, copied, mutated_results
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.declare.autograd import size_of
from tinyllama.harness.declare.values import Values
from tinyllama.harness.kernels.launch import Launch, recorded
from tinyllama.harness.measure.memory import Allocations, forget_peak, live_bytes, peak_bytes
from tinyllama.ops import OPS
from tinyllama.ops import attention as attention_file
from tinyllama.ops import linear_cross_entropy as linear_cross_entropy_file

BEYOND = 2**31
ENDS = 2  # entries compared at each end
SMALL = 2 * ENDS + 1  # entries on a CPU
GIB = 2**30
MOST = 64 * GIB
FEW_TOKENS = 64  # more of them are several launches backward
SPARE = 2 * GIB  # for libraries, and what an allocator cannot use

Entry = Callable[[torch.Tensor], torch.Tensor]


def first(ends: torch.Tensor) -> torch.Tensor:
    return ends[0]


def zero(ends: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(ends[0])


def certain(ends: torch.Tensor) -> torch.Tensor:
    """Logits that are sure of class 0: the loss and all gradients of such a row are exactly 0."""
    row = torch.full_like(ends[0], -1e4)
    row[0] = 0
    return row


def pointing(ends: torch.Tensor) -> torch.Tensor:
    """What `one_class` makes logits of that are sure of class 0."""
    row = torch.zeros_like(ends[0])
    row[0] = 200
    return row


def one_class(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights (V D) whose first column is for class 0 alone."""
    weight = 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weight[:, 0] = 0
    weight[0, 0] = 1
    return weight


@dataclass(frozen=True)
class Large:
    """A provider, and as many entries along the first axis as take it past 2^31 elements.

    along: the dimension of that axis; dims: the others. entry: elements of one entry in the
    smallest tensor whose last entries shall lie there. between: what an entry in between holds,
    by input; where it is not named, what the first one holds. values: as of a `Case`.
    """

    op: str
    along: str
    entry: str
    dims: Mapping[str, int] = field(default_factory=dict)
    provider: str = "triton"
    between: Mapping[str, Entry] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}-{self.provider}-" + "".join(f"{n}{size}" for n, size in self.all_dims)

    @property
    def all_dims(self) -> list[tuple[str, int]]:
        return [(self.along, self.size), *self.dims.items()]

    @property
    def size(self) -> int:
        """Entries, of which the last few begin past 2^31."""
        return -(-BEYOND // size_of(self.entry, self.dims)) + ENDS

    @property
    def of_ends(self) -> OpCase:
        """What is compared: the ends, side by side."""
        op = OPS[self.op]
        many = any(declared.many for declared in op.inputs.values())
        along: Any = (2 * ENDS, 33) if many else 2 * ENDS  # a second tensor stays small
        dims: Mapping[str, Any] = self.dims
        case = Case(values=self.values, **{self.along: along}, **dims)
        dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        return OpCase(op, op[self.provider], case, dtype)


BLOCK = {"T": 8, "D": 64, "Q": 64, "R": 32, "F": 256, "C": 16}
LARGE = [
    Large("rms_norm", "B", "T*D", {"T": 3, "D": 1000}),
    Large("add_rms_norm", "B", "T*D", {"T": 3, "D": 1000}),
    Large("rope", "B", "T*G*K", {"T": 3, "H": 2, "G": 2, "K": 64, "C": 32}),
    Large("attention", "B", "T*G*K", {"T": 17, "H": 2, "G": 1, "K": 64}),
    Large("attention", "B", "T*G*K", {"T": 2 * FEW_TOKENS + 2, "H": 1, "G": 1, "K": 16}),
    Large("silu_mul", "N", "F", {"F": 1000}),
    Large("transpose", "N", "D", {"D": 1000}),
    Large("swiglu", "B", "T*F", {"T": 3, "D": 16, "F": 1000}),
    Large("swiglu", "B", "2*T*F", {"T": 1, "D": 2, "F": 64}, "naive"),
    Large("block", "B", "2*T*F", BLOCK),
    Large("block", "B", "2*T*F", BLOCK, "selective"),
    Large("cross_entropy", "N", "V", {"V": 1000}, between={"logits": certain, "targets": zero}),
    Large(
        "linear_cross_entropy",
        "N",
        "D",  # V / 8 is more: the last chunk of logits ends past 2^31 too
        {"D": 64, "V": 1000},
        between={"x": pointing, "targets": zero},
        values={"weight": Values("one_class", one_class)},
    ),
    Large("adamw", "P", "1"),
]


@pytest.fixture(autouse=True)
def as_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in chunks, and attention in several launches, at small sizes already."""
    monkeypatch.setattr(linear_cross_entropy_file, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(attention_file, "FEW_TOKENS", FEW_TOKENS)


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


# -- running a large case -------------------------------------------------------------------------


def stretched(ends: torch.Tensor, size: int, between: Entry) -> torch.Tensor:
    far = ends.new_empty((size, *ends.shape[1:]))
    far[:ENDS], far[-ENDS:] = ends[:ENDS], ends[-ENDS:]
    far[ENDS:-ENDS] = between(ends)
    return far


def stretched_leaves(large: Large, ends: Leaves, size: int) -> Leaves:
    """Inputs by name; of a list the first tensor is long."""

    def of(name: str, value: Any) -> Any:
        declared = OPS[large.op].inputs[name]
        if declared.axes[:1] != (large.along,):
            return copied(value)
        head, *rest = value if declared.many else [value]
        long = stretched(head, size, large.between.get(name, first))
        return [long, *copied(rest)] if declared.many else long

    return {name: of(name, value) for name, value in ends.items()}


def long_first(large: Large, output: str, value: torch.Tensor) -> torch.Tensor:
    """An output with the long axis first, or back again; a transpose has it last."""
    last = OPS[large.op].outputs[output].axes[-1:] == (large.along,)
    return value.mT if last and value.dim() == 2 else value


def results(large: Large, inputs: Inputs, size: int) -> dict[str, torch.Tensor]:
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
        found = {}
        if leaves:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            found = dict(zip(op.outputs, outputs, strict=True))
            gradients = torch.autograd.grad(list(found.values()), leaves, upstream)
            names = [f"grad {name}" for name in op.differentiable]
            found.update(zip(names, gradients, strict=True))
        for fresh in inputs.fresh:
            call(*{**args, **stretched_leaves(large, fresh, size)}.values(), **inputs.params)
    return {name: value.detach() for name, value in found.items()} | mutated_results(op, args)


def of_ends(large: Large, found: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The results that the ends alone would have. Raises AssertionError where those in between
    are not finite, or their gradients not zero."""
    ends = {}
    for name, value in found.items():
        outputs = OPS[large.op].outputs
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


def assert_right(large: Large, device: torch.device, size: int) -> None:
    assert size not in large.dims.values(), "the long axis is found by its size"
    case = large.of_ends
    inputs = case.inputs(device)
    found = of_ends(large, results(large, inputs, size), size)
    slack = SLACK * case.provider.slack.get(case.dtype, 1.0)
    compared = case.judge(found, inputs, slack=slack)
    wrong = [str(comparison) for comparison in compared if not comparison.passed]
    assert not wrong, "\n".join([str(large), *wrong])
    assert all(comparison.sees_zero for comparison in compared), "zeros would pass"


@functools.cache
def planned(index: int) -> tuple[int, list[Launch]]:
    """The bytes that a case takes at its full size, and what it launches there: nothing runs."""
    large = LARGE[index]
    inputs = large.of_ends.inputs("meta")
    with recorded() as launches, Allocations() as seen:
        results(large, inputs, large.size)
    return seen.peak, launches


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
    """A new one fails here; `Large` says what to add."""
    launching = {(op.name, provider.name) for op, provider in providers()}
    assert {(large.op, large.provider) for large in LARGE} == launching


@pytest.mark.parametrize("index", range(len(LARGE)), ids=[str(large) for large in LARGE])
def test_a_case_fits_a_large_gpu_and_its_last_entries_lie_past_2_to_the_31(index: int) -> None:
    large = LARGE[index]
    offset = (large.size - ENDS) * size_of(large.entry, large.dims)
    assert BEYOND <= offset < 2 * BEYOND, "in 32 bits it is negative"
    supported = large.of_ends.provider.supports(dict(large.all_dims))
    assert supported is None, supported
    taken, launches = planned(index)
    assert max(map(reach, launches)) > BEYOND, "no kernel sees a tensor that long"
    assert BEYOND * large.of_ends.dtype.itemsize < taken <= MOST, f"{taken / GIB:.1f} GiB"


def test_every_kernel_meets_a_tensor_past_2_to_the_31() -> None:
    launches = [launch for index in range(len(LARGE)) for launch in planned(index)[1]]
    far = {name_of(launch) for launch in launches if reach(launch) > BEYOND}
    assert far == kernels() - set(NEVER_LARGE)


# -- the check can fail ---------------------------------------------------------------------------


def last_output_misplaced(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = OPS["rms_norm"]["eager"].call(x, weight, eps=eps)
    return torch.cat((y[:-1], y[:1]))


def last_gradient_misplaced(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = OPS["rms_norm"]["eager"].call(x, weight, eps=eps)
    y.register_hook(lambda dy: torch.cat((dy[:-1], dy[:1])))
    return y


def written_in_between(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = OPS["rms_norm"]["eager"].call(x, weight, eps=eps)
    y.register_hook(lambda dy: torch.cat((dy[:ENDS], dy[-1:], dy[ENDS + 1 :])))
    return y


def left_out_in_between(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = OPS["rms_norm"]["eager"].call(x, weight, eps=eps)
    return torch.cat((y[:ENDS], torch.empty_like(y[ENDS:-ENDS]), y[-ENDS:]))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (last_output_misplaced, "y: tensor error .* > allowed"),
        (last_gradient_misplaced, "grad x: tensor error .* > allowed"),
        (written_in_between, "grad x in between is not zero"),
        (left_out_in_between, "y in between is not finite"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_entries_out_of_place_are_seen(
    fault: Callable[..., Any], seen: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    providers = OPS["rms_norm"].providers
    assert_right(LARGE[0], device, SMALL)
    monkeypatch.setitem(providers, "triton", replace(providers["triton"], call=fault))
    with pytest.raises(AssertionError, match=seen):
        assert_right(LARGE[0], device, SMALL)
