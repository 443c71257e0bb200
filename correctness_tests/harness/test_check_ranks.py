"""The next fault is looked for behind a first one, right calls raise no alarm, and faults have
ranks, which the exit status follows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.saboteurs.base import with_upstream
from correctness_tests.support.tried import found
from tinyllama.cli import main
from tinyllama.cli.check import FAILING, _faults, _held
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank
from tinyllama.ops import OPS

SILU, ROPE = OPS["silu_mul"], OPS["rope"]
PASSED, FAILED, BLOCKED = Outcome.PASSED, Outcome.FAILED, Outcome.BLOCKED
EAGER = SILU["eager"].call


def overwriting(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Its backward works in its upstream gradient."""
    return with_upstream(EAGER(gate, up), lambda g: g.mul_(0.5) * 2)


def overwriting_and_dense(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Two faults: it also reads ``up`` as if it were contiguous."""
    y = overwriting(gate, up)
    return y if up.is_contiguous() else y * 1.5


def test_an_overwritten_gradient_hides_no_layout() -> None:
    only = ("untouched inputs", "input layouts", "gradient layouts", "extreme values")
    findings = found(SILU, overwriting_and_dense, *only)
    assert findings["untouched inputs"].outcome is FAILED
    assert findings["input layouts"].outcome is FAILED
    assert "outputs: " in findings["input layouts"].message
    assert findings["extreme values"].outcome is PASSED


def reading_dense_gradients(gate: torch.Tensor, up: torch.Tensor) -> Any:
    y = overwriting(gate, up)
    y.register_hook(lambda g: g if g.is_contiguous() else g * 1.5)
    return y


def test_an_overwritten_gradient_hides_no_layout_of_gradients() -> None:
    """Copies of upstream gradients keep their strides."""
    findings = found(SILU, reading_dense_gradients, "untouched inputs", "gradient layouts")
    assert findings["untouched inputs"].outcome is FAILED
    assert findings["gradient layouts"].outcome is FAILED
    assert "gradients: " in findings["gradient layouts"].message


def zeros(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return EAGER(with_upstream(gate, torch.zeros_like), up)


class ZeroOnce(torch.autograd.Function):
    """The identity, with a gradient of zeros that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.zeros_like(gradients[0])


def test_gradients_of_zeros_have_no_second_derivative_either() -> None:
    def call(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return EAGER(ZeroOnce.apply(gate), ZeroOnce.apply(up))

    check = "second derivative"
    finding = found(SILU, call, check, double_backward=False)[check]
    assert finding.outcome is FAILED
    assert "all of the gradient is 0: gate, up" in finding.message


def zeros_and_dense(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return zeros(gate, up) * (1.0 if up.is_contiguous() else 1.5)


def test_wrong_gradients_hide_no_wrong_outputs_in_a_layout() -> None:
    only = ("gradients", "input layouts", "extreme values", "wanted gradients")
    findings = found(SILU, zeros_and_dense, *only)
    outcomes = [findings[name].outcome for name in only]
    assert outcomes == [FAILED, FAILED, BLOCKED, BLOCKED]
    assert findings["input layouts"].message.startswith("outputs: ")


@pytest.mark.parametrize(
    "check",
    [
        "gradients",
        "scaled upstream",
        "backward twice",
        "two consumers",
        "second derivative",
        "determinism",
        "fresh contents",
        "autocast",
    ],
)
def test_gradients_of_zeros_fail_whatever_is_asked(check: str) -> None:
    finding = found(SILU, zeros, check)[check]
    assert finding.outcome is FAILED, finding


def test_a_call_that_does_nothing_is_found_by_a_check_of_calls() -> None:
    """Rotation of one position is the identity."""
    smallest = Candidate(ROPE, ROPE["eager"]).smallest().case.dims
    assert smallest["T"] == 1

    def nothing(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> Any:
        return q.clone(), k.clone()

    finding = found(ROPE, nothing, "fresh contents")["fresh contents"]
    assert finding.outcome is FAILED, finding


@pytest.mark.parametrize("call", [overwriting, EAGER], ids=["overwriting", "right"])
def test_changed_inputs_are_no_other_bits(call: Callable[..., Any]) -> None:
    assert found(SILU, call, "determinism")["determinism"].outcome is PASSED


def in_half(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Its backward computes in float16, where halves of subnormals are rounded."""
    return with_upstream(EAGER(gate, up), lambda g: (g * 2**-13).half().to(g.dtype) * 2**13)


@pytest.mark.parametrize(
    ("dtypes", "outcome"),
    [((torch.float32, torch.float16), PASSED), ((torch.float32,), FAILED)],
    ids=["half too", "float32 alone"],
)
def test_a_proportion_is_asked_to_the_precision_of_the_computation(
    dtypes: tuple[torch.dtype, ...], outcome: Outcome
) -> None:
    def supports(dims: Any) -> str | None:
        return None if dims["N"] > 1 else "one row"

    only = "scaled upstream"
    finding = found(SILU, in_half, only, dtypes=dtypes, supports=supports)[only]
    assert finding.outcome is outcome, finding


# -- ranks ----------------------------------------------------------------------------------------


def refusing(gate: torch.Tensor, up: torch.Tensor) -> Any:
    assert all(one.is_contiguous() for one in (gate, up)), "make both inputs contiguous"
    return EAGER(gate, up)


def ending(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """An error of torch's, which is no refusal."""
    return EAGER(gate, up.view(-1).view_as(gate))


def ruling_out(gate: torch.Tensor, up: torch.Tensor) -> Any:
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise RuntimeError("make both inputs contiguous")
    return EAGER(gate, up)


def of_another_dtype(gate: torch.Tensor, up: torch.Tensor) -> Any:
    y = EAGER(gate, up)
    return y if up.is_contiguous() else y.double()


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (refusing, Rank.CONTRACT),
        (ruling_out, Rank.CONTRACT),
        (ending, Rank.WRONG),
        (of_another_dtype, Rank.WRONG),
        (overwriting_and_dense, Rank.WRONG),
    ],
)
def test_a_layout_that_is_refused_is_no_wrong_result(call: Any, rank: Rank) -> None:
    finding = found(SILU, call, "input layouts")["input layouts"]
    assert finding.rank is rank, finding


def refusing_strided(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Strided inputs are refused; others are taken for what they are not."""
    if gate.stride(-1) == 2:
        raise ValueError("the last axis must be dense")
    return overwriting_and_dense(gate, up)


def test_a_layout_that_is_refused_hides_none_that_is_wrong() -> None:
    finding = found(SILU, refusing_strided, "input layouts")["input layouts"]
    assert finding.rank is Rank.WRONG, finding
    assert finding.message.startswith("outputs: ")


def test_a_refusal_names_the_authors_line() -> None:
    message = found(SILU, refusing, "input layouts")["input layouts"].message
    assert f"{__file__}:" in message
    assert "make both inputs contiguous" in message


def test_a_refusal_of_a_plain_case_is_a_wrong_result() -> None:
    def never(gate: torch.Tensor, up: torch.Tensor) -> Any:
        raise ValueError("not today")

    assert found(SILU, never, "outputs")["outputs"].rank is Rank.WRONG


def cut(x: torch.Tensor) -> torch.Tensor:
    """The identity, whose backward cuts the graph without a word."""
    return with_upstream(x, torch.Tensor.detach)


def detached(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return EAGER(cut(gate), cut(up))


@pytest.mark.parametrize(
    ("call", "check", "rank"),
    [
        (detached, "second derivative", Rank.ADVICE),
        (overwriting, "untouched inputs", Rank.UNSAFE),
        (zeros, "gradients", Rank.WRONG),
        (EAGER, "outputs", None),
    ],
)
def test_each_fault_has_its_rank(call: Any, check: str, rank: Rank | None) -> None:
    assert found(SILU, call, check)[check].rank is rank


def half_detached(gate: torch.Tensor, up: torch.Tensor) -> Any:
    return EAGER(cut(gate), up)


@pytest.mark.parametrize(
    ("call", "declared", "rank", "text"),
    [
        (EAGER, False, Rank.CONTRACT, "declared to have no second derivative, and gives one: mark"),
        (half_detached, False, Rank.WRONG, "and gives a wrong one by gate, up, upstream 0: mark"),
        (half_detached, True, Rank.WRONG, "its second derivative by gate, up, upstream 0 is not"),
    ],
)
def test_a_second_derivative_is_compared_whether_it_is_declared_or_not(
    call: Any, declared: bool, rank: Rank, text: str
) -> None:
    seen = found(SILU, call, "second derivative", double_backward=declared)["second derivative"]
    assert seen.rank is rank
    assert text in seen.message


def of_rank(rank: Rank | None) -> Finding:
    return Finding("any", PASSED if rank is None else FAILED, special=rank)


@pytest.mark.parametrize("least", list(FAILING))
@pytest.mark.parametrize("rank", list(Rank))
def test_the_exit_status_follows_the_rank(rank: Rank, least: str) -> None:
    order = [one.value for one in Rank]
    expected = order.index(rank.value) > order.index(least)
    assert _held([of_rank(None), of_rank(rank)], least) is expected


@pytest.mark.parametrize("least", list(FAILING))
def test_what_was_not_compared_does_not_hold(least: str) -> None:
    assert not _held([of_rank(None), Finding("any", BLOCKED)], least)
    assert not _held([Finding("any", Outcome.UNSUPPORTED)], least)
    assert _held([of_rank(None), Finding("any", Outcome.UNSUPPORTED)], least)


def test_the_last_line_has_the_worst_first_and_what_follows_last() -> None:
    findings = [
        Finding("second derivative", FAILED, special=Rank.ADVICE),
        Finding("fresh contents", BLOCKED),
        Finding("races", FAILED),
        Finding("outputs", FAILED),
    ]
    expected = "wrong result: outputs; unsafe: races; advice: second derivative"
    assert _faults(findings) == f"{expected}; not tried: fresh contents"


@pytest.mark.usefixtures("forked")
def test_a_file_that_refuses_layouts_ends_well_unless_asked_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "refusing.py", tmp_path / "found.json"
    path.write_text(REFUSING)
    asked = ["check", str(path), "--only", "input layouts", "--device", "cpu", "--json", str(out)]
    assert main(asked) == 0
    ((finding,),) = json.loads(out.read_text()).values()
    assert (finding["rank"], finding["outcome"]) == ("contract", "crashed")
    assert "silu_mul-refusing: contract: input layouts" in capsys.readouterr().out
    assert main([*asked, "--fail-on", "contract"]) == 1


REFUSING = """
from tinyllama.ops.silu_mul import silu_mul

@silu_mul.provider("refusing", dtypes=silu_mul.dtypes[:1])
def refusing(gate, up):
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("contiguous inputs only")
    return silu_mul["eager"].call(gate, up)
"""


def test_a_finding_is_made_of_words_alone() -> None:
    plain = Finding("dtypes", Outcome.PASSED, "a", "b", "c").as_dict()
    assert Finding.of(plain).as_dict() == plain
    for name in plain.keys() - {"outcome", "rank"}:
        with pytest.raises(TypeError, match="a finding is made of words"):
            Finding.of({**plain, name: 3})  # type: ignore[dict-item]
