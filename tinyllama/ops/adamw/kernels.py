"""AdamW's kernels: one launch for all tensors, after one of a program that counts the step."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tinyllama.harness.kernels import cdiv, jit, next_power_of_2, processors_of, tl
from tinyllama.harness.kernels.addresses import TABLES
from tinyllama.harness.kernels.configs import Config, Space
from tinyllama.harness.kernels.layout import as_one, contiguous
from tinyllama.harness.kernels.precision import SHORT

Tensors = list[torch.Tensor]


class State(NamedTuple):
    """Lists of equal shapes, and two scalars; all but ``grad`` and ``found_inf`` are updated in
    place."""

    param: Tensors
    grad: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    step: torch.Tensor
    found_inf: torch.Tensor


Rate = float | torch.Tensor


def impossible(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with a parameter; None when nothing is. A rate on the device is not read."""
    for name in ("beta1", "beta2"):
        if not 0 <= settings[name] < 1:
            return f"{name} is {settings[name]!r}: use a number from 0 to below 1"
    for name in ("lr", "eps", "weight_decay"):
        value = settings[name]
        if not isinstance(value, torch.Tensor) and not 0 <= value < math.inf:
            return f"{name} is {value!r}: use a finite number of at least 0"
    return None


UPDATE = Space(
    "adamw.update",
    default=lambda grad: Config(BLOCK=2048, num_warps=4),
    configs=lambda grad: [
        Config(BLOCK=block, num_warps=warps)
        for block in (1024, 2048, 4096, 8192)
        for warps in (2, 4, 8)
        if 512 <= block * 2 // warps <= 2048
    ],
)

# PROGRAMS: for each processor.
UPDATE_BESIDE = Space(
    "adamw.update_beside",
    default=lambda grad: Config(BLOCK=1024, PROGRAMS=2, num_warps=4),
    configs=lambda grad: [
        Config(BLOCK=block, PROGRAMS=programs, num_warps=4)
        for block in (1024, 2048)
        for programs in (1, 2, 3, 4, 8)
    ],
)


@jit
def _advance(
    step, found_inf, lr, weight_decay, factors, judged,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """One program: count the step, and write what all elements share into factors (3):
    1 - lr wd, lr / (1 - b1^t), 1 / sqrt(1 - b2^t); in float64, where 1 - b^t loses nothing.
    Where there is a number to be judged, found_inf is set to 0 if it is finite, else to 1."""
    if judged is None:
        skip = tl.load(found_inf) != 0
    else:
        number = tl.load(judged).to(tl.float32)
        skip = (tl.abs(number) < float("inf")) == 0  # NaN is not below it either
        tl.store(found_inf, skip.to(tl.float32))
    t = tl.load(step) + tl.where(skip, 0.0, 1.0)
    tl.store(step, t)
    count = tl.maximum(t, 1.0).to(tl.int32)  # 0 only where nothing will be updated
    base1 = tl.full((), BETA1, tl.float64)
    base2 = tl.full((), BETA2, tl.float64)
    power1 = tl.full((), 1.0, tl.float64)
    power2 = tl.full((), 1.0, tl.float64)
    for _ in range(25):  # the bits of 2^24, where a count in float32 ends
        odd = (count & 1) == 1
        power1 = tl.where(odd, power1 * base1, power1)
        power2 = tl.where(odd, power2 * base2, power2)
        base1 *= base1
        base2 *= base2
        count >>= 1
    unit = tl.full((), 1.0, tl.float64)
    rate = unit * tl.load(lr) if LR_ON_DEVICE else unit * lr
    tl.store(factors, (unit - rate * weight_decay).to(tl.float32))
    tl.store(factors + 1, (rate / (unit - power1)).to(tl.float32))
    tl.store(factors + 2, (unit / tl.sqrt(unit - power2)).to(tl.float32))


@jit
def _elements(
    param, grad, exp_avg, exp_avg_sq, low, factors, inside, rest1, beta2, rest2, eps
):  # fmt: skip
    """Update the elements at these addresses, and the copy in another dtype where ``low`` is not
    None; ``inside`` masks them, or is None for all."""
    p = tl.load(param, mask=inside).to(tl.float32)
    g = tl.load(grad, mask=inside).to(tl.float32)
    m = tl.load(exp_avg, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq, mask=inside).to(tl.float32)
    m = m + (g - m) * rest1
    v = v * beta2 + g * g * rest2
    size = tl.sqrt(v) * tl.load(factors + 2) + eps
    p = p * tl.load(factors) - tl.load(factors + 1) * (m / size)
    tl.store(param, p.to(param.dtype.element_ty), mask=inside)
    if low is not None:
        tl.store(low, p.to(low.dtype.element_ty), mask=inside)
    tl.store(exp_avg, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty), mask=inside)


@jit
def _at(address, like, start, ALIGNED: tl.constexpr):
    """A pointer to element ``start`` of the tensor at ``address``, with the dtype of ``like``."""
    pointer = address.to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@jit
def _block(
    block, table, factors, param, grad, exp_avg, exp_avg_sq, low, rest1, beta2, rest2, eps,
    elements, TENSORS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor."""
    offsets = tl.arange(0, BLOCK)
    copy = low
    if table is None:
        start = tl.full((), BLOCK, tl.int64) * block
        size = elements - start
        p, g = param + start + offsets, grad + start + offsets
        m, v = exp_avg + start + offsets, exp_avg_sq + start + offsets
        if low is not None:
            copy = low + start + offsets
    else:
        firsts = tl.load(table + tl.arange(0, TENSORS))
        entry = table + tl.sum((firsts <= block).to(tl.int32), 0) - 1
        start = (block - tl.load(entry)) * BLOCK
        size = tl.load(entry + TENSORS) - start
        p = _at(tl.load(entry + 2 * TENSORS), param, start, ALIGNED) + offsets
        g = _at(tl.load(entry + 3 * TENSORS), grad, start, ALIGNED) + offsets
        m = _at(tl.load(entry + 4 * TENSORS), exp_avg, start, ALIGNED) + offsets
        v = _at(tl.load(entry + 5 * TENSORS), exp_avg_sq, start, ALIGNED) + offsets
        if low is not None:
            copy = _at(tl.load(entry + 6 * TENSORS), low, start, ALIGNED) + offsets
    if size >= BLOCK:  # without a mask, so that accesses are as wide as they can be
        _elements(p, g, m, v, copy, factors, None, rest1, beta2, rest2, eps)
    else:
        _elements(p, g, m, v, copy, factors, offsets < size, rest1, beta2, rest2, eps)


@jit
def _update(
    table, factors, found_inf, param, grad, exp_avg, exp_avg_sq, low, rest1, beta2, rest2, eps,
    elements, blocks, TENSORS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program updates one block of one tensor; where the number of all ``blocks`` is given, it
    goes on to others. The table (6, TENSORS) holds for each tensor its first block, its size and
    four addresses; a row more where there are copies, ``low``. Without a table there is one tensor,
    of so many ``elements``."""
    if tl.load(found_inf) == 0:
        if blocks is None:
            _block(
                tl.program_id(0), table, factors, param, grad, exp_avg, exp_avg_sq, low,
                rest1, beta2, rest2, eps, elements, TENSORS, ALIGNED, BLOCK,
            )  # fmt: skip
        else:
            for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
                _block(
                    block, table, factors, param, grad, exp_avg, exp_avg_sq, low,
                    rest1, beta2, rest2, eps, elements, TENSORS, ALIGNED, BLOCK,
                )  # fmt: skip


def _check(state: State, sizes: list[int]) -> None:
    """Raise ValueError for lists that do not match: the kernel does not check addresses."""
    *lists, step, found_inf = state
    for name, tensors in zip(State._fields, lists, strict=False):
        for tensor in tensors:
            if tensor.dtype not in SHORT:
                raise ValueError(
                    f"adamw: {name} has dtype {tensor.dtype}: use float32, bfloat16 or float16, "
                    "or the provider 'eager'"
                )
        if [t.numel() for t in tensors] != sizes:
            raise ValueError(f"adamw: {name} has other sizes than param")
        if len({t.dtype for t in tensors}) > 1 or any(t.device != step.device for t in tensors):
            raise ValueError(
                f"adamw: tensors of {name} differ in dtype, or from step in device: update apart"
            )
    if found_inf.device != step.device:
        raise ValueError(
            f"adamw: step is on {step.device} and found_inf on {found_inf.device}: move them to "
            "one device"
        )


def update(
    state: State,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensors | None = None,
    factors: torch.Tensor | None = None,
    few_programs: bool = False,
) -> None:
    """The provider "triton", which also writes each parameter, rounded, into ``low``: dense tensors
    of the parameters' sizes and one dtype. factors: what `count` gave for this step, which is then
    counted no more. few_programs: with few programs, which leave room for other kernels on each
    processor. Raises ValueError for tensors that do not match."""
    rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if reason := impossible(rates):
        raise ValueError(f"adamw: {reason}")
    sizes = [p.numel() for p in state.param]
    _check(state, sizes)
    if low is not None and [t.numel() for t in low if t.is_contiguous()] != sizes:
        raise ValueError("adamw: the rounded copies are not dense, or have other sizes than param")
    *lists, step, found_inf = state
    by_field = dict(zip(State._fields, lists, strict=False))
    if factors is None:
        factors = count(step, found_inf, lr, beta1, beta2, weight_decay)
    if not state.param:
        return
    dense = {name: [contiguous(t) for t in tensors] for name, tensors in by_field.items()}
    space = UPDATE_BESIDE if few_programs else UPDATE
    config = space.choose(step.device, grad=SHORT[state.grad[0].dtype])
    written = [*dense.values(), *([low] if low else [])]
    spans = [as_one(*tensors) for tensors in written]
    if all(span is not None for span in spans):
        written, sizes = [[span] for span in spans if span is not None], [sum(sizes)]
    blocks = sum(cdiv(size, config["BLOCK"]) for size in sizes)
    programs, options = blocks, config.kwargs()
    if few_programs:
        programs = min(blocks, options.pop("PROGRAMS") * processors_of(step.device))
    if blocks:
        alone = len(sizes) == 1
        table = None if alone else _table(sizes, config["BLOCK"], written, step.device)
        _update[(programs,)](
            *(table, factors, found_inf, *(tensors[0] for tensors in written)),
            *(() if low else (None,)),
            *(1 - beta1, beta2, 1 - beta2, eps),
            *(sizes[0] if alone else None, blocks if few_programs else None),
            TENSORS=0 if alone else next_power_of_2(len(sizes)),
            ALIGNED=all(t.data_ptr() % 16 == 0 for tensors in written for t in tensors),
            **options,
        )
    for name in ("param", "exp_avg", "exp_avg_sq"):
        for original, copy in zip(by_field[name], dense[name], strict=True):
            if copy is not original:
                original.copy_(copy)


def _table(
    sizes: list[int], block: int, lists: list[Tensors], device: torch.device
) -> torch.Tensor:
    """The table of a launch on several tensors, in blocks of so many elements."""
    firsts = [0, *itertools.accumulate(cdiv(size, block) for size in sizes[:-1])]
    addresses = (tuple(t.data_ptr() for t in tensors) for tensors in lists)
    return TABLES.table((tuple(firsts), tuple(sizes), *addresses), device)


def count(
    step: torch.Tensor,
    found_inf: torch.Tensor,
    lr: Rate,
    beta1: float,
    beta2: float,
    weight_decay: float,
    judged: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count a step, in place, unless ``found_inf`` says that it changes nothing; -> what all its
    updates share (3). judged: a number that sets ``found_inf``, to 1 where it is not finite."""
    factors = torch.empty(3, dtype=torch.float32, device=step.device)
    constants = {"BETA1": beta1, "BETA2": beta2, "LR_ON_DEVICE": isinstance(lr, torch.Tensor)}
    _advance[(1,)](step, found_inf, lr, weight_decay, factors, judged, **constants, num_warps=1)
    return factors
