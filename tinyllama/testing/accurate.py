"""Whether a candidate is as accurate as its reference on some tensors."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase, References, without_cancelled
from tinyllama.harness.check.compare import SLACK, Comparison, near, norm_of_finite
from tinyllama.harness.check.evaluate import ContractError, Inputs, evaluate
from tinyllama.harness.check.judge import run_case
from tinyllama.harness.check.layouts import laid_out
from tinyllama.harness.check.reference import StaysInDouble
from tinyllama.harness.declare.op import Op
from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing.call import Call, Tensors, name_of
from tinyllama.testing.interpreted import interpreted

GIVE = "give oracle=, a function that computes the same in the dtype of its inputs"
SAME = 1e-9  # of the size of results: runs in float64 that are no more apart are alike
DRAWS = (2, 8)  # of inputs moved by a rounding; more where results seem wrong
# The layouts of the upstream gradients, and how a fault says in which call it was.
UPSTREAMS = {"contiguous": "", "summed": " (in a second call, with upstream gradients of stride 0)"}
ALLOWED = (
    f"Allowed is {SLACK:g} times what rounding explains: the error of {{reference}} itself, in the "
    "same dtype, or the change of its result in float64 when each input moves by a rounding."
)


def assert_accurate(
    candidate: Callable[..., Any],
    reference: Callable[..., Any],
    /,
    *tensors: Any,
    grad: bool | Collection[str] = True,
    oracle: Callable[..., Any] | None = None,
    **params: Any,
) -> None:
    """Outputs and gradients of a candidate are as accurate as rounding allows.

        assert_accurate(softmax, torch.softmax, x, dim=-1)

    Both are called as ``reference(*tensors, **params)`` on copies of the tensors, so that inputs
    and their ``.grad`` stay as they are. They return a tensor or a number, or a tuple, list or dict
    of these; an input that the reference writes in place is a result too. Values are compared with
    the reference in float64 within what rounding explains, integers and booleans exactly, but for
    ties. Gradients are compared for a dense upstream gradient and for one of stride 0, as
    ``.sum().backward()`` gives. On the CPU, Triton kernels are interpreted.

    candidate, reference: functions or modules; the gradients of parameters that both have by name
        are compared too.
    tensors, params: any Python values. Tensors in them, also in lists and dicts, are inputs, of any
        real dtype and shape.
    grad: False compares no gradients; a collection of names those of these inputs alone. By
        default, of all inputs in float16, bfloat16, float32 and float64.
    oracle: what is run in float64 in the place of a reference that cannot be.

    Raises AssertionError for a candidate that is wrong, and UsageError where that cannot be said:
    the reference raises an error, is random, or does not stay in float64.
    """
    __tracebackhide__ = True
    call = Call(candidate, reference, tensors, params, grad)
    if faults := _faults(call, candidate, reference, oracle or reference):
        title = f"{name_of(candidate)} is not as accurate as {name_of(reference)}:"
        allowed = ALLOWED.format(reference=name_of(reference))
        raise AssertionError("\n".join([title, *(f"  {fault}" for fault in faults), allowed]))


def _faults(
    call: Call,
    candidate: Callable[..., Any],
    reference: Callable[..., Any],
    oracle: Callable[..., Any],
) -> list[str]:
    """What is wrong with the first kind of upstream gradients for which anything is."""
    try:
        op, outputs = call.as_op(candidate, reference)
    except UsageError:
        raise
    except Exception as error:
        raise _unusable(reference, error, call) from error
    device = next(iter(call.tensors.values())).device
    tried = Candidate(op, op["candidate"], device)
    in_double = call.with_names(oracle, list(outputs), double=True)
    dtypes = [y.dtype for y in outputs.values() if y.is_floating_point()]
    dtype = torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]
    for layout, when in UPSTREAMS.items() if call.differentiable else [("contiguous", "")]:
        case = OpCase(op, op["candidate"], op.cases[0], dtype, upstream=layout)
        inputs = Inputs(call.tensors, _upstream(outputs, layout), {})
        try:
            eager = evaluate(op, op["eager"].call, inputs.dense())
        except Exception as error:
            raise _unusable(reference, error, call) from error
        exact = _in_double(op, in_double, inputs, name_of(oracle))
        on_cpu = all(tensor.device.type == "cpu" for tensor in call.tensors.values())
        with interpreted() if on_cpu else nullcontext():
            run = run_case(tried, inputs)
        faults = [f"out of bounds: {text}" for text in run.out_of_bounds]
        try:
            if run.error is not None:
                raise run.error
            faults += _wrong(case, inputs, run.results, References(eager, exact, []), in_double)
        except ContractError as error:
            faults.append(str(error).removeprefix(f"{op.name}: "))
        if faults:
            return [f"{fault}{when}" for fault in faults]
    return []


def _in_double(
    op: Op, call: Callable[..., Any], inputs: Inputs, name: str
) -> dict[str, torch.Tensor]:
    """Results for these inputs in float64, by a function of this name that may be the oracle.

    Raises UsageError where it leaves float64, cannot run in it, or gives other results each time.
    """
    mode = StaysInDouble()
    try:
        with mode:
            results = evaluate(op, call, inputs.double())
    except Exception as error:
        if not mode.rounded:
            raise UsageError(
                f"{name}, the oracle, does not run in float64 on these tensors "
                f"({type(error).__name__}: {error}): {GIVE}; tensors that it takes from elsewhere "
                "must be arguments"
            ) from error
    if mode.rounded:
        raise UsageError(f"{mode.rounded} in {name}, the oracle: {GIVE}")
    again = evaluate(op, call, inputs.double())
    size = max(map(norm_of_finite, results.values()), default=0.0)
    if not all(near(again[n], result, SAME, SAME * size) for n, result in results.items()):
        raise UsageError(
            f"{name}, the reference, is random: two runs on the same inputs differ; make it take "
            "its random values as an argument"
        )
    return results


def _unusable(reference: Callable[..., Any], error: Exception, call: Call) -> UsageError:
    name, text = name_of(reference), f"{type(error).__name__}: {error}"
    hint = "; grad=False calls it without gradients" if call.differentiable else ""
    return UsageError(f"{name}, the reference, raised {text}{hint}")


def _upstream(outputs: Tensors, layout: str) -> dict[str, torch.Tensor | None]:
    """A normally distributed gradient for each output that has one."""
    upstream: dict[str, torch.Tensor | None] = dict.fromkeys(outputs)
    for place, (name, output) in enumerate(outputs.items()):
        if output.requires_grad:
            generator = torch.Generator(output.device).manual_seed(place)
            sample = torch.randn(output.shape, generator=generator, device=output.device)
            possible = layout if output.numel() else "contiguous"
            upstream[name] = laid_out(sample, output.dtype, output.device, possible, place)
    return upstream


def _wrong(
    case: OpCase,
    inputs: Inputs,
    results: Tensors,
    references: References,
    in_double: Callable[..., Any],
) -> list[str]:
    """The results that are not as accurate as the reference, in words."""
    failed: list[Comparison] = []
    for draws in DRAWS:
        perturbed = [
            evaluate(case.op, in_double, inputs.perturbed(draw), watched=False)
            for draw in range(draws)
        ]
        references = replace(references, perturbed=perturbed)
        comparisons = case.judge(results, inputs, references=references)
        failed = [comparison for comparison in comparisons if not comparison.passed]
        if not failed:
            break
        results = {
            name: without_cancelled(name, result, references.oracle[name], inputs)
            if name in references.oracle
            else result
            for name, result in results.items()
        }
    return [str(comparison) for comparison in failed]
