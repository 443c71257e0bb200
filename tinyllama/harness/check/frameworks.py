"""What torch makes of a provider: autograd's second derivatives, autocast, the compiler, captured
graphs and streams."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tinyllama.harness.check.candidate import Candidate, Problem, Unsupported, leaves, worst
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import SLACK, Comparison, apart, near, same_bits
from tinyllama.harness.check.crash import place
from tinyllama.harness.check.evaluate import Inputs, copied, evaluate, raising_in
from tinyllama.harness.check.finding import Rank
from tinyllama.harness.check.history import Graph
from tinyllama.harness.check.points import MOST_WORK_OF_VALUES, VARIED_LENGTH
from tinyllama.harness.declare.op import Provider
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.harness.machine.modes import DispatchMode

DRAWS = 4  # that estimate how sensitive a result is to rounding
NARROW = torch.bfloat16, torch.float16  # of autocast
Results = dict[str, torch.Tensor]
TORCHS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"}
MOST_ERROR = 1e-3  # of the norm of a result
ONCE = "mark the backward pass as once_differentiable"


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
            return case, f"under autocast to {dtype}: {wrong[0]}"
    if problem := _narrow_first_input(candidate, case, inputs) or _backward_inside(candidate, case):
        return problem
    if _changed_by_autocast(candidate, inputs):
        for long in _long_axes(candidate, case):
            if wrong := _wrong_under_autocast(candidate, long, candidate.inputs(long), NARROW[0]):
                return long, f"under autocast to {NARROW[0]}: {wrong[0]}"
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
    the context does: an error, or what is not finite, where the reference has none. How precise it
    is there is not asked: gradients may cancel."""
    if not candidate.op.differentiable:
        return None
    inputs = candidate.inputs(case)
    with torch.autocast(candidate.device.type, NARROW[0]):
        try:
            expected = Graph(candidate.reference, inputs).gradients()
        except RuntimeError:
            return None
        try:
            gradients = Graph(candidate, inputs).gradients()
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            return case, f"a backward pass under autocast: {place(error)}{text}"
    for name, right in expected.items():
        if right.isfinite().all() and not gradients[name].isfinite().all():
            return case, f"a backward pass under autocast: grad {name} is not finite"
    return None


def _long_axes(candidate: Candidate, case: OpCase) -> Iterator[OpCase]:
    """The case with a long axis: positions that become bfloat16 are wrong beyond 256."""
    for axis, size in case.case.dims.items():
        long = candidate.resized(case, axis, VARIED_LENGTH) if isinstance(size, int) else None
        if long is None or elements(candidate.op, long.case) > MOST_WORK_OF_VALUES:
            continue
        if candidate.takes(long):
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
    graph = Graph(candidate, in_place, prepare=lambda value: value)
    return graph.results([*graph.upstream.values()])


def compiled(candidate: Candidate) -> Problem:
    """A graph that ``torch.compile`` makes of the provider gives results as accurate as a call's,
    and custom ops pass ``torch.library.opcheck``. What breaks the graph or cannot be traced is a
    warning."""
    if candidate.op.mutated:
        raise Unsupported("it works in place, and no compiled step contains it")
    if candidate.provider.derived is None and candidate.interpreted:
        raise Unsupported("the compiler traces a kernel's launch, which here is interpreted")
    return worst((_wrong_in_graph(candidate, candidate.smallest()), _custom_ops(candidate)))


def _wrong_in_graph(candidate: Candidate, case: OpCase) -> Problem:
    inputs = candidate.inputs(case)
    options: Any = {"fullgraph": True, "dynamic": False, "backend": candidate.backend}

    def wrong(provider: Provider, *, compile: bool = True) -> dict[str, Comparison]:
        torch.compiler.reset()
        call = torch.compile(provider.call, **options) if compile else provider.call
        results = evaluate(
            candidate.op, call, inputs, provider.overwrites, dtypes=provider.output_dtypes
        )
        return {c.name: c for c in candidate.wrong(case, results, inputs)}

    try:
        failures = wrong(candidate.provider)
        if failures:  # uncompiled, too, or as of the reference
            excused = {*wrong(candidate.provider, compile=False), *wrong(candidate.op["eager"])}
            failures = {name: c for name, c in failures.items() if name not in excused}
    except torch._dynamo.exc.TorchDynamoException as error:
        text = str(error).strip().partition("\n")[0]
        return case, f"it breaks the graph, or cannot be traced: {text}", Rank.WARNING
    finally:
        torch.compiler.reset()
    return next(((case, str(comparison)) for comparison in failures.values()), None)


class _Called(DispatchMode):
    """Keeps copies of the arguments of each custom op's first call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in TORCHS and func not in self.calls:
            self.calls[func] = tree_map(_copied, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    return copied(value.detach()) if isinstance(value, torch.Tensor) else value


def _custom_ops(candidate: Candidate) -> Problem:
    """What `torch.library.opcheck` says of the custom ops that calls make: whether what they
    declare to the compiler is what they give, and change. It may hold for one dtype or size."""
    for case in candidate.plain_cases():
        for op, (args, named) in _custom_op_calls(candidate, candidate.inputs(case)).items():
            tests = ("test_schema", "test_faketensor")
            options: Any = {"test_utils": tests, "raise_exception": False}
            answers = torch.library.opcheck(op, args, named, **options)
            for test, answer in answers.items():
                if answer != "SUCCESS":
                    return case, f"opcheck of {op}: {test}: {answer}".partition("\n")[0]
    return None


def _custom_op_calls(candidate: Candidate, inputs: Inputs) -> dict[Any, tuple[Any, dict[str, Any]]]:
    """The custom ops of a call, each with arguments: what the compiler sees of a derived provider,
    or those that the call makes."""
    if candidate.provider.derived is None:
        with _Called() as called:
            candidate.results(inputs)
        return called.calls
    args = {name: copied(value) for name, value in inputs.args.items()}
    for name in candidate.op.differentiable:
        args[name].requires_grad_()
    params = {**candidate.op.params, **inputs.params}
    return {candidate.provider.derived.custom_op: ((*args.values(), *params.values()), {})}


def second_derivative(candidate: Candidate) -> Problem:
    """A second derivative is right, or raises; silently detached ones are a warning: mark the
    backward pass as ``once_differentiable``."""
    if not candidate.op.differentiable:
        raise Unsupported("it has no gradients")
    case = candidate.telling()
    declared = candidate.provider.double_backward
    inputs = candidate.inputs(case)
    Graph(candidate, inputs).gradients()  # which raises an error for one that is missing
    try:
        second = _second(candidate, inputs)
    except RuntimeError as error:
        text = f"declared to have a second derivative: {error}"
        return (case, text, Rank.REFUSED) if declared else None
    if second is None:
        text = f"first derivatives under create_graph are silently detached: {ONCE}"
        return case, text, Rank.WARNING
    right = _second(candidate.reference, inputs.double()) or {}  # none: it is zero
    in_float32 = _second(candidate.reference, inputs) or {}
    names = [
        name
        for name, value in right.items()
        if in_float32
        and not near(
            second.get(name, torch.zeros_like(value)),
            value,
            MOST_ERROR,
            SLACK * apart(in_float32[name], value).norm().item(),
        )
    ]
    wrong = ", ".join(names)
    if declared is not False:
        text = f"its second derivative by {wrong} is not the reference's"
        return (case, text if declared else f"{text}: {ONCE}") if wrong else None
    text = "declared to have no second derivative, and gives "
    if wrong:
        return case, f"{text}a wrong one by {wrong}: {ONCE}"
    return case, f"{text}one: {ONCE}, or declare it", Rank.REFUSED


def _second(candidate: Candidate, inputs: Inputs) -> dict[str, torch.Tensor] | None:
    """Gradients of the squares of the gradients; None where those are detached.

    Raises RuntimeError, torch's own or the provider's, when there are none.
    """
    with raising_in(candidate.op, candidate.provider.call):
        graph = Graph(candidate, inputs)
        upstream = {f"upstream {n}": g.clone() for n, g in graph.upstream.items()}
        sources = {name: graph.args[name] for name in candidate.op.differentiable} | upstream
        outputs = [graph.outputs[name] for name in graph.upstream]
        first = torch.autograd.grad(
            outputs,
            [graph.args[name] for name in candidate.op.differentiable],
            [gradient.requires_grad_() for gradient in upstream.values()],
            create_graph=True,
            allow_unused=True,
        )
        attached = [g for g in first if g is not None and g.requires_grad]
        if not attached:
            return None
        squares = torch.stack([g.double().square().sum() for g in attached]).sum()
        second = torch.autograd.grad(squares, list(sources.values()), allow_unused=True)
        by_name = {name: g for name, g in zip(sources, second, strict=True) if g is not None}
        if not by_name:  # nothing leads to them, and what would raise an error was not reached
            squares.backward()
    return by_name or None
