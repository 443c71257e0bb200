"""Gradients that are small differences of terms: a right one may be off by the terms' rounding, a
wrong one may not. Eager's difference may be exact by luck, so that its own error allows nothing.
"""

import pytest
import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.declare.specs import Case
from tinyllama.harness.declare.values import Values, constant
from tinyllama.ops import OPS

FP32, BF16 = torch.float32, torch.bfloat16
EPS = torch.finfo(FP32).eps
BOTH = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)


def sure(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Logits whose first class has the probability 1 - 2e-13, which float32 rounds to 1."""
    logits = torch.zeros(shape, device=generator.device)
    logits[..., 0] = 30.0
    return logits


SURE = {"logits": Values("sure", sure), "targets": constant(0)}


def passes(case: OpCase, error: dict[str, torch.Tensor]) -> bool:
    """Whether eager's results with these errors added pass."""
    inputs = case.inputs()
    references = case.references(inputs)
    results = {
        name: (value + error[name]).to(value.dtype) if name in error else value
        for name, value in references.eager.items()
    }
    return all(
        comparison.passed for comparison in case.judge(results, inputs, references=references)
    )


@BOTH
@pytest.mark.parametrize(
    ("reduction", "ignored"),
    [("mean", None), ("sum", None), ("none", None), ("sum", 0), ("none", 0)],
)
def test_a_probability_near_one(reduction: str, ignored: int | None, dtype: torch.dtype) -> None:
    """p - 1 is taken in float32. Of a target that is ignored the gradient is 0, without terms."""
    params = {"reduction": reduction, "ignore_index": ignored}
    op = OPS["cross_entropy"]
    case = OpCase(op, op["eager"], Case(N=4, V=3, values=SURE, params=params), dtype)
    (upstream,) = case.inputs().upstream.values()
    assert upstream is not None
    scale_N = upstream.expand(4).double().abs() / (4 if reduction == "mean" else 1)
    rounding = torch.zeros(4, 3, dtype=torch.float64)
    rounding[:, 0] = scale_N * EPS / 2
    assert passes(case, {"grad logits": rounding}) is (ignored is None)
    assert not passes(case, {"grad logits": 10 * rounding})


@BOTH
def test_a_norm_of_one_feature(dtype: torch.dtype) -> None:
    """dx = rstd (w dy - n mean(n w dy)), where n is nearly 1."""
    op = OPS["add_rms_norm"]
    values = {"x": constant(100.0), "residual": constant(28.0)}
    case = OpCase(op, op["eager"], Case(B=2, T=3, D=1, values=values), dtype, absent="sum")
    inputs = case.inputs()
    dy = inputs.upstream["y"]
    assert dy is not None
    rounding = (inputs.args["weight"] * dy).double().abs() / 128 * EPS / 2
    names = ("grad x", "grad residual")
    assert passes(case, dict.fromkeys(names, rounding))
    for name in names:
        assert not passes(case, {name: 10 * rounding})
