"""Faults that fused blocks can have, each put in, and the test that must find it.

Barriers are waited at on a CPU too: the programs of a launch have their turns there
(`tinyllama.harness.kernels.programs`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import forced, gradients, inputs
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.declare.registry import providers_restored
from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import processors
from tinyllama.harness.kernels.programs import Order, ordered
from tinyllama.harness.kernels.streams import Side
from tinyllama.harness.kernels.together import EVERY, meet
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW
from tinyllama.model.tiers import V4
from tinyllama.ops.stack import Fused, Inputs, fused, single, single_kernels, stack
from tinyllama.ops.stack.fused import InSeveral
from tinyllama.ops.stack.passes import Backward, Forward
from tinyllama.ops.stack.single import BACKWARD_PHASES, FORWARD_PHASES, WATCHDOG
from tinyllama.suites.accuracy import assert_accurate
from tinyllama.training.step import TrainStep

CPU = torch.device("cpu")

# -- a barrier that is left out -------------------------------------------------------------------


def small_tiles(given: Inputs) -> AbstractContextManager[None]:
    """So many tiles in each phase that every program has some."""
    products, blocks = {"BM": 16, "BN": 16, "BK": 16, "GROUP": 8}, {"QM": 16, "QN": 16}
    tiles = {
        "stack.single_forward": Config(**products, **blocks),
        "stack.single_backward": Config(**products, **blocks, KM=16, KN=16),
    }
    return forced(lambda: gradients(given, "single"), tiles.get)


LEFT_OUT = 0  # the code of a barrier


@jit
def all_but_one(counter, expected, spins, status, code, opened):  # type: ignore[no-untyped-def]
    """A barrier; at that of `LEFT_OUT` a program counts, and does not wait."""
    if code == LEFT_OUT:
        tl.debug_barrier()
        tl.atomic_add(counter, opened, sem="release", scope="gpu")
        still = opened
    else:
        still = meet(counter, expected, spins, status, code, opened)
    return still


BARRIERS = [
    *((False, phase) for phase in range(len(FORWARD_PHASES) - 1)),
    *((True, phase) for phase in range(len(BACKWARD_PHASES) - 1)),
]


@pytest.mark.parametrize(("backward", "phase"), [(False, None), *BARRIERS])
def test_each_barrier_is_needed(
    backward: bool, phase: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs in one launch for all phases: right with all barriers of the first block, and
    without one of them a program reads what the other has not written yet."""
    given = inputs(9, 2, 1, 32, CPU, batch=1)
    WATCHDOG.fault(CPU)  # of an earlier test
    with small_tiles(given):
        expected = gradients(given, "single")
        monkeypatch.setattr(single, "phases", lambda device, count: (EVERY,))
        if phase is not None:
            code = single._code(0, backward=backward) + phase
            monkeypatch.setitem(globals(), "LEFT_OUT", code)
            monkeypatch.setattr(single_kernels, "meet", all_but_one)
        with PoisonedMemory(), processors(2), ordered(Order("reversed")):
            found = gradients(given, "single")
    WATCHDOG.check(CPU)
    if phase is None:
        assert all(map(torch.equal, found, expected))
    else:
        assert not all(one.isfinite().all() for one in found)


# -- what a block reads is another block's --------------------------------------------------------


class Faulty(InSeveral):
    """Right by itself; what is kept for a fault is that of the block before."""

    def __init__(self, x_BTD: torch.Tensor, layers: int) -> None:
        super().__init__(x_BTD, layers)
        self.before: Any = None

    def stale(self, now: Any) -> Any:
        found, self.before = now if self.before is None else self.before, now
        return found


class Right(Faulty):
    pass


class SumsOfAnotherBlock(Faulty):
    """A row sum of the wrong layer: 1 / rms of the first norm is the last block's."""

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        return super().forward(index, block._replace(squares=self.stale(block.squares)))


class SumsOfTheOtherNorm(Faulty):
    """The backward pass scales by 1 / rms of the block's other norm."""

    def backward(self, index: int, block: Backward) -> None:
        super().backward(index, block._replace(rstd=block.rstd.flip(0)))


class GainOfAnotherBlock(Faulty):
    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        return super().forward(index, block._replace(mlp_norm=self.stale(block.mlp_norm)))


class PartsOfAnotherBlock(Faulty):
    """Row sums of the products of gradients, which the norm's gradient subtracts."""

    def _activation_gradient(self, block: Backward, folds: bool) -> torch.Tensor | None:
        parts: torch.Tensor | None = self.stale(super()._activation_gradient(block, folds))
        return parts


class ResidualOfAnotherBlock(Faulty):
    """The inputs of the norms in the backward pass."""

    def backward(self, index: int, block: Backward) -> None:
        super().backward(index, block._replace(total=self.stale(block.total)))


class ActivationOfAnotherBlock(Faulty):
    """The weight gradient of w_down reads h of the block before."""

    def weight_gradients(self, threes: Any, turned: bool) -> None:
        dy, h, dw = threes[-1]
        super().weight_gradients([*threes[:-1], (dy, self.stale(h), dw)], turned)


FAULTS = [one for one in Faulty.__subclasses__() if one is not Right]


@pytest.mark.parametrize("way", [Right, *FAULTS], ids=lambda way: way.__name__)
def test_what_is_of_another_block_is_found(way: type[Faulty], seed: int) -> None:
    """By the accuracy case of three blocks, which holds every provider."""
    with providers_restored([stack]):
        traits = {"requires": ("triton",), "keep": Inputs._fields, "saved": SAVED}
        stack.provider("faulty", **traits)(type("Changed", (Fused,), {"way": way}))
        case = next(case for case in stack.cases if case.dims["L"] == 3)
        found = OpCase(stack, stack["faulty"], case, torch.float32)
        if way is Right:
            assert_accurate(found, CPU, seed)
            return
        with pytest.raises(AssertionError, match="stack-faulty"):
            assert_accurate(found, CPU, seed)


SAVED = stack["fused"].derived.saved if stack["fused"].derived else {}

# -- a step ---------------------------------------------------------------------------------------

SHAPE = ModelConfig(
    hidden_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="bf16", learning_rate=1e-2)


def trained(overlap: bool = True, spoil: Callable[[TrainStep], None] | None = None) -> Any:
    """Losses and parameters of two steps."""
    model = TinyLlama(SHAPE, V4)
    step = TrainStep(model, CONFIG, replace(V4.plan("cpu"), capture=False, overlap=overlap))
    if spoil is not None:
        spoil(step)
    tokens = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens).item() for _ in range(2)]
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("name", ["layers.1.w_down", "embedding"])
def test_a_rounded_weight_that_is_stale_is_found(name: str) -> None:
    """AdamW writes the copy of one parameter elsewhere: a step that rounds all weights anew each
    time has other losses."""

    def anew(step: TrainStep) -> None:
        refresh = step.rounded.refresh  # type: ignore[union-attr]

        def always() -> None:
            step.rounded._versions = None  # type: ignore[union-attr]
            refresh()

        step.rounded.refresh = always  # type: ignore[union-attr, method-assign]

    def stale(step: TrainStep) -> None:
        names = [name for name, _ in step.model.named_parameters()]
        copies = step.optimizer.copies
        assert copies is not None
        copies[names.index(name)] = copies[names.index(name)].clone()

    expected = trained(spoil=anew)
    assert equal(trained(), expected)
    assert not equal(trained(spoil=stale), expected)


@pytest.mark.parametrize("joined", [True, False])
def test_a_side_branch_that_is_not_joined_is_found(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch's work is held back until it is waited for, as a device may do."""
    expected, waiting, update = trained(overlap=False), [], AdamW.update_with

    def held(self: AdamW, gradients: Any, beside: bool) -> None:
        self._done.update(gradients)
        waiting.append(lambda: update(self, gradients, beside))

    def join(self: Side) -> None:
        while joined and waiting:
            waiting.pop(0)()

    monkeypatch.setattr(AdamW, "update_with", held)
    monkeypatch.setattr(Side, "join", join)
    assert equal(trained(), expected) == joined


@pytest.mark.parametrize("scale", ["rstd", "ones"])
def test_gradients_that_are_scaled_twice_or_not_at_all_are_found(
    scale: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose norm is folded and whose is not: a plan of the vendor's q, k and v, whose gradients
    are taken for scaled ones, and one of our own, whose gradients are not scaled."""
    backward = fused.attend_backward

    def other(*args: Any, scaled: Any, **more: Any) -> None:
        rstd, sums = scaled
        spoiled = rstd * rstd if scale == "rstd" else torch.ones_like(rstd)
        backward(*args, scaled=(spoiled, sums), **more)

    case = next(case for case in stack.cases if case.dims["L"] == 3)
    right = OpCase(stack, stack["fused"], case, torch.float32)
    assert_accurate(right, CPU, seed)
    monkeypatch.setattr(fused, "attend_backward", other)
    with pytest.raises(AssertionError, match="stack-fused"):
        assert_accurate(right, CPU, seed)
