"""Ops with outputs of integers are declared and timed as others are."""

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.specs import DeclarationError
from tinyllama.harness.measure import op_contender


def test_an_op_with_an_output_of_integers_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op(
        "largest",
        inputs={"x": Tensor("N D", grad=True)},
        outputs={"value": "N", "index": Tensor("N", dtype=torch.int64)},
        cases=[Case(N=6, D=64)],
        timed=[Case(N=8, D=32)],
        bytes={phase: lambda size, N, D: N * D * size for phase in ("forward", "backward")},
        flops={phase: lambda N, D: N * D for phase in ("forward", "backward")},
    )
    op.reference(lambda x: tuple(x.max(-1)))
    monkeypatch.setattr(op_contender, "ops_of", lambda *args: {"largest": op})
    timed = op_contender.OpContender(op_contender.Timed("largest", "eager", 0, "fp32"), "cpu", "")
    timed.check_first()
    assert set(timed.turn()) == {op_contender.FORWARD, op_contender.BOTH}


def test_only_outputs_of_integers_may_be_off_by_one() -> None:
    x = {"x": Tensor("N D", off_by=1)}
    with pytest.raises(DeclarationError, match="'x': off_by is for integral outputs"):
        Op("far", inputs=x, outputs={"y": "N D"}, cases=[Case(N=2, D=3)])
