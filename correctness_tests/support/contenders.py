"""Calls that a test makes providers of the op of weigh_rows.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGE = "tinyllama.ops"
FILES = (str(Path(__file__).with_name("weigh_rows.py")),)

Call = Callable[..., Any]


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
