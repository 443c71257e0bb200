"""The checks of captured graphs, of another stream and of the compiler, without a GPU."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from correctness_tests.support.captured import RecordedGraph, recording
from correctness_tests.support.tried import MATRIX, finding, small, with_backward
from tinyllama.harness import Provider
from tinyllama.harness.correct.checks import Candidate, Outcome, frameworks
from tinyllama.ops import OPS

T = torch.Tensor
KEPT: list[T] = []  # of the first call


def product(x: T, weight: T) -> T:
    return x * weight


def first(value: T) -> T:
    KEPT.append(value.detach().clone())
    return KEPT[0]


OP = small("product", product, {"x": MATRIX, "weight": MATRIX}, {"y": "N D"})
KEEPS_X = with_backward(lambda x, w: first(x) * w, lambda g, x, w: (g * w, g * x))
KEEPS_WEIGHT = with_backward(lambda x, w: x * first(w), lambda g, x, w: (g * w, g * x))
KEEPS_GRADIENT = with_backward(product, lambda g, x, w: (first(g) * w, g * x))
WRONG = with_backward(product, lambda g, x, w: (g * w, g * x * 1.1))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a device that has streams and graphs."""
    noted: list[str] = []
    KEPT.clear()

    @contextlib.contextmanager
    def entered(stream: str) -> Iterator[None]:
        noted.append(f"on {stream}")
        yield
        noted.append(f"off {stream}")

    monkeypatch.setattr(frameworks, "cannot", lambda *_: None)
    monkeypatch.setattr(frameworks, "synchronize", lambda _: noted.append("waited"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "another")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: noted.append("slept"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return noted


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (product, ""),
        (KEEPS_X, "y: "),
        (KEEPS_WEIGHT, "y: "),
        (KEEPS_GRADIENT, "grad x: "),
        (WRONG, "grad weight: "),
    ],
    ids=["right", "keeps x", "keeps the weight", "keeps a gradient", "wrong"],
)
def test_a_graph_is_replayed_on_new_inputs_and_upstream_gradients(
    call: Callable[..., T], wrong: str, seen: list[str]
) -> None:
    one = finding(OP, call, "captured")
    assert one.outcome is (Outcome.FAILED if wrong else Outcome.PASSED), one
    assert (f"replayed on new contents: {wrong}" in one.message) == bool(wrong)
    assert seen == ["on another", "off another", "waited", "waited"]


@pytest.mark.parametrize(("call", "wrong"), [(product, ""), (WRONG, "grad weight: ")])
def test_a_call_on_another_stream_follows_slow_work_on_each_input(
    call: Callable[..., T], wrong: str, seen: list[str]
) -> None:
    one = finding(OP, call, "side stream")
    assert one.outcome is (Outcome.FAILED if wrong else Outcome.PASSED), one
    assert one.message.startswith(wrong)
    assert seen == ["waited", "on another", "slept", "slept", "off another", "waited"]


def refusing(x: T, weight: T) -> T:
    torch._dynamo.graph_break()
    return x * weight


@pytest.mark.parametrize("call", [product, refusing])
def test_nothing_is_left_compiled_before_and_after(
    call: Callable[..., T], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what another candidate left counts with this one, as too many of a function do."""
    noted: list[str] = []
    plain, reset = torch.compile, torch.compiler.reset

    def compiled(*args: object, **options: object) -> Callable[..., T]:
        noted.append("compiled")
        found: Callable[..., T] = plain(*args, **options)  # type: ignore[call-overload]
        return found

    def noted_reset() -> None:
        noted.append("reset")
        reset()

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", noted_reset)
    provider = Provider(OP.name, "tried", call, dtypes=(torch.float32,))
    problem = frameworks.compiled(Candidate(OP, provider, backend="eager"))
    assert (problem is None) == (call is product)
    assert noted == ["reset", "compiled", "reset"]


@pytest.mark.parametrize("failing", [{}, {"test_schema": "the schema", "test_aot": "the rest"}])
def test_torch_checks_a_custom_op_with_every_gradient_wanted(
    failing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    op, given = OPS["silu_mul"], []

    def checked(declared: object, args: tuple[T, ...], **options: object) -> dict[str, str]:
        given.append((declared, [one.requires_grad for one in args], options))
        return {"test_faketensor": "SUCCESS", **failing}

    monkeypatch.setattr(torch.library, "opcheck", checked)
    candidate = Candidate(op, op["triton"], backend="eager")
    problem = frameworks.compiled(candidate)
    assert op["triton"].derived
    assert given == [(op["triton"].derived.custom_op, [True, True], {"raise_exception": False})]
    expected = (candidate.smallest(), "opcheck: test_schema: the schema") if failing else None
    assert problem == expected
