"""What torch's compiler makes of a provider: results in a graph, and what custom ops declare."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.compare import Comparison
from tinyllama.harness.check.evaluate import Inputs, copied, evaluate
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, worst
from tinyllama.harness.declare.op import Provider
from tinyllama.harness.machine.modes import DispatchMode

TORCHS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"}


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
    provider, inputs = candidate.provider, candidate.inputs(case)
    try:
        wrong = _wrong_compiled(candidate, provider, case, inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        text = str(error).strip().partition("\n")[0]
        return case, f"it breaks the graph, or cannot be traced: {text}", Rank.WARNING
    if wrong:  # uncompiled, too, or as of the reference
        excuses = _wrong(candidate, provider, provider.call, case, inputs)
        excuses += _wrong_compiled(candidate, candidate.op["eager"], case, inputs)
        excused = {comparison.name for comparison in excuses}
        wrong = [comparison for comparison in wrong if comparison.name not in excused]
    return (case, str(wrong[0])) if wrong else None


def _wrong_compiled(
    candidate: Candidate, provider: Provider, case: OpCase, inputs: Inputs
) -> list[Comparison]:
    torch.compiler.reset()
    options: Any = {"fullgraph": True, "dynamic": False, "backend": candidate.backend}
    try:
        call = torch.compile(provider.call, **options)
        return _wrong(candidate, provider, call, case, inputs)
    finally:
        torch.compiler.reset()


def _wrong(
    candidate: Candidate,
    provider: Provider,
    call: Callable[..., Any],
    case: OpCase,
    inputs: Inputs,
) -> list[Comparison]:
    results = evaluate(
        candidate.op, call, inputs, provider.overwrites, dtypes=provider.output_dtypes
    )
    return candidate.wrong(case, results, inputs)


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
