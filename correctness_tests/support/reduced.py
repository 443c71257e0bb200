"""Of tests of reductions: gradients that tell parameters apart, and a stand-in for copies."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from correctness_tests.support.two_ranks import SHAPE
from tinyllama.model.llama import TinyLlama
from tinyllama.training.ranks import Ranks

TWO = Ranks(0, 2)
FOUR = replace(SHAPE, num_layers=4)  # more groups than are waited for at the end
BOTH = (False, True)


def with_gradients(shape: Any = SHAPE, tier: str = "v1") -> TinyLlama:
    """A model, each of whose gradients is full of its parameter's number, from 1."""
    model = TinyLlama(shape, tier)
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    return model


def groups_of(model: TinyLlama) -> list[list[int]]:
    """The matrices of each block, and all other parameters."""
    names = [name for name, _ in model.named_parameters()]
    blocks = [
        [i for i, name in enumerate(names) if name.startswith(f"layers.{n}.w_")]
        for n in range(len(model.layers))
    ]
    assert [len(block) for block in blocks] == [7] * len(blocks)
    return [*blocks, [i for i in range(len(names)) if not any(i in block for block in blocks)]]


class Peers:
    """A stand-in for `PeerGradients`: the groups, and what was summed and waited for, in order."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], groups: Iterable[list[int]], ranks: Ranks
    ) -> None:
        given = list(parameters)
        one = given[0].detach()
        size = one.untyped_storage().nbytes() // one.element_size()
        self.master = one.as_strided((size,), (1,), 0)
        self.gradients = torch.zeros_like(self.master)
        self.views = [
            self.gradients.as_strided(p.shape, p.stride(), p.storage_offset()) for p in given
        ]
        self.groups, self.ranks = list(groups), ranks
        self.summed: list[list[int]] = []
        self.waited: list[int] = []
        self.finished = 0

    def sum(self, gradients: Mapping[int, torch.Tensor]) -> int:
        for index, gradient in gradients.items():
            self.views[index].copy_(2 * gradient)
        self.summed.append(list(gradients))
        return len(self.summed) - 1

    def wait(self, point: int) -> None:
        self.waited.append(point)

    def finish(self) -> None:
        self.finished += 1
