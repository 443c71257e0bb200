"""The provider `single` of `stack`: phases of one launch, the barriers between them, the watchdog.

That it is right follows from the cases of the op. The interpreter runs programs one after the
other, so there each phase is a launch; barriers wait on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import EPS, LAYERS, forced, gradients, inputs
from tinyllama.harness.check.guards import PoisonedMemory
from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.chips import processors
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.grid_barrier import EVERY, Watchdog, meet
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.kernels.programs import ordered
from tinyllama.harness.machine.device import cannot, default_device
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V4
from tinyllama.ops.stack import single, stack
from tinyllama.ops.stack.passes import Inputs
from tinyllama.ops.stack.single import WATCHDOG
from tinyllama.training.step import TrainStep
from tinyllama.training.train import train

SHAPE = (9, 2, 1, 32)  # tokens, heads, heads of keys and values, head dimension
CPU = torch.device("cpu")
GAINS = (2, 7)  # among the output and the gradients, those of the gains


def equal_tiles(tensors: Inputs) -> AbstractContextManager[None]:
    """The same tiles and blocks for both providers."""
    products = {"BM": 16, "BN": 32, "BK": 16, "GROUP": 8}
    attention = {"QM": 16, "QN": 16}
    sizes = {**attention, "KM": 16, "KN": 16}
    configs = {
        "stack.attend": Config(BK=0, DESCRIBED=0),
        "stack.single_forward": Config(**products, **attention),
        "stack.single_backward": Config(**products, **sizes),
        "attention.forward": Config(**attention, TURN=0),
        "attention.backward": Config(**sizes),
    }
    rest = Config(**products, DESCRIBED=0)
    return forced(
        lambda: [gradients(tensors, provider) for provider in ("fused", "single")],
        lambda space: configs.get(space, rest if space.startswith("stack.") else None),
    )


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 7], ids="{} processors".format)
def test_with_equal_tiles_it_gives_the_bits_of_several_launches(
    count: int, device: torch.device
) -> None:
    """With several sequences for a group, and several programs for a sequence. Only the gradients
    of gains are summed over other tiles: those of a sequence."""
    tensors = inputs(*SHAPE, device, batch=2)
    with equal_tiles(tensors), processors(count):
        several, single = gradients(tensors), gradients(tensors, "single")
    for index, (expected, actual) in enumerate(zip(several, single, strict=True)):
        if index in GAINS:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_all_programs_of_a_launch_can_run_at_once(batch: int) -> None:
    """A program more than processors would be waited for, and never begin."""
    tensors = inputs(*SHAPE, CPU, batch=batch)
    with processors(4), recorded("sm_90") as launches_:
        gradients(Inputs._make(tensor.to("meta") for tensor in tensors), "single")
    grids = [launch.grid for launch in launches_ if "single" in launch.identity]
    assert len(grids) == 2 * LAYERS
    assert all(min(batch, 4) <= programs <= 4 for (programs,) in grids)


# -- barriers -------------------------------------------------------------------------------------


@contextmanager
def all_phases_in_one_launch() -> Iterator[None]:
    """Also where it is interpreted."""
    WATCHDOG.fault(CPU)  # of an earlier test
    with mock.patch.object(single, "phases", return_value=(EVERY,)):
        yield


@pytest.mark.parametrize("count", [1, 2])
def test_one_launch_of_all_phases_is_right(count: int) -> None:
    """With programs that wait for each other, the last one first."""
    tensors = inputs(*SHAPE, CPU, batch=1)
    with processors(count):
        expected = gradients(tensors, "single")
        with all_phases_in_one_launch(), PoisonedMemory(), ordered("reversed"):
            actual = gradients(tensors, "single")
    WATCHDOG.check(CPU)
    assert all(map(torch.equal, actual, expected))


def test_a_barrier_that_does_not_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two programs waits for the second, which the interpreter has not begun: the
    results are NaN, and the barrier is named once."""
    monkeypatch.setattr(WATCHDOG, "spins", 2)
    with all_phases_in_one_launch(), processors(2):
        actual = gradients(inputs(*SHAPE, CPU, batch=1), "single")
    assert actual[0].isnan().any()
    with pytest.raises(RuntimeError, match=r"forward pass of block 0 .* phase 0 \(q, k and v\)"):
        WATCHDOG.check(CPU)
    WATCHDOG.check(CPU)  # it was said


@jit
def waits_kernel(counter, status, expected, spins):  # type: ignore[no-untyped-def]
    opened = meet(counter, expected, spins, status, 7, 1)
    opened = meet(counter, 1, spins, status, 8, opened)
    tl.store(counter + 1, opened)


@pytest.mark.parametrize(("expected", "opened"), [(1, 1), (2, 0)])
def test_a_program_waits_no_longer_than_it_may(
    expected: int, opened: int, device: torch.device
) -> None:
    """One program that waits for one, and for two. It reports the first barrier alone, and does
    not count at the second."""
    dog = Watchdog("code {}".format, spins=100)
    counter = torch.zeros(2, dtype=torch.int32, device=device)
    with torch.inference_mode():  # a model may be asked there first
        dog.status(device)
    waits_kernel[(1,)](counter, dog.status(device), expected, dog.spins)
    assert counter.tolist() == [1 + opened, opened]
    assert dog.fault(device) == (None if opened else "code 7")
    assert dog.fault(device) is None


# -- on a GPU -------------------------------------------------------------------------------------


def together(test: Any) -> Any:
    """For programs that wait for each other: on a CPU they are interpreted in turn."""
    reason = cannot("gpu", default_device())
    return pytest.mark.gpu(
        pytest.mark.skipif(reason is not None, reason=f"barriers: {reason}")(test)
    )


@together
def test_repeated_it_gives_equal_bits(device: torch.device) -> None:
    tensors = inputs(130, 4, 2, 64, device, batch=5)
    first = gradients(tensors, "single")
    for _ in range(20):
        assert all(map(torch.equal, gradients(tensors, "single"), first))
    WATCHDOG.check(device)


@together
@pytest.mark.parametrize("batch", [1, 3, 300], ids="{} sequences".format)
def test_programs_that_run_together_are_right(batch: int, device: torch.device) -> None:
    """All gradients against float64's, with few and with all processors for a sequence, and with
    more sequences than processors. The reference in float32 says how far off they may be."""
    tensors = inputs(70, 4, 2, 32, device, batch=batch)
    actual = gradients(tensors, "single")
    WATCHDOG.check(device)
    exact, stock = (
        gradients(Inputs._make(tensor.to(dtype) for tensor in tensors), "eager")
        for dtype in (torch.float64, torch.bfloat16)
    )
    for tensor, oracle, stocks in zip(actual, exact, stock, strict=True):
        allowed = 3 * (stocks.double() - oracle).norm()
        assert allowed < 0.5 * oracle.norm()
        assert (tensor.double() - oracle).norm() <= allowed


# -- in a step ------------------------------------------------------------------------------------

MODEL = ModelConfig(
    hidden_dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=24, vocab_size=20
)
CONFIG = TrainConfig(batch_size=2, seq_len=4, precision="bf16", learning_rate=1e-2, num_steps=2)


@together
def test_a_captured_step_gives_the_losses_of_several_launches(device: torch.device) -> None:
    batch = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for tier in (V4, V4.with_plan("single")):
        step = TrainStep(TinyLlama(MODEL, tier).to(device), CONFIG)
        assert step.model.stacks(step.model.embedding, torch.bfloat16)  # as in its autocast
        step.prepare(warm_up=1)
        assert step.plan.capture
        results.append([step(batch[:, :-1], batch[:, 1:]).item() for _ in range(4)])
    assert results[1] == pytest.approx(results[0], rel=1e-3)
    assert results[0][-1] < 0.99 * results[0][0]
    WATCHDOG.check(device)


def test_training_says_so_where_no_loss_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass of the last step, whose parameters are not saved."""
    call: Callable[..., Any] = TrainStep.__call__
    steps = iter([False, True])

    def unopened(self: TrainStep, *batch: torch.Tensor) -> torch.Tensor:
        if next(steps):
            WATCHDOG.status(CPU).fill_(single._code(1, backward=True) + 1)
        loss: torch.Tensor = call(self, *batch)
        return loss

    monkeypatch.setattr(TrainStep, "__call__", unopened)
    path = tmp_path / "saved"
    result = train(MODEL, CONFIG, "v1", device=CPU, save_to=path)
    assert (result.status, len(result.losses)) == ("failed", 2)
    assert (result.reason or "").startswith("a barrier of the backward pass of block 1 did not")
    assert not path.exists()
    assert WATCHDOG.fault(CPU) is None


def test_wider_heads_are_refused() -> None:
    tensors = inputs(4, 1, 1, 128, CPU)
    with pytest.raises(ValueError, match="head dimension 128: at most 64 is supported"):
        stack["single"].call(*tensors, eps=EPS)
