"""A call under autocast, captured, or on another stream."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import Comparison, same_bits
from tinyllama.harness.check.crash import place
from tinyllama.harness.check.evaluate import Inputs, copied
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, leaves
from tinyllama.harness.check.history import Graph
from tinyllama.harness.check.points import MOST_WORK_OF_VALUES, VARIED_LENGTH
from tinyllama.harness.check.resizing import resized
from tinyllama.harness.machine.device import cannot, synchronize

DRAWS = 4  # that estimate how sensitive a result is to rounding
NARROW = torch.bfloat16, torch.float16  # of autocast
Results = dict[str, torch.Tensor]


def autocast(candidate: Candidate) -> Problem:
    """Under autocast, outputs and gradients are as accurate as the reference's under autocast.

    Where autocast changes the reference's results and none of the candidate's, it is ignored: the
    results are right, and cost what they cost without it. That is a warning.
    """
    if candidate.op.mutated:
        raise Unsupported("it works in place, which autocast leaves alone")
    case = candidate.smallest(torch.float32)
    inputs = candidate.inputs(case)
    for dtype in NARROW:
        if wrong := _wrong_under_autocast(candidate, case, inputs, dtype):
            return case, f"to {dtype}: {wrong[0]}"
    if problem := _narrow_first_input(candidate, case, inputs) or _backward_inside(candidate, case):
        return problem
    if _changed_by_autocast(candidate, inputs):
        for long in _long_axes(candidate, case):
            if wrong := _wrong_under_autocast(candidate, long, candidate.inputs(long), NARROW[0]):
                return long, f"to {NARROW[0]}: {wrong[0]}"
    elif _changed_by_autocast(candidate.reference, inputs):
        text = "autocast is ignored: it changes the reference's results, and none of these"
        return case, text, Rank.WARNING
    return None


def _wrong_under_autocast(
    candidate: Candidate, case: OpCase, inputs: Inputs, dtype: torch.dtype
) -> list[Comparison]:
    narrow = inputs.to(dtype)
    results, eager = (
        {name: x.to(dtype) if x.is_floating_point() else x for name, x in of_side.items()}
        for of_side in (_results(side, inputs, dtype) for side in (candidate, candidate.reference))
    )
    references = replace(
        case.references(inputs.double(), draws=0),
        eager=eager,
        perturbed=[candidate.reference_results(narrow.perturbed(draw)) for draw in range(DRAWS)],
    )
    slack = candidate.slack.get(dtype, candidate.slack[case.dtype])
    compared = case.judge(results, inputs, slack=slack, references=references)
    # Zeros, as the gradient of a query with one key, have no bound under autocast.
    wrong = [c for c in compared if not (c.passed or c.may_cancel)]
    return [c for c in wrong if references.oracle[c.name].any()]


def _narrow_first_input(candidate: Candidate, case: OpCase, inputs: Inputs) -> Problem:
    """What is wrong where the first input comes in the dtype of autocast, from a product, and the
    others are parameters in float32. An error refuses that."""
    declared = candidate.op.inputs.items()
    names = [name for name, tensor in declared if tensor.dtype is None and not tensor.many]
    if len(names) < 2:
        return None
    name, dtype = names[0], NARROW[0]
    mixed = replace(inputs, args={**inputs.args, name: inputs.args[name].to(dtype)})
    try:
        wrong = _wrong_under_autocast(candidate, case, mixed, dtype)
    except Exception:
        return None
    return (case, f"under autocast, where {name} alone is {dtype}: {wrong[0]}") if wrong else None


def _backward_inside(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong where the backward pass runs under autocast, too, as `loss.backward()` within
    the context does: an error, where the reference raises none."""
    if not candidate.op.differentiable:
        return None
    inputs = candidate.inputs(case)
    with torch.autocast(candidate.device.type, NARROW[0]):
        try:
            Graph(candidate.reference, inputs).gradients()
        except RuntimeError:
            return None
        try:
            Graph(candidate, inputs).gradients()
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            return case, f"a backward pass under autocast: {place(error)}{text}"
    return None


def _long_axes(candidate: Candidate, case: OpCase) -> Iterator[OpCase]:
    """The case with a long axis: positions that become bfloat16 are wrong beyond 256."""
    for axis, size in case.case.dims.items():
        long = resized(candidate, case, axis, VARIED_LENGTH) if isinstance(size, int) else None
        small = long is not None and elements(candidate.op, long.case) <= MOST_WORK_OF_VALUES
        if small and candidate.takes(long):
            yield long


def _results(candidate: Candidate, inputs: Inputs, dtype: torch.dtype | None) -> Results:
    """Outputs and gradients of a call under autocast to this dtype; None: without autocast."""
    within = torch.autocast(candidate.device.type, dtype or NARROW[0], enabled=dtype is not None)
    return Graph(candidate, inputs, within=within).results()


def _changed_by_autocast(candidate: Candidate, inputs: Inputs) -> bool:
    """Whether some result has another dtype or other bits under autocast."""
    within, without = (_results(candidate, inputs, dtype) for dtype in (NARROW[0], None))
    return any(
        value.dtype != without[name].dtype or not same_bits(value, without[name])
        for name, value in within.items()
    )


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
        results = _run(candidate, static, first)
    with torch.no_grad():
        for static_value, fresh in zip(leaves(static.args), leaves(second.args), strict=True):
            static_value.copy_(fresh)
        for name, value in second.upstream.items():
            if value is not None:
                static.upstream[name].copy_(value)
    graph.replay()
    synchronize(candidate.device)
    if wrong := candidate.wrong(case, results, second):
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
        results = _run(candidate, static, inputs)
    synchronize(candidate.device)
    if wrong := candidate.wrong(case, results, inputs):
        return case, str(wrong[0])
    return None


def _run(candidate: Candidate, static: Graph, inputs: Inputs) -> Results:
    """A call and its gradients on the tensors of ``static``, in place."""
    args = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in static.args.items()
    }
    in_place = Inputs(args, dict(static.upstream), inputs.params)
    return Graph(candidate, in_place, prepare=lambda value: value).results(lambda g: g)
