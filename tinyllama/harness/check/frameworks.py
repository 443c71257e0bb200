"""A call under autocast, compiled, captured, on another stream, or with an empty batch."""

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.blocks import MOST
from tinyllama.harness.check.cases import OpCase, References, elements
from tinyllama.harness.check.compare import compare, near, same_bits
from tinyllama.harness.check.crash import place, refuses
from tinyllama.harness.check.evaluate import ContractError, Inputs, copied, evaluate
from tinyllama.harness.check.finding import (
    Candidate,
    Problem,
    Rank,
    Unsupported,
    leaves,
    worst,
)
from tinyllama.harness.check.history import Graph
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.check.resizing import UNLIKE, resized
from tinyllama.harness.check.sizes import OF_EXTREMES
from tinyllama.harness.check.traced import custom_ops, of_other_sizes
from tinyllama.harness.machine.device import cannot, synchronize

DRAWS = 4  # that estimate how sensitive a result is to rounding
NARROW = torch.bfloat16, torch.float16  # of autocast


def autocast(candidate: Candidate) -> Problem:
    """Under autocast, outputs and gradients are as accurate as the reference's under autocast.

    Where autocast changes the reference's results and none of the candidate's, it is ignored: the
    results are right, and cost what they cost without it. That is advice.
    """
    if candidate.op.mutated:
        raise Unsupported("it works in place, which autocast leaves alone")
    case = candidate.smallest(torch.float32)
    each = (_autocast(candidate, narrow, case) for narrow in NARROW)
    looks = (look(candidate, NARROW[0]) for look in (_mixed, _inside, _long))
    return worst(itertools.chain(each, looks))


def _long(candidate: Candidate, dtype: torch.dtype) -> Problem:
    """What is wrong where an axis is long: positions that become bfloat16 are wrong beyond 256. Not
    asked of a candidate whose results autocast does not change."""
    case = candidate.smallest(torch.float32)
    inputs, within = candidate.inputs(case), torch.autocast(candidate.device.type, dtype)
    if not _changed(_results(candidate, inputs, within), _results(candidate, inputs, None)):
        return None
    for axis, size in case.case.dims.items():
        long = resized(candidate, case, axis, OF_EXTREMES) if isinstance(size, int) else None
        if long is None or elements(candidate.op, long.case) > MOST or not candidate.takes(long):
            continue
        if (problem := _autocast(candidate, dtype, long, by_rows=False)) is not None:
            return problem
    return None


def _autocast(
    candidate: Candidate, dtype: torch.dtype, case: OpCase, *, by_rows: bool = True
) -> Problem:
    """What is wrong under autocast to this dtype. by_rows: not only as a whole. A row that is zero,
    as the gradient of a query with one key, has no bound, and a long case may have some."""
    inputs = candidate.inputs(case)
    eager = replace(candidate, provider=candidate.op["eager"])
    on, off = (torch.autocast(candidate.device.type, dtype, enabled=on) for on in (True, False))
    under = [_results(one, inputs, on) for one in (candidate, eager)]
    own, reference = (_narrowed(one, dtype) for one in under)
    exact = inputs.double()
    oracle = evaluate(candidate.op, eager.provider.call, exact)
    narrow = inputs.to(dtype)
    moved = [evaluate(candidate.op, eager.provider.call, narrow.perturbed(n)) for n in range(DRAWS)]
    terms = case.magnitudes(exact, oracle)
    references = References(reference, oracle, moved, magnitudes=terms, terms=candidate.op.terms)
    slack = candidate.slack.get(dtype, candidate.slack[case.dtype])
    for name in oracle:
        if name not in own:
            return case, f"{name} is missing"
        found = compare(name, own[name], references.of(name), slack=slack)
        if any(not one.passed and (by_rows or one.norm == "tensor") for one in found.checks):
            return case, f"to {dtype}: {found}"
    if dtype is not NARROW[0]:
        return None
    plain = [_results(one, inputs, off) for one in (candidate, eager)]
    if list(map(_changed, under, plain)) == [False, True]:
        text = "autocast is ignored: it changes the reference's results, and none of these"
        return case, text, Rank.WARNING
    return None


def _mixed(candidate: Candidate, dtype: torch.dtype) -> Problem:
    """What is wrong where the first input comes in the dtype of autocast, from a product, and the
    others are parameters in float32. An error refuses that."""
    case, op = candidate.smallest(torch.float32), candidate.op
    inputs = candidate.inputs(case)
    free = [name for name, one in op.inputs.items() if one.dtype is None and not one.many]
    if len(free) < 2:
        return None
    given = replace(inputs, args={**inputs.args, free[0]: inputs.args[free[0]].to(dtype)})
    eager = replace(candidate, provider=op["eager"])
    try:
        under = [
            _narrowed(_results(one, given, torch.autocast(candidate.device.type, dtype)), dtype)
            for one in (candidate, eager)
        ]
    except Exception:
        return None
    own, reference = under
    exact, narrow = given.double(), given.to(dtype)
    oracle = evaluate(op, eager.provider.call, exact)
    moved = [evaluate(op, eager.provider.call, narrow.perturbed(n)) for n in range(DRAWS)]
    terms = case.magnitudes(exact, oracle)
    references = References(reference, oracle, moved, magnitudes=terms, terms=op.terms)
    slack = candidate.slack.get(dtype, candidate.slack[case.dtype])
    for name in oracle:
        found = compare(name, own[name], references.of(name), slack=slack)
        if not found.passed:
            return case, f"under autocast, where {free[0]} alone is {dtype}: {found}"
    return None


def _inside(candidate: Candidate, dtype: torch.dtype) -> Problem:
    """What is wrong where the backward pass runs under autocast, too, as `loss.backward()` within
    the context does: an error, or what is not finite, where the reference has none. How precise it
    is there is not asked: gradients may cancel."""
    if not candidate.op.differentiable:
        return None
    case = candidate.smallest(torch.float32)
    inputs = candidate.inputs(case)
    each = []
    for one in (replace(candidate, provider=candidate.op["eager"]), candidate):
        with torch.autocast(candidate.device.type, dtype):
            graph = Graph(one, inputs)
            try:
                each.append(graph.gradients())
            except RuntimeError as error:
                if one is not candidate:
                    return None
                text = str(error).partition(chr(10))[0]
                return case, f"a backward pass under autocast: {place(error)}{text}"
    for name, right in each[0].items():
        if right.isfinite().all() and not each[1][name].isfinite().all():
            return case, f"a backward pass under autocast: grad {name} is not finite"
    return None


def _results(candidate: Candidate, inputs: Inputs, within: Any) -> dict[str, torch.Tensor]:
    graph = Graph(candidate, inputs, within=within)
    gradients = graph.gradients() if candidate.op.differentiable else {}
    found = {**graph.outputs, **{f"grad {name}": g for name, g in gradients.items()}}
    return {name: value.detach() for name, value in found.items()}


def _narrowed(results: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: value.to(dtype if value.is_floating_point() else value.dtype)
        for name, value in results.items()
    }


def _changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether some result has another dtype or other bits."""
    return any(
        value.dtype != other[name].dtype or not same_bits(value, other[name])
        for name, value in one.items()
    )


def compiled(candidate: Candidate) -> Problem:
    """Compiled in one graph, results are as accurate as uncompiled ones; a custom op that is
    derived from the provider passes torch's own checks."""
    derived = candidate.provider.derived
    if candidate.op.mutated:
        raise Unsupported("it works in place, and no compiled step contains it")
    if derived is None and candidate.interpreted:
        raise Unsupported("the compiler traces a kernel's launch, which here is interpreted")
    case = candidate.smallest()
    inputs = candidate.inputs(case)
    torch.compiler.reset()
    call = torch.compile(
        candidate.provider.call, fullgraph=True, dynamic=False, backend=candidate.backend
    )
    try:
        own = candidate.provider
        results = evaluate(candidate.op, call, inputs, own.overwrites, dtypes=own.output_dtypes)
    except torch._dynamo.exc.TorchDynamoException as error:
        return case, f"not one graph: {str(error).strip().partition(chr(10))[0]}"
    finally:
        torch.compiler.reset()
    if wrong := candidate.wrong(case, results, inputs):
        return case, str(wrong[0])
    if derived is None:
        return worst(look(candidate, case) for look in (custom_ops, of_other_sizes))
    args = {name: copied(value) for name, value in inputs.args.items()}
    for name in candidate.op.differentiable:
        args[name].requires_grad_()
    params = {**candidate.op.params, **inputs.params}
    declared: Any = derived.custom_op
    checked = torch.library.opcheck(
        declared, (*args.values(), *params.values()), raise_exception=False
    )
    failed = [f"{name}: {found}" for name, found in checked.items() if found != "SUCCESS"]
    return (case, f"opcheck: {failed[0].partition(chr(10))[0]}") if failed else None


def captured(candidate: Candidate) -> Problem:
    """A captured forward and backward, replayed on new contents, gives the results of a call."""
    if reason := cannot("capture", candidate.device):
        raise Unsupported(reason)
    if candidate.provider.waits:
        raise Unsupported("it reads a value back from the device")
    if candidate.op.mutated:
        raise Unsupported("it works in place: a captured training step covers it")
    case = candidate.smallest()
    first, second = (candidate.inputs(case, draw) for draw in (0, 1))
    static = Graph(candidate, first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            _run(candidate, static, first)
    synchronize(candidate.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _run(candidate, static, first)
    with torch.no_grad():
        for mine, fresh in zip(leaves(static.args), leaves(second.args), strict=True):
            mine.copy_(fresh)
        for name, value in second.upstream.items():
            if value is not None:
                static.upstream[name].copy_(value)
    graph.replay()
    synchronize(candidate.device)
    if wrong := candidate.wrong(case, found, second):
        return case, f"replayed on new contents: {wrong[0]}"
    return None


def side_stream(candidate: Candidate) -> Problem:
    """A call on another stream runs after the work that was queued there before it."""
    if reason := cannot("gpu", candidate.device):
        raise Unsupported(reason)
    if candidate.op.mutated:
        raise Unsupported("it works in place: a captured training step covers it")
    case = candidate.smallest()
    inputs = candidate.inputs(case)
    args = {name: copied(value) for name, value in inputs.args.items()}
    static = Graph(candidate, inputs)
    synchronize(candidate.device)
    with torch.cuda.stream(torch.cuda.Stream()):
        with torch.no_grad():
            for name, value in static.args.items():
                value.zero_()
                torch.cuda._sleep(10_000_000)  # cycles: some milliseconds
                value.copy_(args[name])
        found = _run(candidate, static, inputs)
    synchronize(candidate.device)
    if wrong := candidate.wrong(case, found, inputs):
        return case, str(wrong[0])
    return None


def _run(candidate: Candidate, static: Graph, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A call and its gradients on the tensors of ``static``, in place."""
    detached = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in static.args.items()
    }
    given = Inputs(detached, dict(static.upstream), inputs.params)
    again = Graph(candidate, given, prepare=lambda value: value)
    gradients = again.gradients(lambda g: g) if candidate.op.differentiable else {}
    return {
        **{name: value.detach() for name, value in again.outputs.items()},
        **{f"grad {name}": gradient for name, gradient in gradients.items()},
    }


def empty_batch(candidate: Candidate) -> Problem:
    """A batch of no rows gives the reference's results: empty outputs, gradients of zero. What is
    NaN there, as the mean of nothing, may be anything.

    Rows are those of the first output, and of the first input where that has others.
    """
    case, op = candidate.smallest(), candidate.op
    each = [[one.axes[0] for one in side.values() if one.axes] for side in (op.outputs, op.inputs)]
    first = dict.fromkeys(axes[0] for axes in each if axes)
    axes = [axis for axis in first if isinstance(case.case.dims.get(axis), int)]
    if op.mutated or not axes:
        raise Unsupported("it has no batch")
    taken, refused = False, ""
    declined: Problem = None
    for axis in axes:
        none = replace(case, case=case.case.resized(**{axis: 0}))
        try:
            inputs = candidate.inputs(none)
            expected = evaluate(op, op["eager"].call, inputs)
        except Exception as error:
            refused = str(error)
            continue
        taken = True
        try:
            found = candidate.results(inputs, PoisonedMemory())
        except Exception as error:
            if isinstance(error, ContractError) or not refuses(error):
                raise
            text = f"{place(error)}{type(error).__name__}: {error}"
            declined = declined or (none, text, Rank.REFUSED)
            continue
        for name, value in expected.items():
            undefined = value.numel() > 0 and bool(value.isnan().all())
            own = found.get(name)
            if own is None or not (undefined or same_bits(own, value.to(own.dtype))):
                return none, f"{name} is not the reference's"
    if not taken:
        raise Unsupported(f"the reference takes no empty batch: {refused}")
    return declined or _empty_elsewhere(candidate, case, axes)


def _empty_elsewhere(candidate: Candidate, case: OpCase, but: Collection[str]) -> Problem:
    """What is wrong where an axis not in `but` has no entry: a sum of nothing is 0, or what the
    reference gives. A provider may refuse it by an error."""
    for axis, size in case.case.dims.items():
        none = replace(case, case=case.case.resized(**{axis: 0}))
        if axis in but or not isinstance(size, int) or none.unsupported():
            continue
        try:
            inputs = candidate.inputs(none)
            right = evaluate(candidate.op, candidate.op["eager"].call, inputs.double())
            found = candidate.results(inputs, PoisonedMemory())
        except Exception:
            continue
        for name, value in right.items():
            # A maximum of nothing is infinite.
            if not (value.isnan().all() or near(found.get(name, value), value, UNLIKE)):
                return none, f"where {axis} is 0, {name} is not the reference's"
    return None
