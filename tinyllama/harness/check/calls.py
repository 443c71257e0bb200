"""Successive calls: what a first call leaves behind, and what a second one makes of it."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyllama.harness.check import arguments, between, memory, state
from tinyllama.harness.check.between import differing, unlike
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import SLACK, apart, near, norm_of_finite
from tinyllama.harness.check.evaluate import (
    GradientError,
    Inputs,
    Leaves,
    copied,
    evaluate,
    is_gradient,
)
from tinyllama.harness.check.finding import (
    Candidate,
    Problem,
    Rank,
    Unsupported,
    leaves,
    others,
    worst,
)
from tinyllama.harness.check.first import first_calls
from tinyllama.harness.check.graph import Graph, outputs_of, same_bits
from tinyllama.harness.check.settings import settings
from tinyllama.harness.check.transforms import second, transformed
from tinyllama.harness.check.unusual import having

REPEATS = {"cpu": 3, "cuda": 50}
LAST = 4  # call on fresh contents, in inference mode
LARGE = 1024.0  # a factor of upstream gradients, as a loss scale is
LOSS_SCALES = (8192, 512, 32)  # of float16: the first at which no result of the reference overflows
ZEROS = "an upstream gradient that is zero in places"
ONES = "an upstream gradient of ones and zeros, as of a loss times a mask,"
MOST_APART = 1e-3  # of gradients of two parts of an upstream gradient, added up, from the whole's


def fresh_contents(candidate: Candidate) -> Problem:
    """New contents in the same tensors give new results and do not change earlier ones: nothing is
    cached by address, and no output memory is used twice. Nothing else is left behind, and how
    tensors lie to each other makes no difference (`tinyllama.harness.check.memory`)."""
    case = candidate.telling()
    if candidate.op.mutated:
        return memory.in_place(candidate, case)
    every = memory.sharing, memory.neighbours, state.left_behind, state.of_others, memory.parameters
    looks = [partial(look, candidate) for look in (*every, arguments.other_arguments)]
    of_calls = () if candidate.op.differentiable else (between.in_threads, between.kept_alive)
    in_turn = partial(_in_turn, candidate, case), partial(first_calls, candidate)
    advised = partial(memory.masked, candidate, case), partial(arguments.from_elsewhere, candidate)
    others = [partial(look, candidate, case) for look in of_calls]  # else `backward_twice` asks
    return worst(look() for look in (*looks, *in_turn, *others, *advised))


def _in_turn(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong with calls in a row."""
    first, second = (candidate.inputs(case, draw) for draw in (0, 1))
    second = _other(first, second)
    args = {name: copied(value) for name, value in first.args.items()}
    early = _forward(candidate, args, first)
    kept = [output.clone() for output in early]
    for tensor, fresh in zip(leaves(args), leaves(second.args), strict=True):
        tensor.copy_(fresh)
    gradients = {
        name: value for name, value in candidate.results(second).items() if is_gradient(name)
    }
    references = case.references(second)
    for call in range(2, LAST + 1):
        mode = torch.inference_mode if call == LAST else torch.no_grad
        # Tensors that are new have the version, as the address, that those of the first call had.
        given = args if call == 2 else memory.again(args)
        before = [copied(tensor) for tensor in leaves(given)]
        late = _forward(candidate, given, second, mode)
        for name, tensor, copy in zip(_names(given), leaves(given), before, strict=True):
            if not same_bits(tensor, copy):
                return case, f"call {call}, of which no gradient is wanted, changed {name}"
        for which, output, copy in zip(candidate.op.outputs, early, kept, strict=True):
            if not same_bits(output, copy):
                return case, f"call {call} changed {which} of the first"
        results = {**dict(zip(candidate.op.outputs, late, strict=True)), **gradients}
        if wrong := candidate.wrong(case, results, second, references):
            return case, f"call {call}, on new contents: {wrong[0]}"
    for tensor, fresh in zip(leaves(given), leaves(first.args), strict=True):
        tensor.data.copy_(fresh)  # which autograd does not count as a change
    late = _forward(candidate, given, first)
    named = {n: one for n, one in candidate.results(first).items() if is_gradient(n)}
    results = {**dict(zip(candidate.op.outputs, late, strict=True)), **named}
    if wrong := candidate.wrong(case, results, first):
        return case, f"call {LAST + 1}, on contents that were changed through .data: {wrong[0]}"
    return None


def _forward(
    candidate: Candidate, args: Leaves, inputs: Inputs, mode: Callable[[], Any] = torch.no_grad
) -> tuple[torch.Tensor, ...]:
    with mode():
        return outputs_of(candidate, args, inputs.params)


def _other(first: Inputs, second: Inputs) -> Inputs:
    """The second with other values in tables too, which are the same in each draw: in the order of
    the first axis reversed."""

    def other(one: Any, same: Any) -> Any:
        table = isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim()
        return one.flip(0) if table and same_bits(one, same) else one

    return replace(second, args={n: other(one, first.args[n]) for n, one in second.args.items()})


def _names(args: Leaves) -> Iterator[str]:
    for name, value in args.items():
        yield from [name] * (len(value) if isinstance(value, list) else 1)


def _differentiable(candidate: Candidate) -> OpCase:
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    return candidate.telling()


def _gradients(candidate: Candidate, case: OpCase, graph: Graph) -> dict[str, torch.Tensor]:
    """What other gradients are compared with.

    Raises GradientError for one that is all zero where the reference's is not: zeros are equal to
    zeros, and in any proportion.
    """
    gradients = graph.gradients()
    _refuse_zeros(candidate, case, gradients)
    return gradients


def _refuse_zeros(
    candidate: Candidate, case: OpCase, gradients: Mapping[str, torch.Tensor]
) -> None:
    zero = [name for name, gradient in gradients.items() if not gradient.any()]
    if zero and candidate.tells(case):
        raise GradientError(f"{candidate.op.name}: all of the gradient is 0: {', '.join(zero)}")


def backward_twice(candidate: Candidate) -> Problem:
    """A second backward through one graph, after another call, gives the same gradients: backward
    overwrites nothing that was saved, and each call saves its own. No call changes what another one
    has given, outputs or gradients. What a backward pass needs is known to autograd, and
    released."""
    case = _differentiable(candidate)
    if candidate.provider.overwrites:
        raise Unsupported(f"its backward overwrites {', '.join(candidate.provider.overwrites)}")
    graph = Graph(candidate, candidate.inputs(case))
    first = _gradients(candidate, case, graph)
    again = graph.gradients()
    if wrong := list(differing(first, again)):
        return case, f"other gradients the second time: {', '.join(wrong)}"
    with ThreadPoolExecutor(1) as thread:  # as of a GPU, whose backward pass has its own
        elsewhere = thread.submit(graph.gradients).result()
    if wrong := list(unlike(first, elsewhere)):
        return case, f"other gradients in another thread: {', '.join(wrong)}"
    outputs = {name: copied(value.detach()) for name, value in graph.outputs.items()}
    kept = graph.gradients(copy=False)
    for what, makes in _other_calls(candidate, case, graph.args):
        beside = [other for make in makes if (other := make()) is not None]
        if not beside:
            continue
        if wrong := list(differing(outputs, graph.outputs)):
            return case, f"{what} changes outputs of the first: {', '.join(wrong)}"
        if wrong := list(differing(first, graph.gradients())):
            return case, f"{what} changes the gradients of the first: {', '.join(wrong)}"
        for other in beside:
            other.gradients()
        if wrong := list(differing(first, kept)):
            text = "another backward pass changes gradients that the first one has given"
            return case, f"{text}: {', '.join(wrong)}"
    of_gradients = between.behind_a_change, between.behind_a_gradient, between.accumulated
    looks: list[Callable[..., Problem]]
    looks = [partial(look, first=first) for look in (*of_gradients, between.with_a_gradient)]
    others = between.moved, between.in_threads, between.kept_alive
    return worst(look(candidate, case) for look in (*looks, *others))


def _other_calls(
    candidate: Candidate, case: OpCase, args: Leaves
) -> Iterator[tuple[str, list[Callable[[], Graph | None]]]]:
    """Calls that come, one after the other, between a forward pass and its backward pass: on other
    contents, also where some inputs are the same tensors, with other settings, and of another
    shape. None where such a call is refused. args: of the forward pass."""

    def tried(inputs: Inputs) -> Graph | None:
        try:
            return Graph(candidate, inputs)
        except Exception:  # which other checks are about
            return None

    inputs = candidate.inputs(case, draw=1)
    another = partial(Graph, candidate, inputs)
    yield "another call", [another]
    yield "one of several other calls", [another] * between.IN_FLIGHT  # each with a workspace
    names = list(args)
    for kept in (names[:1], names[1:]) if len(names) > 1 else ():  # a state is kept for either
        mixed = {n: args[n] if n in kept else copied(one) for n, one in inputs.args.items()}
        given = replace(inputs, args=mixed)
        same = partial(Graph, candidate, given, prepare=lambda value: value)
        yield f"another call with the same {' and '.join(kept)}", [same]
    changed = {name: value for name, value in settings(candidate, case)}
    if changed:
        other = replace(inputs, params={**inputs.params, **changed})
        yield "a call with other settings", [partial(tried, other)]
    for one in candidate.plain():
        if one.dtype is case.dtype and one.case.dims != case.case.dims:
            yield "a call of another shape", [partial(tried, candidate.inputs(one))]
            break


def scaled_upstream(candidate: Candidate) -> Problem:
    """A multiple of the upstream gradient, by a half or by a large factor, gives that multiple of
    every gradient. Two parts of it, each zero where the other is not, add up to the whole's. One
    that is not finite gives no finite gradient where no other implementation gives one.

    The norm of the difference is at most that of the gradient times the epsilon of the coarsest
    dtype that the provider takes, which it may compute in: there halves of subnormals are rounded.
    """
    case = _differentiable(candidate)
    whole = _gradients(candidate, case, Graph(candidate, candidate.inputs(case)))
    most = max(torch.finfo(dtype).eps for dtype in candidate.dtypes)

    def found(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        return Graph(candidate, candidate.inputs(case)).gradients(change)

    def unlike(got: Mapping[str, torch.Tensor], factor: float, most: float) -> list[str]:
        expected = {name: one.double() * factor for name, one in whole.items()}
        return [name for name, one in expected.items() if not near(got[name], one, most)]

    wrong = unlike(found(lambda g: g * 0.5), 0.5, most)
    if case.dtype is not torch.float16:  # which may overflow
        wrong = wrong or unlike(found(lambda g: g * LARGE), LARGE, most)
    if wrong:
        return case, f"not in proportion: {', '.join(wrong)}"
    least = max(4 * most, MOST_APART)
    for what, of_ones in ((ZEROS, False), (ONES, True)):
        whole = found(torch.ones_like) if of_ones else whole
        parts = [found(_Part(side, of_ones=of_ones)) for side in (True, False)]
        for name, expected in whole.items():
            one, other = (part[name].double() for part in parts)
            # Of a softmax, the gradient of ones is zero.
            size = least * max(map(norm_of_finite, (one, other)))
            if not near(one + other, expected, least, size):
                return case, f"{what} gives other gradients: {name}"
    return _in_half(candidate) or _not_finite(candidate, case)


def _in_half(candidate: Candidate) -> Problem:
    """What is wrong in float16 with an upstream gradient times a loss scale, as large as the
    reference takes it: a product on the way may overflow."""
    cases = [one for one in candidate.plain() if one.dtype is torch.float16]
    if (case := next(filter(candidate.tells, cases), None)) is None:
        return None
    for scale in LOSS_SCALES:
        inputs = candidate.inputs(case)
        scaled = {n: g if g is None else g * scale for n, g in inputs.upstream.items()}
        given = replace(inputs, upstream=scaled)
        reference = evaluate(candidate.op, candidate.op["eager"].call, given)
        if all(value.isfinite().all() for value in reference.values()):
            wrong = candidate.wrong(case, candidate.results(given), given)
            return (case, f"with a loss scale of {scale}: {wrong[0]}") if wrong else None
    return None


def _not_finite(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where one element of each upstream gradient is infinite, or a NaN: a gradient
    is finite where that of no other implementation is. So a loss scale that is too large is found
    out, and the step left out."""
    inputs = candidate.inputs(case)
    for value, rank in ((math.inf, Rank.WRONG), (math.nan, Rank.WARNING)):
        upstream = {n: g if g is None else having(g, value) for n, g in inputs.upstream.items()}
        given = replace(inputs, upstream=upstream)
        known = [evaluate(candidate.op, candidate.op["eager"].call, given)]
        known += others(candidate, given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, which interprets
            found = Graph(candidate, given).gradients()
        for of, one in found.items():
            name = f"grad {of}"
            elsewhere = any(other[name].isfinite().all() for other in known if name in other)
            if one.isfinite().all() and not elsewhere:
                return case, f"{value} in an upstream gradient does not reach {name}", rank
    return None


class _Part:
    """One of two parts of each upstream gradient, which add up to it. The first has about half
    the elements, but none of every third row; which rows these are differs between tensors.
    of_ones: of a gradient of ones in its place."""

    def __init__(self, part: bool, *, of_ones: bool = False) -> None:
        self.part, self.of_ones, self.tensors = part, of_ones, 0
        self.made = torch.Generator().manual_seed(0)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = torch.ones_like(gradient) if self.of_ones else gradient
        keep = torch.rand(gradient.shape, generator=self.made) < 0.5
        if gradient.dim() > 1:
            rows = torch.arange(gradient.shape[:-1].numel()).view(gradient.shape[:-1])
            keep &= ((rows + self.tensors) % 3 != 0)[..., None]
        self.tensors += 1
        return gradient * (keep == self.part).to(gradient)


def two_consumers(candidate: Candidate) -> Problem:
    """Backward does not change an upstream gradient that another operation uses too."""
    case = _differentiable(candidate)
    if given := [name for name in candidate.provider.overwrites if name in candidate.op.outputs]:
        raise Unsupported(f"its backward overwrites the upstream gradient of {', '.join(given)}")
    expected = _gradients(candidate, case, Graph(candidate, candidate.inputs(case)))
    graph = Graph(candidate, candidate.inputs(case))  # the first may have overwritten what it saved
    # The sum hands one gradient tensor to both of its terms.
    others = {n: torch.zeros_like(g, requires_grad=True) for n, g in graph.upstream.items()}
    total = torch.stack(
        [
            ((graph.outputs[name] + others[name]).double() * gradient.double()).sum()
            for name, gradient in graph.upstream.items()
        ]
    )
    wanted = {**{name: graph.args[name] for name in candidate.op.differentiable}, **others}
    found = torch.autograd.grad(total.sum(), list(wanted.values()), allow_unused=True)
    got = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    for name, gradient in graph.upstream.items():
        if not same_bits(got.pop(name), gradient):
            return case, f"the gradient of {name} was changed for its other consumer"
    if wrong := list(differing(expected, got)):
        return case, f"other gradients beside a second consumer: {', '.join(wrong)}"
    return None


def determinism(candidate: Candidate) -> Problem:
    """Equal inputs give equal bits, on the device types for which the provider declares it.

    Each call gets copies: one that changes its inputs would not be given equal ones."""
    case = candidate.telling()
    kind = candidate.device.type
    if kind not in candidate.provider.deterministic:
        raise Unsupported(f"declared not to be deterministic on {kind}")
    inputs, candidate = candidate.inputs(case), candidate.shielded()
    expected = candidate.results(inputs)
    _refuse_zeros(candidate, case, {n: one for n, one in expected.items() if is_gradient(n)})
    for repeat in range(1, REPEATS[kind]):
        found = candidate.results(inputs)
        for name, value in expected.items():
            if not same_bits(found[name], value):
                return case, f"{name} has other bits in repeat {repeat}"
    return None


def second_derivative(candidate: Candidate) -> Problem:
    """A second derivative is right, or raises; silently detached ones fail, which is advice: to
    mark the backward pass as ``once_differentiable``."""
    case = _differentiable(candidate)
    declared = candidate.provider.double_backward
    inputs = candidate.inputs(case)
    _gradients(candidate, case, Graph(candidate, inputs))
    # Kernels do not take float64, nor does a function that is asked as a provider with kernels.
    double = declared and "triton" not in candidate.provider.requires
    try:
        found = second(candidate, candidate.provider.call, inputs.double() if double else inputs)
    except RuntimeError as error:
        text = f"declared to have a second derivative: {error}"
        return worst(
            (transformed(candidate, case), (case, text, Rank.REFUSED) if declared else None)
        )
    if found is None:
        text = "first derivatives under create_graph are silently detached: mark the backward "
        text += "pass as once_differentiable"
        return transformed(candidate, case) or (case, text, Rank.WARNING)
    most = 1e-8 if double else MOST_APART
    wrong = ", ".join(_wrong_second(candidate, inputs, found, most))
    once = "mark the backward pass as once_differentiable"
    if declared:
        text = f"its second derivative by {wrong} is not the reference's"
        return (case, text) if wrong else transformed(candidate, case)
    text = "declared to have no second derivative, and gives "
    if wrong:
        return case, f"{text}a wrong one by {wrong}: {once}"
    return case, f"{text}one: {once}, or declare it", Rank.REFUSED


def _wrong_second(
    candidate: Candidate, inputs: Inputs, found: Mapping[str, torch.Tensor], most: float
) -> Iterator[str]:
    """The inputs by which a second derivative is not the reference's. most: of its norm."""
    eager = candidate.op["eager"].call
    right, usual = second(candidate, eager, inputs.double()), second(candidate, eager, inputs)
    if right is None or usual is None:  # it is zero
        return
    for name, value in right.items():
        of_float32 = SLACK * apart(usual[name], value).norm().item()
        if not near(found.get(name, torch.zeros_like(value)), value, most, of_float32):
            yield name
