"""What a fault is called, whose it is, what is not tried behind it, and the exit status."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.corpus.variants import Loaded, variants
from correctness_tests.support.checked_files import checked
from correctness_tests.support.tried import finding, small
from tinyllama.harness import Tensor
from tinyllama.harness.check.run import Outcome, run
from tinyllama.harness.declare.values import Values, uniform
from tinyllama.ops import OPS

VARIANTS = {str(variant): variant for variant in variants()}
X = {"x": Tensor("N D")}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "check", "rank", "options", "status"),
    [
        (
            "product_with_backward-gradients_detached",
            "second derivative",
            "warning",
            ["--fail-on", "refused"],
            0,
        ),
        (
            "product_with_backward-gradients_detached",
            "second derivative",
            "warning",
            ["--fail-on", "warning"],
            1,
        ),
        ("block_matrix_product-products_in_tf32", "fresh contents", "warning", [], 0),
        ("entry_product-asserts_contiguous_inputs", "input layouts", "refused", [], 0),
        (
            "entry_product-asserts_contiguous_inputs",
            "input layouts",
            "refused",
            ["--fail-on", "refused"],
            1,
        ),
        ("entry_product-upstream_gradient_scaled_in_place", "untouched inputs", "unsafe", [], 1),
        ("entry_product-gradients_zero", "gradients", "wrong result", [], 1),
        ("entry_product-plain_case_refused", "outputs", "refused", [], 1),
        # What could not be tried has no verdict.
        ("doubled_vector-assembly", "outputs", "", [], 1),
        ("doubled_vector-assembly_in_larger_cases", "outputs", "", [], 1),
        ("doubled_vector-atomic_on_bfloat16", "outputs", "", [], 0),
    ],
)
def test_the_exit_status_follows_the_rank(
    name: str,
    check: str,
    rank: str,
    options: list[str],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(VARIANTS[name].write(tmp_path))
    ended, findings = checked(tmp_path, path, f"--only={check}", *options)
    judged = next(name for name in findings if not name.endswith("-eager"))
    assert (ended, findings[judged][check]["rank"]) == (status, rank)
    assert (findings[judged][check]["outcome"] == "warning") is (rank == "warning")
    told = f"{judged}: not tried: " if status else f"{judged}: no fault"
    told = f"{judged}: {rank}: {check}" if rank else told
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("entry_product-upstream_gradient_scaled_in_place", "fresh contents"),
        ("entry_product-gradients_zero", "special values"),
        ("entry_product-plain_case_refused", "input layouts"),
    ],
)
def test_what_cannot_be_known_behind_a_fault_is_blocked(
    name: str, check: str, tmp_path: Path
) -> None:
    checks = "outputs", "gradients", "untouched inputs", check
    with Loaded(VARIANTS[name], tmp_path) as candidate:
        findings = {answer.check: answer for answer in run(candidate, checks)}
    assert findings[check].outcome is Outcome.BLOCKED


@pytest.mark.parametrize("cases", ["", "_in_larger_cases"])
def test_a_limit_of_the_interpreter_is_no_fault_of_a_kernel(cases: str, tmp_path: Path) -> None:
    variant = VARIANTS[f"doubled_vector-assembly{cases}"]
    with Loaded(variant, tmp_path) as candidate:
        (outputs,) = run(candidate, ("outputs",))
    assert outputs.outcome is Outcome.BLOCKED
    assert outputs.message.startswith("Triton's interpreter refuses what compiles for ")


def test_a_dtype_that_cannot_be_tried_leaves_the_others_to_be_tried(tmp_path: Path) -> None:
    variant = VARIANTS["doubled_vector-tail_lost_beside_assembly_in_bfloat16"]
    ended, findings = checked(
        tmp_path, str(variant.write(tmp_path)), "--only=outputs,untouched inputs"
    )
    (of_kernel,) = (of for name, of in findings.items() if not name.endswith("-eager"))
    assert ended == 1
    assert {finding["untried"] for finding in of_kernel.values()} == {"bf16"}
    with Loaded(variant, tmp_path) as candidate:
        *_, sizes = run(candidate, ("outputs", "sizes"))
    assert sizes.outcome is Outcome.FAILED
    assert sizes.case.endswith("-fp32")


def refuses(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("nothing to normalise")


def test_an_error_is_blamed_on_who_raised_it() -> None:
    blocked = finding(small("mine", refuses, X, {"y": "N D"}), lambda x: x / x.norm(), "outputs")
    assert (blocked.outcome, blocked.rank) == (Outcome.BLOCKED, None)
    assert "the reference raised an error: " in blocked.message
    assert blocked.case == "mine-tried-N5D8-fp32"
    op = small("mine", lambda x: x / x.norm(), X, {"y": "N D"})
    assert finding(op, refuses, "outputs").outcome is Outcome.CRASHED

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        raise RuntimeError("no order of this length")

    order = Tensor("N", dtype=torch.int64, values=Values("order", sample))
    op = small("ordered", lambda x, order: x[order], {**X, "order": order}, {"y": "N D"})
    blocked = finding(op, lambda x, order: x[order], "outputs")
    assert blocked.outcome is Outcome.BLOCKED
    assert "the declared distribution of order raised an error: " in blocked.message


def test_what_cannot_be_checked_here_says_why() -> None:
    silu = OPS["silu_mul"]
    answer = finding(silu, silu["eager"].call, "outputs", requires=("triton", "gpu"))
    assert answer.outcome is Outcome.UNSUPPORTED
    assert "GPU" in answer.message
    domain = {"x": Tensor("N D", values=uniform(1.0, 2.0))}
    root = small("root", lambda x: (x - 1).sqrt(), domain, {"y": "N D"})
    answer = finding(root, root["eager"].call, "special values")
    assert answer.outcome is Outcome.UNSUPPORTED
    assert answer.message == "no input may have any value, and no parameter another one"


def test_right_code_is_not_accused_when_it_is_compiled() -> None:
    """The corpus has what is: its right kernels are interpreted, where nothing is compiled."""
    op = small("twice", lambda x: 2 * x, X, {"y": "N D"})
    assert finding(op, lambda x: x + x, "compiled").outcome is Outcome.PASSED
