"""Values that random inputs never have, each made by a rule from an input's dtype and the op.

A change of values is a scale (a power of two over the dtype's range), a shift, an order, or a
number in some place: 0, 1, an infinity, a NaN, a parameter of the op, or a number that the code
compares with. It is made to all inputs at once, so that numbers meet at the same place, and to each
alone. Only what the declaration allows is given: any value where no distribution is declared, any
finite one where the declared one has no least value, and 0 where that may be drawn.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.code_numbers import compared_with, thresholds
from tinyllama.harness.check.evaluate import Inputs, sampled, shapes_of
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.declare.specs import STANDARD

# Of two. A product of three such large numbers is finite in float32, in any order of a sum; the
# square of the least is hardly a normal number.
EXPONENTS = (1, 2, 4, 6, 10, 12, 13, 15, 24, 33, -1, -2, -6, -10, -15, -24, -33, -50, -63)
EXPONENTS_ALONE = (6, 15, -33, -63)  # of an input that is changed with others, too
SHIFTS = (4, 10, 15)  # powers of two that are added or subtracted
SUMS_OVERFLOW = 0.25  # the power of a dtype's largest number from which sums of products overflow
SMALL = 1e-2  # a number below it may be one that a norm is compared with
HUGE = 1e4  # of what a mask leaves out: beyond what a kernel may use in place of an infinity
DRAWN = 4096  # integers, of which the least and the largest are taken
WIDEST = 16  # of evenly spaced values, of either sign
MOST_OF_ROWS = "half of a row and most of another"
PLACES = ("an element", "a row", MOST_OF_ROWS, "half of each row", "all elements")
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Painted:
    """Inputs with changed values. text: what is changed, in words; infinite: whether there is an
    infinity that was not there, nan: or a NaN; integers: whether integers or booleans changed;
    upstream: or upstream gradients alone."""

    text: str
    inputs: Inputs
    infinite: bool = False
    nan: bool = False
    integers: bool = False
    upstream: bool = False


def _with_zeros(gradient: torch.Tensor) -> torch.Tensor:
    """Zero in about half of the elements, and in every third row."""
    mask = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if gradient.dim() > 1:
        rows = torch.arange(gradient.shape[:-1].numel()).view(gradient.shape[:-1])
        mask &= (rows % 3 != 0)[..., None]
    return gradient * mask.to(gradient)


UPSTREAM_CHANGES: dict[str, Change] = {
    "times 1024": lambda gradient: gradient * 1024,
    "with zeros": _with_zeros,
    "ones": torch.ones_like,
    "ones and zeros": lambda gradient: 1 - _with_zeros(torch.ones_like(gradient)),
    "inf in an element": lambda gradient: put(gradient, math.inf, PLACES[0]),
    "nan in an element": lambda gradient: put(gradient, math.nan, PLACES[0]),
}
LOSS_SCALES = (8192, 512, 32)  # of float16


def painted_upstream(
    candidate: Candidate, case: OpCase, *, loss_scale: bool = False
) -> Iterator[Painted]:
    """The inputs of a case with changed upstream gradients, or with the largest loss scale at which
    no result of the reference overflows."""
    inputs = candidate.inputs(case)
    scales = {f"times {scale}": partial(torch.mul, other=scale) for scale in LOSS_SCALES}
    for text, change in (scales if loss_scale else UPSTREAM_CHANGES).items():
        upstream = {n: g if g is None else change(g) for n, g in inputs.upstream.items()}
        changed = replace(inputs, upstream=upstream)
        results = candidate.reference_results(changed).values()
        finite = all(bool(result.isfinite().all()) for result in results)
        infinite, nan = text.startswith("inf"), text.startswith("nan")
        if finite or infinite or nan:
            yield Painted(f"upstream gradients: {text}", changed, infinite, nan, upstream=True)
            if loss_scale:
                return


def painted(candidate: Candidate, case: OpCase, only: str = "") -> Iterator[Painted]:
    """The inputs of a case with changed values, the same ones in the same order each time.

    only: "places" of rows that take several blocks: what depends on where a number stands; "range"
    of another dtype: what depends on how large numbers are. Of several inputs each alone has fewer
    changes than all of them together, and so has one whose distribution says how large it is.
    """
    inputs = candidate.inputs(case)
    floating = {
        name: value
        for name, value in inputs.args.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        if value.dtype.itemsize > 1
    }
    domains = {name: _domain(candidate, case, name) for name in floating}
    numbers = _numbers(candidate, inputs)
    free = [name for name in floating if domains[name] == "any"]

    def changed(text: str, changes: Mapping[str, torch.Tensor]) -> Painted:
        pairs = [(x, floating[name]) for name, x in changes.items()]
        return Painted(
            f"{', '.join(changes)}: {text}",
            replace(inputs, args={**inputs.args, **changes}),
            infinite=any(bool((x.isinf() & ~before.isinf()).any()) for x, before in pairs),
            nan=any(bool((x.isnan() & ~before.isnan()).any()) for x, before in pairs),
        )

    def changes_of(name: str, which: str) -> dict[str, torch.Tensor]:
        return dict(_changes(floating[name], domains[name], numbers, which))

    if len(free) > 1:
        in_all = {name: changes_of(name, only) for name in free}
        for text in in_all[free[0]]:
            if all(text in changes for changes in in_all.values()):
                yield changed(text, {name: changes[text] for name, changes in in_all.items()})
    for name in floating:
        fewer = domains[name] == "finite" or (len(free) > 1 and name in free)
        for text, x in changes_of(name, only or ("alone" if fewer else "")).items():
            yield changed(text, {name: x})
    if only != "range":
        yield from _of_integers(candidate, case, inputs)
    if only:
        return
    small = [name for name in floating if domains[name] != "as drawn"]
    if candidate.op.mutated and small:  # the state of an optimizer, which begins with zeros
        tiny = torch.finfo(torch.float32).tiny ** 0.25
        for without in (None, *candidate.op.mutated):
            names = [name for name in small if name != without]
            yield changed("zero", {name: torch.zeros_like(floating[name]) for name in names})
            yield changed("tiny", {name: floating[name] * tiny for name in names})
    for name, source in itertools.permutations(floating, 2):
        if name in free:
            x, values = floating[name], floating[source].flatten()
            times = x.numel() // values.numel() + 1  # as often as they fit
            filled = values.repeat(times)[: x.numel()].view(x.shape).to(x.dtype)
            yield changed(f"values of {source}", {name: filled})
    for name in free:
        if (unused := _unused(candidate, inputs, name)) is not None:
            for number in (math.inf, HUGE, -HUGE):
                masked = floating[name].masked_fill(unused, number)
                yield changed(f"{number:g} where no output depends on it", {name: masked})


def _unused(candidate: Candidate, inputs: Inputs, name: str) -> torch.Tensor | None:
    """Where no output of the reference depends on an input, of an op with a mask, with lengths or
    with indices; None where each element matters, or the reference has no gradient."""
    op = candidate.op
    if op.mutated or all(declared.floating for declared in op.inputs.values()):
        return None
    x = (3 * inputs.args[name].detach() + 1).requires_grad_()
    args = {**inputs.args, name: x}
    try:
        outputs = several(op["eager"].call(*args.values(), **inputs.params))
        total = [y.double().square().sum() for y in outputs if y.requires_grad]
        (gradient,) = torch.autograd.grad(total, x)
    except Exception:
        return None
    unused = gradient == 0
    return unused if unused.any() and not unused.all() else None


def _domain(candidate: Candidate, case: OpCase, name: str) -> str:
    """What values an input may have: "any", "finite", "from zero" or "as drawn"."""
    declared = candidate.op.inputs[name]
    values = case.case.values.get(name) or declared.distribution(case.case.dims)
    drawn = candidate.inputs(case).args[name]
    if values is STANDARD or bool(drawn.isinf().any()):
        return "any"
    if values.least is not None and math.isinf(values.least):
        # Within the range of float16, a declared distribution says how large numbers are.
        return "finite" if drawn.dtype is not torch.float16 else "as drawn"
    return "from zero" if values.least is not None and values.least <= 0 else "as drawn"


def _numbers(candidate: Candidate, inputs: Inputs) -> list[float]:
    """Numbers at which code may take another way: 0, 1, parameters, and what it compares with."""
    call = candidate.provider.call
    numbers = {0.0, 1.0, -1.0, *map(float, thresholds(call))}
    for name, value in inputs.params.items():
        if type(value) in (int, float):
            near = [value, *compared_with(call, name)]
            numbers |= {sign * float(number) for number in near for sign in (1, -1)}
    return sorted(number for number in numbers if math.isfinite(number))


def _changes(
    x: torch.Tensor, domain: str, numbers: Sequence[float], which: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Changed tensors, and what they are in words. which: "alone", "places", "range", or ""."""
    limits, wide = torch.finfo(x.dtype), x.double()
    if domain == "as drawn":
        return
    if domain == "from zero":
        yield from ((f"0 in {place}", put(x, 0.0, place)) for place in PLACES[:2])
        return
    if which != "places":
        for exponent in EXPONENTS_ALONE if which == "alone" else EXPONENTS:
            scale = 2.0**exponent
            if limits.tiny <= scale <= limits.max:
                yield f"times {scale:g}", (wide * scale).to(x.dtype)
            if limits.max**SUMS_OVERFLOW < scale <= limits.max:
                yield f"positive, times {scale:g}", (wide.abs() * scale).to(x.dtype)
        for exponent, sign in itertools.product(SHIFTS[which == "alone" :], (1, -1)):
            yield f"plus {sign * 2**exponent}", (wide + sign * 2.0**exponent).to(x.dtype)
    if which == "range":
        return
    yield "negative", -x.abs() - 0.5
    yield "rounded to halves", (2 * x).round() / 2  # of which many are equal
    # In the order of those of x: so close, and so wide, random ones are nowhere.
    order = x.flatten().argsort().argsort()
    even = torch.linspace(-WIDEST, WIDEST, x.numel(), dtype=torch.float64, device=x.device)
    yield "evenly spaced", even.to(x.dtype)[order].view(x.shape)
    infinities = (math.inf, -math.inf, math.nan) if domain == "any" else ()
    for number, place in itertools.product((0.0, *infinities), PLACES if x.dim() else PLACES[-1:]):
        everywhere, single = place == PLACES[-1], place == PLACES[0]
        if not (everywhere and number) and not (which == "places" and single):
            yield f"{number:g} in {place}", put(x, number, place)
    for number in numbers if not which else ():
        if 0 < number < SMALL:  # as an epsilon of a norm
            longest = torch.linalg.vector_norm(x.float(), dim=-1).max()
            yield f"rows of length {number / 2:g}", x * (number / 2 / longest).to(x.dtype)
        if number and abs(number) <= limits.max:
            for place in (PLACES[0], PLACES[-1]):
                yield f"{number:g} in {place}", put(x, number, place)


def put(x: torch.Tensor, number: float, place: str) -> torch.Tensor:
    """A copy with a number in one of `PLACES`."""
    y = x.contiguous().clone()
    if place == "an element":
        y.view(-1)[y.numel() // 2] = number
    elif place == "a row":
        y[:1] = number
    elif place == MOST_OF_ROWS:  # of 2,051 elements 2,048: a block
        rows, columns = y.view(-1, y.shape[-1]), y.shape[-1]
        rows[0, : columns // 2] = number
        rows[-1, : max(columns // 2, columns - 3)] = number
    elif place == "half of each row":
        y[..., y.shape[-1] // 2 :] = number
    else:
        y.fill_(number)
    return y


def _of_integers(candidate: Candidate, case: OpCase, inputs: Inputs) -> Iterator[Painted]:
    """Integers and booleans: the least and the largest that are drawn, and vectors in order."""
    for name, value in inputs.args.items():
        declared = candidate.op.inputs[name]
        if (
            value is None
            or declared.many
            or declared.mutated
            or value.is_floating_point()
            or value.numel() < 2
        ):
            continue

        def changed(text: str, tensor: torch.Tensor, name: str = name) -> Painted:
            args = {**inputs.args, name: tensor}
            return Painted(f"{name}: {text}", replace(inputs, args=args), integers=True)

        ends: Sequence[Any] = (False, True)
        ordered = False
        if value.dtype is not torch.bool:
            draws = [draw.flatten().long() for draw in _draws_for(candidate, case, name)]
            ordered = all(torch.equal(draw, draw.sort().values) for draw in draws)
            drawn = torch.cat(draws)
            ends = sorted({int(drawn.min()), int(drawn.clamp(min=0).min()), int(drawn.max())})
            if ordered or all(draw.unique().numel() == draw.numel() for draw in draws):
                ends = ()  # they may have to be in order, or to differ
        for end in ends:
            for place in PLACES[1:] if value.dim() else PLACES[-1:]:
                yield changed(f"{end} in {place}", put(value, end, place))
        if value.dim() == 1 and value.dtype is not torch.bool and value.numel() > 3 and not ordered:
            rising = value.sort().values
            between = torch.cat((rising[:1], rising[1:-1].flip(0), rising[-1:]))
            yield changed("in order", rising)
            yield changed("in order but between its ends", between)


def _draws_for(candidate: Candidate, case: OpCase, name: str) -> list[torch.Tensor]:
    """Draws of an input in its declared shapes, which its distribution may need, until they are at
    least `DRAWN` values."""
    declared = candidate.op.inputs[name]
    values = case.case.values.get(name) or declared.distribution(case.case.dims)
    shapes = shapes_of(declared, case.case.dims)
    times = math.ceil(DRAWN / max(1, sum(map(math.prod, shapes))))
    return [
        sampled(name, values, shape, f"{name}|{place}|{time}|{candidate.seed}", "cpu")
        for time in range(times)
        for place, shape in enumerate(shapes)
    ]
