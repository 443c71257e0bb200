"""Gradients of `stack` from transposes, for matrix units that read float32 along the inner axis."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import (
    forced,
    gradients,
    inputs,
    plans_forgotten,  # noqa: F401 (a fixture)
    turn_fixture,  # noqa: F401 (a fixture)
)
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.guards import PoisonedMemory
from tinyllama.harness.kernels import HAS_DESCRIPTORS
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops import attention
from tinyllama.ops.stack import Inputs, provider_of, stack
from tinyllama.ops.stack.configs import HIDDEN_GRADIENT, PRODUCTS
from tinyllama.suites.accuracy import assert_accurate

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
CASE = next(case for case in stack.cases if case.dims["L"] == 3)
SHAPES = [(16, 4, 2, 16), (9, 6, 2, 8), (33, 2, 2, 24)]
PLANS = ["all", "none", *PRODUCTS]


def of_float32(shape: tuple[int, int, int, int], device: torch.device, **widths: int) -> Inputs:
    return Inputs._make(tensor.float() for tensor in inputs(*shape, device, **widths))


@pytest.mark.parametrize(
    ("name", "choice"), [("all", 2), *((plan, 1 + i % 2) for i, plan in enumerate(PLANS))]
)
def test_every_plan_is_as_accurate_as_eager(
    name: str, choice: int, turn: Callable[[int], None], device: torch.device, seed: int
) -> None:
    """All products, none, and each alone: what one leaves out is transposed by another kernel."""
    turn(choice)
    assert_accurate(OpCase(stack, stack[provider_of(name)], CASE, torch.float32), device, seed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_the_bits_are_those_without(
    shape: tuple[int, int, int, int], turn: Callable[[int], None]
) -> None:
    """And all that is read was written."""
    tensors = of_float32(shape, CPU)
    expected = gradients(tensors, provider_of("all"))
    for choice in (1, 2):
        turn(choice)
        with PoisonedMemory():
            actual = gradients(tensors, provider_of("all"))
        assert all(map(torch.equal, actual, expected))


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton has no tensor descriptors")
@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
def test_descriptors_read_what_pointers_read(
    shape: tuple[int, int, int, int], turn: Callable[[int], None], device: torch.device
) -> None:
    turn(1)
    tensors, results = of_float32(shape, device), []
    for described in (0, 1):
        config = Config(BM=32, BN=32, BK=32, GROUP=8, DESCRIBED=described)
        tiles = {f"stack.{name}": config for name in PRODUCTS}
        with forced(lambda: gradients(tensors, provider_of("all")), tiles.get):
            results.append(gradients(tensors, provider_of("all")))
    assert all(map(torch.equal, *results))


def test_wide_tiles_are_stored_by_slices(turn: Callable[[int], None], device: torch.device) -> None:
    """Of two rows of tiles, each half of a tile in two slices; the last one is cut."""
    wide = {HIDDEN_GRADIENT.name: Config(BM=64, BN=128, BK=64, GROUP=8, DESCRIBED=0)}
    assert_the_same_by_transposes(of_float32((33, 2, 2, 8), device, ffn=104), wide, turn)


def test_whole_tiles_are_turned(turn: Callable[[int], None], device: torch.device) -> None:
    """Tiles that divide every size, several each way and wider than long."""
    narrow = Config(BM=16, BN=32, BK=16, GROUP=8, DESCRIBED=0)
    configs = {f"stack.{name}": narrow for name in PRODUCTS}
    tensors = of_float32((16, 2, 1, 16), device, hidden=64, ffn=32)
    assert_the_same_by_transposes(tensors, configs, turn)


def assert_the_same_by_transposes(
    tensors: Inputs, tiles: dict[str, Config], turn: Callable[[int], None]
) -> None:
    """tiles: by space."""
    results = []
    for choice in (0, 2):
        turn(choice)
        with forced(lambda: gradients(tensors, provider_of("all")), tiles.get):
            results.append(gradients(tensors, provider_of("all")))
    for left, right in zip(*results, strict=True):
        assert (left - right).norm() <= 1e-5 * left.norm()


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "K"), [(17, 16), (300, 16), (33, 6), (64, 1)])
def test_attention_reads_and_writes_transposes(tokens: int, K: int, device: torch.device) -> None:
    """Few tokens and many, heads narrower than a block: the kernels' own results, and their
    transposes, and nothing beside these."""
    B, H, G = 2, 4, 2
    generator = torch.Generator().manual_seed(0)
    columns, rows = (H + 2 * G) * K, B * tokens
    qkv, do = (torch.randn(B, tokens, n, generator=generator).to(device) for n in (columns, H * K))
    heads = lambda x: x.unflatten(-1, (-1, K)).split((H, G, G), 2)  # noqa: E731
    do_BTHK, turned = do.unflatten(-1, (-1, K)), qkv.view(rows, -1).T.contiguous()
    do_turned = do.view(rows, -1).T.contiguous()

    def run_with(precomputed: bool) -> list[torch.Tensor]:
        guarded = torch.full((H * K + 16, rows), 7.0, device=device)
        o_turned, written = guarded[: H * K], torch.empty_like(turned)
        ahead = turned[: H * K], turned[H * K :], do_turned
        o, lse = attention.attend(
            *heads(qkv), turned=(turned[(H + G) * K :], o_turned) if precomputed else None
        )
        dqkv = torch.empty_like(qkv)
        attention.attend_backward(
            *(do_BTHK, *heads(qkv), o, lse, *heads(dqkv)),
            turned=(ahead, written) if precomputed else None,
        )
        if precomputed:
            assert torch.equal(o_turned, o.view(rows, -1).T)
            assert (guarded[H * K :] == 7).all()
            assert torch.equal(written, dqkv.view(rows, -1).T)
        return [o, lse, dqkv]

    for left, right in zip(run_with(False), run_with(True), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
