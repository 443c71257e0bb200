"""Every example of docs/declare.md runs; absent inputs, computed axes and domains hold."""

import math
import re
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ROOT
from tinyllama.harness import Case, Op, Registry, Tensor, load_file
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.values import uniform

PAGE = (ROOT / "docs" / "declare.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_example_of_the_page_is_right_in_all_its_cases(tmp_path: Path) -> None:
    """They follow each other in one file."""
    file = tmp_path / "declared.py"
    file.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)))
    registry = Registry()
    load_file(file, registry)
    assert len(registry) == PAGE.count("= Op(")
    for case in op_cases(registry.values()):
        assert all(comparison.passed for comparison in case.compare()), str(case)


GATED = Op(
    "gated",
    inputs={"x": Tensor("N 2*R", grad=True), "bias": Tensor("R", grad=True, optional=True)},
    outputs={"y": "N R"},
    cases=[Case(N=3, R=5)],
)


@GATED.reference
def eager(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return gate.sigmoid() * (up if bias is None else up + bias)


@GATED.provider("forgets")  # that it may be None
def forgets(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return eager(x, bias + 0)


def test_an_optional_input_is_tried_present_and_absent() -> None:
    present, absent = (OpCase(GATED, GATED["forgets"], x, torch.float32) for x in GATED.cases)
    assert all(comparison.passed for comparison in present.compare())
    with pytest.raises(TypeError):
        absent.compare()


def test_a_computed_axis_tells_the_size_that_it_is_computed_from() -> None:
    assert GATED(torch.ones(3, 8), None).shape == (3, 4)
    with pytest.raises(ValueError, match=r"2\*R = 7"):
        GATED(torch.ones(3, 7), None)
    with pytest.raises(ValueError, match="R = 5"):
        GATED(torch.ones(3, 8), torch.ones(5))


def test_a_domain_may_be_wider_than_what_is_drawn() -> None:
    wider = uniform(0.5, 1.0).within(0.0, math.inf)
    assert (wider.least, wider.most) == (0.0, math.inf)
    assert wider.sample((1000,), torch.Generator().manual_seed(0)).min() >= 0.5
