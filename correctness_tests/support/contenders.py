"""Contenders of an op's providers, or of a call that is made a provider."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama.harness.measure.op_contender import OpContender, Timed, ops_of

PACKAGE = "tinyllama.ops"
FILES = (str(Path(__file__).with_name("weigh_rows.py")),)

Call = Callable[..., Any]
Contender = Callable[..., OpContender]


def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the op of weigh_rows.py computes."""
    return x * weight


class Turning:
    """A call that is right until it is told to turn."""

    def __init__(self, wrong: Call) -> None:
        self.wrong, self.turned = wrong, False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.wrong if self.turned else weighed)(x, weight)
        return result


@pytest.fixture(name="contender")
def contender_fixture(device: torch.device) -> Iterator[Contender]:
    """Makes contenders whose first call is checked; a call becomes a provider with these traits,
    until the test ends."""
    ops = ops_of(PACKAGE, FILES)
    tried: set[str] = set()

    def make(
        call: Call | str, op: str = "weigh_rows", dtype: str = "fp32", case: int = 0, **traits: Any
    ) -> OpContender:
        name = call if isinstance(call, str) else "tried"
        if not isinstance(call, str):
            ops[op].providers[name] = replace(ops[op]["eager"], name=name, call=call, **traits)
            tried.add(op)
        made = OpContender(Timed(op, name, case, dtype), str(device), PACKAGE, FILES)
        made.check_first()
        return made

    try:
        yield make
    finally:
        for op in tried:
            del ops[op].providers["tried"]
