"""How ranks reduce gradients, in one process: which way is taken, what is summed, and when.

The other rank has the same gradients here: a sum over two ranks doubles them, and those of an
asynchronous one are doubled when it is waited for. `test_ranks.py` has two ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from correctness_tests.support.reduced import BOTH, FOUR, TWO, Peers, groups_of, with_gradients
from correctness_tests.support.two_ranks import CONFIG, SHAPE
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan
from tinyllama.training import reduction
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.reduction import (
    COLLECTIVES,
    COPIES,
    Beside,
    Copied,
    CopiedBeside,
    Parallel,
    Reduction,
    Sharded,
    reduction_of,
    updates_in_parts,
)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that are summed over the ranks, in order."""
    found: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Any:
        found.append(tensor)
        if async_op:
            return SimpleNamespace(wait=lambda: tensor.mul_(2))
        return tensor.mul_(2)

    monkeypatch.setattr(reduction.dist, "all_reduce", all_reduce)
    return found


# -- sums by collectives -----------------------------------------------------------------------


def test_adjacent_tensors_are_summed_where_they_are(sums: list[torch.Tensor]) -> None:
    memory = torch.arange(10.0)
    reduction._sum([memory[1:3], memory[3:9].view(2, 3)])
    assert memory.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 9]
    (one,) = sums
    assert (one.data_ptr(), one.numel()) == (memory[1:].data_ptr(), 8)


def test_tensors_apart_are_summed_together(sums: list[torch.Tensor]) -> None:
    some = [torch.full(shape, 1.0 + n) for n, shape in enumerate([(2, 3), (4,), (1, 1)])]
    reduction._sum(some)
    assert [one.unique().tolist() for one in some] == [[2], [4], [6]]
    assert [one.numel() for one in sums] == [11]
    reduction._sum([])
    assert len(sums) == 1


def test_beside_sums_each_gradient_of_a_step_once(sums: list[torch.Tensor]) -> None:
    """Those of a block in the order of memory; then each other matrix, and all vectors as one."""
    model = with_gradients()
    names = [name for name, _ in model.named_parameters()]
    way = Beside(model, model.loss_with, TWO)
    assert (way.share, way.way, way.early, way.receives) == (0.5, COLLECTIVES, False, False)
    first = [i for i, name in enumerate(names) if name.startswith("layers.0")]
    matrices = [i for i in first if "norm" not in names[i]]
    without = names.index("layers.1.w_down")
    way.parameters[without].grad = None
    for step in (1, 2):
        sums.clear()
        grads = {i: way.parameters[i].grad for i in reversed(matrices)}
        way.reduce({i: grad for i, grad in grads.items() if grad is not None})
        assert sums[0].numel() == sum(way.parameters[i].numel() for i in matrices)
        way.finish()
        rest = [p for i, p in enumerate(way.parameters) if i not in (*matrices, without)]
        large = [p.numel() for p in rest if p.dim() > 1]
        small = sum(p.numel() for p in rest if p.dim() == 1)
        assert [one.numel() for one in sums[1:]] == [*large, small]
        for number, parameter in enumerate(way.parameters, 1):
            if parameter.grad is not None:
                assert parameter.grad.unique().tolist() == [number * 2**step], names[number - 1]
    assert way.parameters[without].grad is None


def test_after_the_blocks_the_embedding_and_all_vectors_are_left(sums: list[torch.Tensor]) -> None:
    model = with_gradients()
    way = Beside(model, model.loss_with, TWO)
    for block in groups_of(model)[:-1]:
        way.reduce({i: way.parameters[i].grad for i in block})  # type: ignore[misc]
    sums.clear()
    way.finish()
    vectors = sum(p.numel() for p in way.parameters if p.dim() == 1)
    assert [one.numel() for one in sums] == [model.embedding.numel(), vectors]
    assert all(p.grad.unique() == 2 * n for n, p in enumerate(way.parameters, 1))  # type: ignore[union-attr]


def test_a_step_that_was_begun_and_left_sums_all_in_the_next(sums: list[torch.Tensor]) -> None:
    model = with_gradients()
    way = Beside(model, model.loss_with, TWO)
    way.reduce({0: torch.ones(3)})
    way.clear()
    way.finish()
    assert sum(one.numel() for one in sums[1:]) == SHAPE.parameters


# -- DistributedDataParallel -------------------------------------------------------------------


class Wrapped:
    """A stand-in for DistributedDataParallel: what it was given, and when it synchronises."""

    hook: Any = None
    require_backward_grad_sync: bool | None = None

    def __init__(self, module: Any, **settings: Any) -> None:
        self.module, self.settings = module, settings

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        assert self.hook is None
        self.hook = lambda bucket: hook(state, bucket)

    def __call__(self, *batch: Any) -> Any:
        return "reduced", self.module(*batch)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "DistributedDataParallel", Wrapped)


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize("early", BOTH)
def test_buckets_are_as_large_as_a_layer(early: bool) -> None:
    model = TinyLlama(SHAPE)
    compiled: Any = lambda *batch: ("compiled", *batch)  # noqa: E731
    way = Parallel(model, compiled, TWO, early)
    given: Any = way._ddp
    layer = sum(p.numel() for p in model.layers[0].parameters())
    assert given.settings == {"bucket_cap_mb": 4 * layer / 2**20, "gradient_as_bucket_view": True}
    assert {id(p) for p in given.module.parameters()} == {id(p) for p in model.parameters()}
    assert (way.early, way.share) == (early, 0.5 if early else 1.0)
    assert (given.hook is None) == (not early), "without it gradients are averaged"
    assert (way.warm_up, way.way, way.receives) == (11, COLLECTIVES, False)
    for reduces in BOTH:
        way.expect(reduces)
        assert given.require_backward_grad_sync is reduces
    assert way.loss(1, 2) == ("reduced", ("compiled", 1, 2))
    way.plain, plain = True, lambda *batch: ("plain", *batch)
    model.loss_with = plain  # type: ignore[assignment, method-assign]
    assert way.loss(1, 2) == ("plain", 1, 2)


@pytest.mark.usefixtures("wrapped")
def test_buckets_are_made_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After what was launched before, and before what is launched later."""
    told = Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: told.own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: told.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream.entered()))
    model = TinyLlama(SHAPE).to("meta")
    Parallel(model, model.loss_with, TWO)
    assert told.mock_calls == [
        call.own.wait_stream(told.current),
        call.own.entered(),
        call.current.wait_stream(told.own),
    ]


@pytest.mark.usefixtures("wrapped")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_but_the_last_buckets_arrive_first(sums: list[torch.Tensor], count: int) -> None:
    """Each once its sum is there; those that come first do not wait for the last two."""
    model = TinyLlama(FOUR)
    way = Parallel(model, model.loss_with, TWO, early=True)
    given: Any = way._ddp
    way.expect(True)
    order = list(reversed(range(len(way.parameters))))
    buckets = [order[n::count] for n in range(count)]
    for indices in buckets:
        several = [way.parameters[i] for i in indices]
        memory = torch.full((sum(p.numel() for p in several),), 3.0)
        for parameter, part in zip(
            several, memory.split([p.numel() for p in several]), strict=True
        ):
            parameter.grad = part.view(parameter.shape)
        bucket = SimpleNamespace(buffer=lambda it=memory: it, parameters=lambda it=several: it)
        done = given.hook(bucket)
        assert done.done()
        assert done.value() is memory
    assert waited(sums) == set(), "the backward pass waits for no sum"
    found: list[set[int]] = []
    seen: set[int] = set()
    for arrived in way.arrive():
        found.append({n for n, indices in enumerate(buckets) if indices[0] in arrived})
        seen |= arrived.keys()
        for index, gradient in arrived.items():
            assert gradient is way.parameters[index].grad
            assert gradient.unique().tolist() == [6]
        assert waited(sums) == set.union(*found)
    assert found == last_two_apart(count)
    assert seen == {*order}
    assert list(way.arrive()) == [], "a gradient arrives once"


def test_buckets_of_a_backward_pass_before_do_not_arrive(
    sums: list[torch.Tensor], wrapped: None
) -> None:
    model = with_gradients()
    way = Parallel(model, model.loss_with, TWO, early=True)
    given: Any = way._ddp
    bucket = SimpleNamespace(buffer=lambda: torch.ones(1), parameters=lambda: way.parameters[:1])
    given.hook(bucket)
    way.expect(False)
    assert list(way.arrive()) == []
    assert waited(sums) == set()


def waited(sums: list[torch.Tensor]) -> set[int]:
    """Which of the sums of threes were waited for."""
    return {n for n, one in enumerate(sums) if one.unique().tolist() == [6]}


def last_two_apart(count: int) -> list[set[int]]:
    """So many things in two parts, the last two apart; a part that has none is left out."""
    cut = max(0, count - 2)
    return [part for part in (set(range(cut)), set(range(cut, count))) if part]


# -- shards ------------------------------------------------------------------------------------


class Shard:
    """A stand-in for a parameter in shards, of which this rank has two elements of four."""

    placements = ()

    def __init__(self, value: float, gradient: Shard | None = None) -> None:
        self.mine, self.grad = torch.full((2,), value), gradient

    def to_local(self) -> torch.Tensor:
        return self.mine


def test_shards_get_their_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard(1.0, Shard(5.0)), Shard(2.0), Shard(3.0, Shard(7.0))]
    cleared: list[bool] = []
    model: Any = SimpleNamespace(
        parameters=lambda: shards, zero_grad=lambda set_to_none: cleared.append(set_to_none)
    )
    way = Sharded(model, lambda *batch: torch.zeros(()))
    assert [p.tolist() for p in way.parameters] == [[1, 1], [2, 2], [3, 3]]
    assert (way.share, way.warm_up, way.early, way.receives, way.way) == (1, 0, False, False, None)
    way.parameters[1].grad = torch.ones(2)
    way.finish()
    grads = [None if p.grad is None else p.grad.tolist() for p in way.parameters]
    assert grads == [[5, 5], None, [7, 7]]
    way.clear()
    assert cleared == [True]
    clip = Mock(return_value=SimpleNamespace(full_tensor=lambda: "the norm of whole tensors"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    assert way.clip(0.5) == "the norm of whole tensors"
    clip.assert_called_once_with(shards, 0.5)


# -- which way ---------------------------------------------------------------------------------


def test_one_rank_reduces_nothing() -> None:
    model = with_gradients()
    way, left_out = reduction_of(model, CONFIG, StepPlan(), ALONE, lambda *batch: torch.ones(()))
    assert (type(way), left_out) == (Reduction, {})
    assert (way.share, way.warm_up, way.early, way.receives, way.way) == (1, 0, False, False, None)
    assert way.loss().item() == 1
    assert list(way.arrive()) == []
    before = [p.grad.clone() for p in way.parameters if p.grad is not None]
    norm = torch.cat([one.flatten() for one in before]).norm()
    torch.testing.assert_close(way.clip(2.0), norm)
    for parameter, gradient in zip(way.parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 2 / norm)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "PeerGradients", Peers)


ACCUMULATED, CLIPPED = {"accumulate": 2}, {"max_grad_norm": 1.0}
AT_ONCE = {"overlapped reduction": "the gradients of all blocks come at once"}


@pytest.mark.usefixtures("peers", "wrapped")
@pytest.mark.parametrize(
    ("way", "overlap", "settings", "stacked", "apart"),
    [
        # blocks as one op that are updated during the backward pass, and blocks that are not one
        (COLLECTIVES, True, {}, (Beside, False), (Parallel, True)),
        (None, True, {}, (Beside, False), (Parallel, True)),
        (None, False, {}, (Parallel, True), (Parallel, True)),
        (None, False, ACCUMULATED, (Parallel, True), (Parallel, True)),
        (None, False, CLIPPED, (Parallel, False), (Parallel, False)),
        (COPIES, True, {}, (CopiedBeside, False), (Copied, True)),
        (COPIES, False, {}, (CopiedBeside, True), (Copied, True)),
        (COPIES, True, CLIPPED, (CopiedBeside, False), (Copied, False)),
        (COPIES, False, ACCUMULATED, (Copied, True), (Copied, True)),
        (COPIES, False, CLIPPED, (Copied, False), (Copied, False)),
    ],
)
def test_the_way_follows_from_plan_and_settings(
    way: str | None,
    overlap: bool,
    settings: dict[str, Any],
    stacked: tuple[type[Reduction], bool],
    apart: tuple[type[Reduction], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(CONFIG, batch_size=6, seq_len=5, precision="bf16", **settings)
    monkeypatch.setattr(reduction, "cannot_copy", lambda *_: None if way == COPIES else "never")
    for stacks, (kind, early) in ((True, stacked), (False, apart)):
        model = TinyLlama(SHAPE, "v3")
        asked: list[Any] = []

        def answer(x: torch.Tensor, dtype: torch.dtype, stacks: bool = stacks) -> bool:
            asked.append((x.shape, dtype))  # noqa: B023
            return stacks

        model.stacks = answer  # type: ignore[assignment, method-assign]
        given = (StepPlan(overlap=overlap), TWO, model.loss_with, way)
        found, left_out = reduction_of(model, config, *given)
        assert (type(found), found.early) == (kind, early)
        assert asked == [((15, 16), torch.bfloat16)]
        at_once = stacks and kind in (Copied, Parallel)
        assert left_out == (AT_ONCE if at_once else {})
        if isinstance(found, Copied | CopiedBeside):
            assert found._alone == (not settings.get("accumulate"))


def test_products_are_in_float32_without_autocast(wrapped: None) -> None:
    model = TinyLlama(SHAPE, "v3")
    model.stacks = stacks = Mock(return_value=False)  # type: ignore[method-assign]
    reduction_of(model, CONFIG, StepPlan(), TWO, model.loss_with)
    assert [call.args[1] for call in stacks.call_args_list] == [torch.float32]


@pytest.mark.parametrize(
    ("tier", "settings", "parts"),
    [
        ("v3", {}, True),
        ("v3", {"precision": "bf16"}, True),
        ("v3", {"precision": "fp16"}, False),
        ("v3", {"max_grad_norm": 1.0}, False),
        ("v1", {}, False),  # its optimizer counts on the host
        ("v1", {"precision": "fp16", "max_grad_norm": 1.0}, False),
    ],
)
def test_what_waits_for_all_gradients(tier: str, settings: dict[str, Any], parts: bool) -> None:
    config = TrainConfig(**settings)
    assert updates_in_parts(TinyLlama(SHAPE, tier), config) is parts


@pytest.mark.parametrize(
    ("way", "ranks", "error"),
    [
        ("magic", ALONE, "reduce 'magic' is unknown: use copies or collectives"),
        ("magic", TWO, "reduce 'magic' is unknown: use copies or collectives"),
        (COPIES, ALONE, "reduce copies: one rank has nothing to reduce: leave it out"),
        (COLLECTIVES, ALONE, "reduce collectives: one rank has nothing to reduce: leave it out"),
        (COPIES, TWO, "reduce copies cannot be: no link; use collectives"),
    ],
)
def test_a_way_that_cannot_be_is_refused(
    way: str, ranks: Ranks, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "cannot_copy", lambda *_: "no link")
    model = TinyLlama(SHAPE)
    with pytest.raises(ConfigError) as caught:
        reduction_of(model, CONFIG, StepPlan(), ranks, model.loss_with, way)
    assert str(caught.value) == error


@pytest.mark.parametrize("way", [None, COLLECTIVES, COPIES])
def test_shards_are_reduced_by_collectives(
    way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "sharded", lambda _: True)
    model = TinyLlama(SHAPE)
    given = (model, CONFIG, StepPlan(), TWO, model.loss_with, way)
    if way == COPIES:
        with pytest.raises(ConfigError) as caught:
            reduction_of(*given)
        reason = "reduce copies: FSDP2 reduces shards by collectives: leave it out"
        assert str(caught.value) == reason
        return
    found, left_out = reduction_of(*given)
    assert (type(found), left_out) == (Sharded, {})
