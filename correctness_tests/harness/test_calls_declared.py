"""Calls and inputs are as declared."""

from typing import Any

import pytest
import torch

from tinyllama.harness import Tensor
from tinyllama.harness.check.evaluate import make_inputs
from tinyllama.ops import OPS
from tinyllama.ops.rms_norm import rms_norm

X = Tensor("B D", grad=True)


def test_a_call_checks_its_arguments() -> None:
    x, weight = torch.ones(2, 3, 4), torch.ones(4)
    torch.testing.assert_close(rms_norm(x, weight, provider="torch"), rms_norm(x, weight))
    with pytest.raises(ValueError, match="other inputs have D = 4"):
        rms_norm(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"weight has shape \(4, 1\), expected \(D\)"):
        rms_norm(x, weight[:, None])
    with pytest.raises(ValueError, match="takes 2 tensors"):
        rms_norm(x)
    with pytest.raises(ValueError, match="no parameter 'epsilon': use eps"):
        rms_norm(x, weight, epsilon=1.0)
    with pytest.raises(ValueError, match="no provider 'tritn': use one of eager, torch"):
        rms_norm(x, weight, provider="tritn")
    with pytest.raises(ValueError, match="targets has dtype"):
        OPS["cross_entropy"](torch.ones(2, 3), torch.zeros(2))


def test_inputs_are_the_same_on_every_run_and_differ_between_seeds() -> None:
    def x(**options: Any) -> torch.Tensor:
        return make_inputs(rms_norm, rms_norm.cases[0], torch.float32, **options).args["x"]

    assert torch.equal(x(seed=1), x(seed=1))
    assert not torch.equal(x(seed=1), x(seed=2))
    for layout in ("strided", "transposed"):
        assert torch.equal(x(layout=layout), x())
        assert x(layout=layout).stride() != x().stride()
    assert x(layout="expanded").stride()[0] == 0
