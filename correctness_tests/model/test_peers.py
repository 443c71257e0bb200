"""Sums of gradients by copies: shares, the order of the ranks, places, and what is refused.

`test_ranks.py` has the steps of two ranks that use them.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from correctness_tests.support.two_ranks import CONFIG, SHAPE
from tinyllama.harness.kernels.placed import placed
from tinyllama.model.config import ConfigError
from tinyllama.model.llama import TinyLlama
from tinyllama.training import peers
from tinyllama.training.data import RandomTokens
from tinyllama.training.peers import PeerGradients, cannot_copy
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.step import TrainStep

CPU = torch.device("cpu")
LATER = 0.02  # seconds by which each rank is later than the one before


class Threads:
    """A stand-in for the symmetric memory of ranks: those of one process, a thread for each. After
    a barrier the ranks go on one after the other, and each writes its gradients late."""

    def __init__(self, count: int) -> None:
        self.count, self.memories = count, [torch.empty(0)] * count
        self._barrier, self._mine = threading.Barrier(count), threading.local()

    def connected(self, like: torch.Tensor) -> tuple[torch.Tensor, "Threads"]:
        self.memories[self._mine.rank] = torch.zeros_like(like)
        self._barrier.wait()
        return self.memories[self._mine.rank], self

    def get_buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.memories[rank]

    def barrier(self, timeout_ms: int = 0) -> None:
        self._barrier.wait(10)
        time.sleep(LATER * self._mine.rank)

    def run(self, rank: int, call: Callable[[Ranks], Any]) -> Any:
        self._mine.rank = rank
        try:
            return call(Ranks(rank, self.count))
        except BaseException:
            self._barrier.abort()
            raise


def on_each(count: int, call: Callable[[Ranks], Any], patch: pytest.MonkeyPatch) -> list[Any]:
    threads = Threads(count)
    patch.setattr(peers, "_connected", threads.connected)
    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(threads.run, rank, call) for rank in range(count)]
        return [one.result(30) for one in waiting]


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gets_the_sums_of_all(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of other sizes than the shares', twice; equal bit for bit on all ranks."""
    sizes, groups = (7, 200, 64, 1), [[1, 2], [0], [3]]
    drawn = torch.randn(2, count, sum(sizes), generator=torch.Generator().manual_seed(0))

    def rank(ranks: Ranks) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        mine = PeerGradients(torch.zeros(sum(sizes)).split(sizes), groups, ranks)
        for step in drawn:
            time.sleep(LATER * ranks.rank)
            gradients: Sequence[torch.Tensor] = step[ranks.rank].split(sizes)
            if found:  # the second time they are written in place
                mine.gradients.copy_(step[ranks.rank])
                gradients = mine.views
            for group in groups:
                mine.wait(mine.sum({index: gradients[index] for index in group}))
            mine.finish()
            found.append(torch.cat(mine.views))
        return found

    results = on_each(count, rank, monkeypatch)
    for step, each in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(each[0], drawn[step].sum(0))
        assert all(torch.equal(each[0], other) for other in each[1:])


def test_a_group_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(ranks: Ranks) -> torch.Tensor:
        mine = PeerGradients(torch.zeros(300).split(100), [[0], [1], [2]], ranks)
        mine.gradients.fill_(1.0 + ranks.rank)
        mine.sum({1: mine.views[1]})
        mine.finish()
        return mine.gradients

    for number, found in enumerate(on_each(2, rank, monkeypatch)):
        assert [v.unique().tolist() for v in found.split(100)] == [[1 + number], [3], [1 + number]]


@pytest.mark.parametrize("tier", ["v3", "v4"])
def test_gradients_are_written_in_their_place(tier: str, device: torch.device) -> None:
    """Those of the blocks' matrices, with the same bits; nothing copies them there."""
    model = TinyLlama(SHAPE, tier).to(device)
    batch = [half.to(device) for half in RandomTokens(SHAPE.vocab_size, CONFIG).batch(0)]
    one = model.embedding.detach()
    master = one.as_strided((one.untyped_storage().nbytes() // 4,), (1,), 0)
    buffer = torch.zeros_like(master)

    def grads() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.loss(*batch).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    for _ in range(3):  # after which a call is repeated by its plan
        expected = grads()
    with placed(master, buffer):
        found = grads()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], expected[name])
        if name.startswith("layers") and parameter.dim() > 1:
            place = buffer.as_strided(
                parameter.shape, parameter.stride(), parameter.storage_offset()
            )
            assert found[name].data_ptr() == place.data_ptr(), name
    assert placed.of(one) is None
    with placed(master, buffer):
        assert placed.of(torch.zeros(3)) is None


@pytest.mark.parametrize("multicast", [None, "0"])
def test_memory_that_all_ranks_can_read_is_zero_and_without_multicast(
    multicast: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a user sets it otherwise."""
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", multicast or "")
    if multicast is None:
        monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    symmetric = Mock(empty=lambda *size, **kind: torch.full(size, torch.nan, **kind))
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", symmetric, raising=False)
    monkeypatch.setattr(peers.dist, "group", Mock(WORLD="all"))
    memory, way = peers._connected(torch.ones(5, dtype=torch.float64))
    assert torch.equal(memory, torch.zeros(5, dtype=torch.float64))
    symmetric.rendezvous.assert_called_once_with(memory, "all")
    assert way is symmetric.rendezvous.return_value
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == (multicast or "1")


# -- what cannot be ----------------------------------------------------------------------------


class Several(Ranks):
    """Two ranks, of which the other one says what the test wants."""

    others: list[Any]

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, self.others.pop(0) or mine]


def several(*others: Any) -> Several:
    ranks = Several(0, 2)
    object.__setattr__(ranks, "others", list(others))
    return ranks


def test_why_gradients_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert cannot_copy(CPU, ALONE) == "ranks on CPUs have gloo"
    assert cannot_copy(gpu, several("elsewhere")) == "the ranks are on 2 machines"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    reason = "cuda:0 cannot access the memory of GPU 1"
    assert cannot_copy(gpu, several(None, None)) == reason
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert cannot_copy(gpu, several(None, "it cannot")) == "it cannot"  # on the other rank

    def fails(like: torch.Tensor) -> None:
        raise RuntimeError("no such driver\nat line 3")

    monkeypatch.setattr(peers, "_connected", fails)
    reason = "PyTorch has no symmetric memory here: no such driver"
    assert peers._no_copy(CPU, Ranks(0, 2)) == reason


@pytest.mark.parametrize("stale", [False, True])
def test_memory_is_tried_before_it_is_used(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that gives other bytes than were written is no way to sum gradients."""
    if stale:
        monkeypatch.setattr(Threads, "get_buffer", lambda self, *_: torch.zeros(peers.ALIGNMENT))
    reason = "cpu reads [[0.0], [0.0]] in the others' memory, not [[0.0], [1.0]]"
    found = on_each(2, lambda ranks: peers._no_copy(CPU, ranks), monkeypatch)
    assert found == ([reason] * 2 if stale else [None] * 2)


@pytest.mark.parametrize(
    ("ranks", "reduce", "error"),
    [
        (Ranks(0, 2), "magic", "reduce 'magic' is unknown: use copies or collectives"),
        (
            several(None, None),
            "copies",
            "reduce copies cannot be: ranks on CPUs have gloo; use col",
        ),
        (ALONE, "copies", "reduce copies: one rank has nothing to reduce: leave it out"),
    ],
)
def test_a_way_that_cannot_be_is_refused(ranks: Ranks, reduce: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        TrainStep(TinyLlama(SHAPE), CONFIG, None, ranks, reduce)
