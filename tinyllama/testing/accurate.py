"""Whether a candidate is as accurate as its reference on some tensors."""

from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyllama.harness.check.cases import WIDER, References
from tinyllama.harness.check.compare import SLACK, Comparison, apart, compare, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs, is_gradient
from tinyllama.harness.check.guards import GuardedMemory
from tinyllama.harness.check.layouts import laid_out
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.machine.device import synchronize
from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing.call import Call, Results, Tensors, name_of
from tinyllama.testing.interpreted import interpreted
from tinyllama.testing.oracle import results_in_double
from tinyllama.testing.rounded_steps import UNIT, RoundedSteps

DRAWS, MORE_DRAWS = 2, 4  # of inputs moved by a rounding; where results seem wrong
# The layouts of the upstream gradients, and how a fault says in which call it was.
UPSTREAMS = {"contiguous": "", "summed": " (a second call, with upstream gradients of stride 0)"}
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
    trial = _Trial(call, candidate, reference, oracle or reference)
    faults = trial.faults()
    if faults:
        title = f"{name_of(candidate)} is not as accurate as {name_of(reference)}:"
        allowed = ALLOWED.format(reference=name_of(reference))
        raise AssertionError("\n".join([title, *(f"  {fault}" for fault in faults), allowed]))


@dataclass(frozen=True)
class _Trial:
    """A candidate beside its reference, and what is run in float64."""

    call: Call
    candidate: Callable[..., Any]
    reference: Callable[..., Any]
    oracle: Callable[..., Any]

    def faults(self) -> list[str]:
        """What is wrong with the first kind of upstream gradients for which anything is."""
        inputs = self.call.inputs
        outputs = self._reference_results(inputs).tensors
        for layout, when in UPSTREAMS.items():
            if inputs.wanted:
                inputs = replace(inputs, upstream=_upstream(outputs, layout))
            wider = layout == "summed" and torch.float32 in {one.dtype for one in outputs.values()}
            if faults := self._faults_with(inputs, SLACK * (WIDER if wider else 1)):
                return [f"{fault}{when}" for fault in faults]
            if not inputs.wanted:
                break
        return []

    def _faults_with(self, inputs: Inputs, slack: float) -> list[str]:
        eager = self._reference_results(inputs)
        oracle = results_in_double(self.call, self.oracle, inputs)
        if missing := sorted(
            name for name, one in eager.tensors.items() if not _of_shape(oracle.tensors, name, one)
        ):
            raise UsageError(
                f"the oracle lacks {', '.join(missing)} of the reference, or its shape"
            )
        results, faults = self._candidate_results(inputs)
        faults += [f"it changed its input {n}" for n in results.inputs if n not in eager.inputs]
        faults += [f"it changed the upstream gradient of {name}" for name in results.upstream]
        unwritten = {name: inputs.args[name] for name in eager.inputs}
        found = {**unwritten, **results.tensors}
        faults += [
            text
            for name in found.keys() - set(results.inputs)
            if (text := _unexpected(name, found, eager.tensors))
        ]
        faults += [text for name in eager.tensors if (text := _differs(name, found, eager.tensors))]
        compared = {
            name: found[name]
            for name, one in eager.tensors.items()
            if one.numel() and not _differs(name, found, eager.tensors)
        }
        moved = [self._in_double(_moved(inputs, draw)) for draw in range(DRAWS)]
        references = References(eager.tensors, oracle.tensors, moved)
        wrong = _wrong(compared, references, slack)
        if wrong:  # is it a matter of chance, or of terms that cancel?
            more = replace(references, perturbed=[*moved, *self._more_draws(inputs, oracle)])
            wrong = _wrong({one.name: compared[one.name] for one in wrong}, more, slack)
        return faults + [_text(one) for one in wrong]

    def _reference_results(self, inputs: Inputs) -> Results:
        try:
            return self.call.run(self.reference, inputs.dense())
        except UsageError:
            raise
        except Exception as error:
            name, raised = name_of(self.reference), f"{type(error).__name__}: {error}"
            hint = "; grad=False calls it without gradients" if inputs.wanted else ""
            raise UsageError(f"{name}, the reference, raised {raised}{hint}") from error

    def _candidate_results(self, inputs: Inputs) -> tuple[Results, list[str]]:
        """Results on poisoned memory between canaries, and accesses out of bounds."""
        devices, guards = {one.device for one in inputs.args.values()}, GuardedMemory()
        on_cpu = all(device.type == "cpu" for device in devices)
        with interpreted(guards) if on_cpu else nullcontext(), PoisonedMemory(), guards:
            try:
                results = self.call.run(self.candidate, inputs, place=guards.placed)
            except UsageError as error:  # of what it returned
                raise AssertionError(f"{name_of(self.candidate)}: {error}") from None
            for device in devices:
                synchronize(device)
        return results, [f"out of bounds: {text}" for text in guards.broken()]

    def _more_draws(self, inputs: Inputs, oracle: Results) -> list[Tensors]:
        """In float64, with inputs moved by a rounding; where the reference can be taken apart into
        steps, each of them rounds too, also for upstream gradients of other signs: terms that
        cancel may happen to be small for these."""
        places = range(DRAWS, DRAWS + MORE_DRAWS)
        with suppress(Exception), sdpa_kernel(SDPBackend.MATH):
            rounded = [self._in_steps(_moved(inputs, place), place) for place in places]
            exact = self._in_steps(inputs.double(), 0, unit=0.0)
            if all(_far_less(exact[n], rounded[0][n], one) for n, one in oracle.tensors.items()):
                for place in places:
                    other = _of_other_signs(inputs, place)
                    right = self._in_double(other.double())
                    changed = self._in_steps(_moved(other, place), place)
                    rounded.append(_shifted(oracle.tensors, right, changed))
                return rounded
        return [self._in_double(_moved(inputs, place)) for place in places]

    def _in_double(self, inputs: Inputs) -> Tensors:
        return self.call.run(self.oracle, inputs, double=True).tensors

    def _in_steps(self, inputs: Inputs, seed: int, unit: float = UNIT) -> Tensors:
        with RoundedSteps(seed, unit):
            return self._in_double(inputs)


def _of_other_signs(inputs: Inputs, seed: int) -> Inputs:
    """With the signs of upstream gradients at random."""

    def signed(gradient: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(gradient.device).manual_seed(seed)
        sign = torch.empty_like(gradient, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        return gradient * sign.sign().to(gradient.dtype)

    upstream = {n: None if one is None else signed(one) for n, one in inputs.upstream.items()}
    return replace(inputs, upstream=upstream)


def _shifted(results: Tensors, right: Tensors, changed: Tensors) -> Tensors:
    """Results with the change from right ones to others, where they are floating-point numbers."""
    return {
        name: one + changed[name] - right[name] if one.is_floating_point() else changed[name]
        for name, one in results.items()
    }


def _far_less(one: torch.Tensor, other: torch.Tensor, middle: torch.Tensor) -> bool:
    """Whether the first is nearer by far to the last than the second is."""
    errors = [norm_of_finite(apart(each, middle)) for each in (one, other)]
    return errors[0] <= 1e-3 * errors[1]


def _upstream(outputs: Tensors, layout: str) -> dict[str, torch.Tensor | None]:
    """A gradient for each floating-point output, normally distributed."""
    drawn: dict[str, torch.Tensor | None] = {}
    for place, (name, output) in enumerate(outputs.items()):
        if output.is_floating_point():
            generator = torch.Generator(output.device).manual_seed(place)
            sample = torch.randn(output.shape, generator=generator, device=output.device)
            possible = layout if output.numel() else "contiguous"
            drawn[name] = laid_out(sample, output.dtype, output.device, possible, place)
    return drawn


def _moved(inputs: Inputs, draw: int) -> Inputs:
    """In float64, with values moved by a rounding, but for parameters that float32 has exactly."""
    moved = inputs.perturbed(draw)
    exact = {
        name: value
        for name, value in inputs.params.items()
        if isinstance(value, float) and torch.tensor(value, dtype=torch.float32).item() == value
    }
    return replace(moved, params={**moved.params, **exact})


def _of_shape(results: Tensors, name: str, like: torch.Tensor) -> bool:
    return name in results and results[name].shape == like.shape


def _unexpected(name: str, results: Tensors, expected: Tensors) -> str:
    """That the reference has no such result, in words; a gradient of zeros is as good as none."""
    if name in expected or (is_gradient(name) and not results[name].any()):
        return ""
    return f"{name} is not among the results of the reference"


def _differs(name: str, results: Tensors, expected: Tensors) -> str:
    """That a result is missing, or of another shape or dtype, in words."""
    if name not in results:
        lost = ": autograd does not reach it; name in grad=[...] the inputs that have one"
        return f"{name} is missing{lost if is_gradient(name) else ''}"
    for trait in ("shape", "dtype"):
        value, right = getattr(results[name], trait), getattr(expected[name], trait)
        if value != right:
            value, right = (tuple(one) if trait == "shape" else one for one in (value, right))
            return f"{name} has {trait} {value}, not {right}"
    return ""


def _wrong(results: Tensors, references: References, slack: float) -> list[Comparison]:
    """Those that are not as accurate as the reference."""
    each = {name: references.of(name) for name in results}
    gain = median(one.gain for one in each.values()) if each else 1.0
    compared = [
        compare(name, results[name], one, gain=max(gain, one.gain), slack=slack)
        for name, one in each.items()
    ]
    return [one for one in compared if not one.passed]


def _text(comparison: Comparison) -> str:
    failed = [str(check) for check in comparison.checks if not check.passed]
    return f"{comparison.name}: {'; '.join(failed)}; {comparison.worst}"
