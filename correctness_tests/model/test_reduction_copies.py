"""Reductions by copies, with a stand-in for them: which groups, when they are summed, who waits.

`test_peers.py` has the copies, and `test_ranks.py` two ranks.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from correctness_tests.support.reduced import BOTH, FOUR, TWO, Peers, groups_of, with_gradients
from correctness_tests.support.two_ranks import SHAPE
from tinyllama.harness.kernels.placed import placed
from tinyllama.model.llama import TinyLlama
from tinyllama.training import reduction
from tinyllama.training.reduction import COPIES, Copied, CopiedBeside


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "PeerGradients", Peers)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("kind", [Copied, CopiedBeside])
@pytest.mark.parametrize("alone", BOTH)
@pytest.mark.parametrize("early", BOTH)
def test_gradients_are_placed_only_where_nothing_is_added(
    kind: type[Copied | CopiedBeside], alone: bool, early: bool
) -> None:
    model = TinyLlama(SHAPE)
    way = kind(model, model.loss_with, TWO, alone, early)
    assert (way.early, way.share, way.way) == (early, 0.5, COPIES)
    assert way.receives == (kind is CopiedBeside)
    mine: Any = way.peers
    assert (way.groups, mine.groups, mine.ranks) == (groups_of(model), groups_of(model), TWO)
    for reduces in BOTH:
        way.expect(reduces)
        with way.during():
            assert (placed.of(model.embedding.detach()) is not None) == (reduces and alone)
    way.finish()
    assert mine.finished == 1


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("early", BOTH)
def test_a_group_is_summed_once_its_last_gradient_is_there(early: bool) -> None:
    """Of the backward pass that ends a step, and of no other."""
    model = TinyLlama(FOUR)
    way = Copied(model, model.loss_with, TWO, False, early)
    mine: Any = way.peers
    tokens = torch.arange(8).view(2, 4)
    expected: list[Any] = []
    for step, reduces in enumerate((False, True, True)):
        model.zero_grad()
        way.expect(reduces)
        mine.summed.clear()
        mine.waited.clear()
        way.loss(tokens, tokens, model.rope(4)).backward()
        if not reduces:
            assert mine.summed == []
            expected = [p.grad for p in way.parameters]
            continue
        *blocks, rest = (sorted(group) for group in mine.summed)
        assert [*reversed(blocks), rest] == groups_of(model), step
        for parameter, view, gradient in zip(way.parameters, mine.views, expected, strict=True):
            assert parameter.grad is view
            torch.testing.assert_close(view, 2 * gradient, rtol=0, atol=0)
        found = []
        for arrived in way.arrive():
            found.append((sorted(arrived), list(mine.waited)))
            assert all(arrived[i] is mine.views[i] for i in arrived)
        late = [(sorted(blocks[3] + rest), [0, 1, 2, 3, 4])]
        wanted = [(sorted(chain(*blocks[:3])), [0, 1, 2]), *late]
        assert found == (wanted if early else [])


@pytest.mark.usefixtures("peers")
def test_a_gradient_that_is_missing_stays_so() -> None:
    """The optimizer refuses it; a sum would hide it."""
    model = with_gradients()
    way = CopiedBeside(model, model.loss_with, TWO, True, True)
    model.final_norm.grad = None
    rest = groups_of(model)[-1]
    without = [i for i in rest if way.parameters[i] is not model.final_norm]
    way.expect(True)
    for _ in way.arrive():
        pass
    mine: Any = way.peers
    assert mine.summed == [without]
    assert model.final_norm.grad is None
    for index in without:
        assert way.parameters[index].grad is mine.views[index]


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("early", BOTH)
def test_blocks_are_summed_beside_the_backward_pass(early: bool) -> None:
    """And waited for at once where they are updated there, else as they arrive."""
    model = with_gradients(FOUR)
    way = CopiedBeside(model, model.loss_with, TWO, True, early)
    mine: Any = way.peers
    *blocks, rest = groups_of(model)
    way.expect(True)
    for number, block in enumerate(reversed(blocks)):
        way.reduce({i: torch.ones_like(way.parameters[i]) for i in block})
        assert mine.summed[-1] == block
        assert mine.waited == ([] if early else list(range(number + 1)))
    found = [(sorted(arrived), mine.waited[-1]) for arrived in way.arrive()]
    assert mine.summed[-1] == rest
    first = sorted(chain(*blocks[1:]))
    assert found == ([(first, 2), (sorted(blocks[0] + rest), 4)] if early else [])
    way.expect(True)
    assert len(list(way.arrive())) == (2 if early else 0)
    assert mine.summed[-1] == rest
    assert mine.waited[-1] == (5 if early else 3), "sums of the step before do not arrive"
