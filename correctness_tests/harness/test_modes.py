"""Small parts that others stand on: modes of torch, and integers as frequent as words."""

from typing import Any

import torch

from tinyllama.harness.machine.modes import DispatchMode
from tinyllama.harness.values import ranked


def test_a_mode_is_wrapped_where_it_has_a_function_of_its_own() -> None:
    def written(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    class Own(DispatchMode):
        __torch_dispatch__ = written

    class Inherited(Own):
        pass

    assert vars(Own)["__torch_dispatch__"].__wrapped__ is written
    assert "__torch_dispatch__" not in vars(Inherited)
    with Own():
        assert float(torch.ones(2).sum()) == 2


def test_words_are_drawn_by_rank_and_each_of_them() -> None:
    drawn = ranked(3).sample((500,), torch.Generator().manual_seed(0))
    counts = drawn.bincount().tolist()
    assert len(counts) == 3
    assert counts == sorted(counts, reverse=True)
