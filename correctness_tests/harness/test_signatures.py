"""A call is taken for one like the last only where both have one signature."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tinyllama.harness.declare import checked
from tinyllama.harness.declare.checked import BySignature, signature

X, Y = torch.zeros(4, 4), torch.zeros(4, 4)
TENSORS = {
    "x": X,
    "another one like it": Y,
    "a part of another shape": torch.zeros(5, 4)[1:],
    "transposed": X.T,
    "rows apart": torch.zeros(4, 8)[:, :4],
    "fewer rows": X[:3],
    "one more axis": X[None],
    "expanded": torch.zeros(4, 1).expand(4, 4),
    "another dtype": X.bfloat16(),
    "whole numbers": X.int(),
    "on another device": X.to("meta"),
    "with a gradient": torch.zeros(4, 4, requires_grad=True),
    "a parameter": torch.nn.Parameter(X),
    "a parameter without a gradient": torch.nn.Parameter(X, requires_grad=False),
    "no element": torch.zeros(0, 4),
}
PARAMS: list[dict[str, Any]] = [
    *({"a": value} for value in (0.0, -0.0, 0, False, None, "", 1e-5)),
    {},
    {"b": 0.0},
    {"a": 0.0, "b": 0.0},
    {"b": 0.0, "a": 0.0},
]


@contextlib.contextmanager
def precision_of(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "usual": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "tf32": lambda: precision_of("high"),
    "deterministic": deterministic,
}


def test_calls_that_differ_have_signatures_that_differ() -> None:
    """A repeated signature is taken for a repeated call: nothing is checked, and parameters are
    those of the first one."""
    alike = {
        frozenset({"x", "another one like it", "a part of another shape"})
        | {"a parameter without a gradient"},
        frozenset({"with a gradient", "a parameter"}),
    }
    for (name, one), (other, second) in itertools.combinations(TENSORS.items(), 2):
        same = any({name, other} <= group for group in alike)
        assert (signature([one], {}) == signature([second], {})) == same, (name, other)
    keys = [signature([X], params) for params in PARAMS]
    for state in set(STATES) - {"no gradients", "inference", "usual"}:
        with STATES[state]():
            keys.append(signature([X], {}))
    keys += [signature(args, {}) for args in ([X, X], [X, None], [None, X])]
    assert len(set(keys)) == len(keys)
    assert None not in keys


@pytest.mark.parametrize("first", TENSORS)
def test_a_value_is_found_by_calls_of_its_signature_alone(first: str) -> None:
    """Whatever the state in which each of two calls is made."""
    for before, after, second in itertools.product(STATES, STATES, TENSORS):
        values: BySignature[str] = BySignature()
        with STATES[before]():
            key = signature([X, TENSORS[first]], {})
            values.put([X, TENSORS[first]], {}, "value")
        with STATES[after]():
            if values.get([X, TENSORS[second]], {}):
                assert signature([X, TENSORS[second]], {}) == key, (before, after, second)


@pytest.mark.parametrize("guards", [True, False])
def test_values_are_found_by_their_signatures(
    guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guards:
        monkeypatch.setattr(checked, "GUARDS", None)
    values: BySignature[str] = BySignature(most=3)
    calls: dict[str, list[Any]] = {"x": [X], "none": [X, None], "transposed": [X.T]}
    for name, args in calls.items():
        values.put(args, {}, name)
    for _ in range(2):
        assert {name: values.get(args, {}) for name, args in calls.items()} == {n: n for n in calls}
    assert values.values() == list(calls)
    values.put([X, [1]], {}, "no signature")
    assert values.get([X, [1]], {}) is None
    values.put([X[:1]], {}, "one too many")
    assert values.values() == ["one too many"]
    assert values.get([X], {}) is None
    values.clear()
    assert values.get([X[:1]], {}) is None
