"""Every example of docs/declare.md runs; absent inputs, computed axes and domains hold."""

import math
import re
from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import ROOT
from tinyllama.harness import Case, DeclarationError, Op, Registry, Tensor, load_file
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.values import uniform

PAGE = (ROOT / "docs" / "declare.md").read_text(encoding="utf-8")


def test_every_example_of_the_page_is_right_in_all_its_cases(tmp_path: Path) -> None:
    """They follow each other in one file."""
    file = tmp_path / "declared.py"
    file.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)))
    registry = Registry()
    load_file(file, registry)
    assert len(registry) == PAGE.count("= Op(")
    for case in op_cases(registry.values()):
        assert all(comparison.passed for comparison in case.compare()), str(case)


def gated(**changes: Tensor) -> Op:
    inputs = {
        "x": Tensor("N 2*R", grad=True),
        "bias": Tensor("R", grad=True, optional=True),
        **changes,
    }
    op = Op("gated", inputs=inputs, outputs={"y": "N R"}, cases=[Case(N=3, R=5)])

    @op.reference
    def eager(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return gate.sigmoid() * (up if bias is None else up + bias)

    return op


def test_an_optional_input_is_tried_present_and_absent() -> None:
    op = gated()

    @op.provider("forgets")  # that it may be None
    def forgets(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, -1)[0].sigmoid() * (x.chunk(2, -1)[1] + bias)

    first = OpCase(op, op["forgets"], op.cases[0], torch.float32)
    assert all(comparison.passed for comparison in first.compare())
    (absent,) = (case for case in op.cases if case.without == ("bias",))
    with pytest.raises(TypeError):
        OpCase(op, op["forgets"], absent, torch.float32).compare()


def test_a_computed_axis_tells_the_size_that_it_is_computed_from() -> None:
    op = gated()
    assert op(torch.ones(3, 8), None).shape == (3, 4)
    assert op(torch.ones(3, 8), torch.ones(4)).shape == (3, 4)
    with pytest.raises(ValueError, match=r"2\*R = 7"):
        op(torch.ones(3, 7), None)
    with pytest.raises(ValueError, match="R = 5"):
        op(torch.ones(3, 8), torch.ones(5))


@pytest.mark.parametrize(
    "changes",
    [
        {"x": Tensor("N 2*R", optional=True)},  # the first input
        {"x": Tensor("N R/2"), "bias": Tensor("N", optional=True)},  # of which R does not follow
        {"bias": Tensor("R", mutated=True, optional=True)},
    ],
)
def test_what_an_absent_input_or_a_computed_axis_cannot_be_is_refused(
    changes: dict[str, Tensor],
) -> None:
    with pytest.raises(DeclarationError):
        gated(**changes)


def test_a_domain_may_be_wider_than_what_is_drawn() -> None:
    wider = uniform(0.5, 1.0).within(0.0, math.inf)
    assert (wider.least, wider.most) == (0.0, math.inf)
    drawn = wider.sample((1000,), torch.Generator().manual_seed(0))
    assert drawn.min() >= 0.5
    assert drawn.max() < 1.0
    with pytest.raises(ValueError, match="empty"):
        uniform(0.5, 1.0).within(1.0, 0.0)
