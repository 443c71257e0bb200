"""The suite catches what it claims to catch: right implementations, changed in one thing.

Each saboteur is tried twice: as a provider, where the cases of its op must catch it, and as
the reference, where the comparison with independent code must. One caught only because it
raises does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from correctness_tests.test_references import disagreements
from tinyllama.harness import Op, Provider
from tinyllama.harness.cases import op_cases
from tinyllama.harness.evaluate import make_inputs
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS, compose

Call = Callable[..., Any]

EAGER = {name: op["eager"].call for name, op in OPS.items()}


@dataclass(frozen=True)
class Saboteur:
    """A wrong implementation of an op, and the words its discovery must contain."""

    op: Op
    fault: str
    call: Call
    found_in: tuple[str, ...]

    def reported(self, text: str) -> bool:
        return any(words in text for words in self.found_in)

    def __str__(self) -> str:
        return f"{self.op.name}-{self.fault}"


def on_input(op: Op, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The reference with one input changed on its way in."""
    index, reference = list(op.inputs).index(name), EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        changed = [change(arg) if i == index else arg for i, arg in enumerate(args)]
        return reference(*changed, **params)

    return call


def on_output(op: Op, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The reference with one output changed on its way out."""
    index, reference = list(op.outputs).index(name), EAGER[op.name]

    def call(*args: Any, **params: Any) -> Any:
        results = reference(*args, **params)
        if not isinstance(results, tuple):
            return change(results)
        return tuple(change(r) if i == index else r for i, r in enumerate(results))

    return call


def with_params(op: Op, **forced: Any) -> Call:
    """The reference, deaf to some of its parameters."""
    reference = EAGER[op.name]
    return lambda *args, **params: reference(*args, **{**params, **forced})


def gradient_times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same value with a scaled gradient."""
    return lambda x: x.detach() + (x - x.detach()) * factor


def last_row_forgotten(x: torch.Tensor) -> torch.Tensor:
    """A tail that nothing wrote: the last element of the last row stays as allocated."""
    written = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    written.view(-1)[:-1] = x.reshape(-1)[:-1]
    return written


def attention_without_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def attention_with_groups_interleaved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Query head h reads group h mod G instead of h // (H / G)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
    return EAGER["attention"](q, k, v)


def attention_scaled_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return EAGER["attention"](q * q.shape[-1] ** -0.5, k, v)


def rope_one_position_late(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Any:
    return EAGER["rope"](q, k, cos.roll(-1, 0), sin.roll(-1, 0))


def rope_of_halves(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Pairs (i, i + K / 2) instead of (2i, 2i + 1)."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

    return rotate(q), rotate(k)


def adamw_without(part: str) -> Call:
    """AdamW with its bias correction dropped, or with the decay added to the gradient."""

    def call(
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        step: torch.Tensor,
        found_inf: torch.Tensor,
        weight_decay: float,
        **settings: float,
    ) -> None:
        count = step.clone()
        if part == "bias correction":
            step.fill_(1e6)
        if part == "decoupled decay":
            grad = [g + weight_decay * p for g, p in zip(grad, param, strict=True)]
            weight_decay = 0.0
        EAGER["adamw"](
            param, grad, exp_avg, exp_avg_sq, step, found_inf, weight_decay=weight_decay, **settings
        )
        step.copy_(count + (found_inf == 0))

    return call


def block_with(**parts: Call) -> Call:
    """The block composed of the references, some of them replaced."""
    return compose({**{name: EAGER[name] for name in PARTS}, **parts})


def saboteurs() -> Iterator[Saboteur]:
    for op in OPS.values():
        for name in op.differentiable:
            deleted = on_input(op, name, torch.Tensor.detach)
            yield Saboteur(op, f"grad_{name}_deleted", deleted, (f"grad {name}", "detached"))
            for fault, factor in (("zero", 0.0), ("times_1.01", 1.01)):
                call = on_input(op, name, gradient_times(factor))
                yield Saboteur(op, f"grad_{name}_{fault}", call, (f"grad {name}",))
        for name in op.outputs:
            yield Saboteur(
                op, f"{name}_times_1.01", on_output(op, name, lambda x: x * 1.01), (name,)
            )
            if op.outputs[name].axes:
                call = on_output(op, name, last_row_forgotten)
                yield Saboteur(op, f"{name}_tail_forgotten", call, (name,))
        if "eps" in op.params:
            found = "param" if op.mutated else "grad"
            yield Saboteur(op, "epsilon_dropped", with_params(op, eps=0.0), (found,))
    attention, rope, adamw, block = (OPS[n] for n in ("attention", "rope", "adamw", "block"))
    for call in (attention_without_mask, attention_with_groups_interleaved, attention_scaled_twice):
        yield Saboteur(attention, call.__name__, call, ("o",))
    yield Saboteur(block, "mask_dropped", block_with(attention=attention_without_mask), ("y",))
    for call in (rope_one_position_late, rope_of_halves):
        yield Saboteur(rope, call.__name__, call, ("q_rotated",))
    yield Saboteur(adamw, "bias_correction_dropped", adamw_without("bias correction"), ("param",))
    yield Saboteur(adamw, "decay_coupled", adamw_without("decoupled decay"), ("param",))
    yield Saboteur(adamw, "decay_dropped", with_params(adamw, weight_decay=0.0), ("param",))
    yield Saboteur(adamw, "betas_swapped", with_params(adamw, beta1=0.999, beta2=0.9), ("exp_avg",))


ALL = list(saboteurs())


def found_by_cases(saboteur: Saboteur) -> str | None:
    """The first failed comparison over the cases of the op, as the suite would report it."""
    op = saboteur.op
    wrong = Provider(op.name, "saboteur", saboteur.call, dtypes=op.dtypes)
    for case in op_cases([op], providers=["eager"]):
        try:
            failed = [c for c in case.compare(provider=wrong) if not c.passed]
        except AssertionError as error:
            if saboteur.reported(str(error)):
                return f"{case}: {error}"
            continue
        named = [str(c) for c in failed if saboteur.reported(c.name)]
        if named:
            return f"{case}: {named[0]}"
    return None


def found_by_independent_code(saboteur: Saboteur) -> str | None:
    """The same fault in the reference itself, found by the check of the references."""
    op = saboteur.op
    right = op.providers["eager"]
    op.providers["eager"] = Provider(op.name, "eager", saboteur.call, dtypes=op.dtypes)
    try:
        for case in op.cases:
            for extreme in (None, *op.extremes):
                inputs = make_inputs(op, case, torch.float64, extreme=extreme)
                for source in op.independents:
                    try:
                        found = disagreements(op, source, inputs)
                    except AssertionError as error:
                        found = [str(error)]
                    if named := [text for text in found if saboteur.reported(text)]:
                        return f"{case}: {named[0]}"
    finally:
        op.providers["eager"] = right
    return None


@pytest.mark.parametrize("saboteur", ALL, ids=str)
def test_provider_is_caught(saboteur: Saboteur) -> None:
    assert found_by_cases(saboteur), f"{saboteur} passes every case"


@pytest.mark.parametrize("saboteur", [s for s in ALL if "tail_forgotten" not in s.fault], ids=str)
def test_reference_is_caught(saboteur: Saboteur) -> None:
    assert found_by_independent_code(saboteur), f"{saboteur} as a reference goes unnoticed"


def test_right_implementations_are_not_caught() -> None:
    """The same machinery finds nothing wrong with what is right."""
    for op in OPS.values():
        right = Saboteur(op, "none", EAGER[op.name], ("",))
        assert found_by_cases(right) is None
        assert found_by_independent_code(right) is None
