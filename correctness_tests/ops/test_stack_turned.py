"""Gradients of `stack` from transposes, for matrix units that read float32 along the inner axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import stacks
from correctness_tests.support.stacks import (
    forced,
    gradients,
    inputs,
    plans_forgotten,  # noqa: F401 (a fixture)
)
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.poison import PoisonedMemory
from tinyllama.harness.kernels import HAS_DESCRIPTORS
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import attention
from tinyllama.ops.attention import FARTHEST_ROW
from tinyllama.ops.stack import Fused, Inputs, configs, provider_of, stack
from tinyllama.ops.stack.configs import HIDDEN_GRADIENT, PRODUCTS, TURNED
from tinyllama.ops.stack.fused import InSeveral
from tinyllama.ops.stack.passes import Backward, Forward
from tinyllama.suites.accuracy import assert_accurate

CPU = torch.device("cpu")
CASE = next(case for case in stack.cases if case.dims["L"] == 3)
SHAPES = [(16, 4, 2, 16), (9, 6, 2, 8), (33, 2, 2, 24)]
PLANS = ["all", "none", *PRODUCTS]
TRAITS: dict[str, Any] = {"requires": ("triton",), "keep": Inputs._fields}


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets whether passes go by transposes."""
    return lambda choice: monkeypatch.setattr(InSeveral, "turns", lambda x, dtype: choice)


def of_float32(shape: tuple[int, int, int, int], device: torch.device) -> Inputs:
    return Inputs._make(one.float() for one in inputs(*shape, device))


@pytest.mark.parametrize("choice", [1, 2])
@pytest.mark.parametrize("name", PLANS)
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
    given = of_float32(shape, CPU)
    expected = gradients(given, provider_of("all"))
    for choice in (1, 2):
        turn(choice)
        with PoisonedMemory():
            found = gradients(given, provider_of("all"))
        assert all(map(torch.equal, found, expected))


def test_repeats_are_equal(turn: Callable[[int], None], device: torch.device) -> None:
    turn(2)
    given = of_float32(SHAPES[0], device)
    one, other = (gradients(given, provider_of("all")) for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton has no tensor descriptors")
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_descriptors_read_what_pointers_read(
    shape: tuple[int, int, int, int], turn: Callable[[int], None], device: torch.device
) -> None:
    turn(1)
    given, found = of_float32(shape, device), []
    for described in (0, 1):
        config = Config(BM=32, BN=32, BK=32, GROUP=8, DESCRIBED=described)
        tiles = {f"stack.{name}": config for name in PRODUCTS}
        with forced(lambda: gradients(given, provider_of("all")), tiles.get):
            found.append(gradients(given, provider_of("all")))
    assert all(map(torch.equal, *found))


def test_wide_tiles_are_stored_by_slices(
    turn: Callable[[int], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two rows of tiles, each half of a tile in two slices; the last one is cut."""
    monkeypatch.setattr(stacks, "FFN", 104)
    wide = {HIDDEN_GRADIENT.name: Config(BM=64, BN=128, BK=64, GROUP=8, DESCRIBED=0)}
    assert_the_same_by_transposes(of_float32((33, 2, 2, 8), device), wide, turn)


def test_whole_tiles_are_turned(
    turn: Callable[[int], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that divide every size, several each way and wider than long."""
    monkeypatch.setattr(stacks, "HIDDEN", 64)
    monkeypatch.setattr(stacks, "FFN", 32)
    narrow = Config(BM=16, BN=32, BK=16, GROUP=8, DESCRIBED=0)
    every = {f"stack.{name}": narrow for name in PRODUCTS}
    assert_the_same_by_transposes(of_float32((16, 2, 1, 16), device), every, turn)


def assert_the_same_by_transposes(
    given: Inputs, tiles: dict[str, Config], turn: Callable[[int], None]
) -> None:
    """tiles: by space."""
    found = []
    for choice in (0, 2):
        turn(choice)
        with forced(lambda: gradients(given, provider_of("all")), tiles.get):
            found.append(gradients(given, provider_of("all")))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def kernels_of(choice: int, turn: Callable[[int], None], precision: str) -> list[Any]:
    turn(choice)
    given = Inputs._make(one.to("meta") for one in of_float32((64, 2, 1, 32), CPU))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with recorded("sm_90") as found:
            gradients(given, provider_of("all"))
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def test_epilogues_leave_no_transposing_kernel(turn: Callable[[int], None]) -> None:
    """But for the weights, whose transposes the optimizer keeps: here none does."""
    plain = [one.identity for one in kernels_of(0, turn, "high")]
    for choice in (1, 2):
        found = [one.identity for one in kernels_of(choice, turn, "high")]
        copies = found.count("transpose.transpose_kernel")
        assert copies == 4 * 2  # matrices, blocks
        assert len(found) == len(plain) + copies


# -- who chooses ----------------------------------------------------------------------------------


def test_the_chip_s_table_chooses_for_float32_alone() -> None:
    x = torch.empty(2, 16, 64, device="meta")
    key: dict[str, Any] = {"rows": 32, "width": 64, "kind": "fp32"}
    assert configs.turns(x, torch.float32) == 0
    with (
        TURNED.force(Config(TURN=2), **key),
        TURNED.force(Config(TURN=2), **key | {"kind": "16bit"}),
    ):
        assert configs.turns(x, torch.float32) == 2
        assert configs.turns(x, torch.bfloat16) == 0
    assert [config["TURN"] for config in TURNED.configs(**key)] == [0, 1, 2]
    assert [config["TURN"] for config in TURNED.configs(**key | {"kind": "16bit"})] == [0]


def test_offsets_of_transposes_have_32_bits() -> None:
    for width, most in ((16, FARTHEST_ROW), (4096, 2**19)):
        key: dict[str, Any] = {"rows": configs.MOST_ROWS, "width": width, "kind": "fp32"}
        with TURNED.force(Config(TURN=1), **key):
            for rows, turns in ((most, 1), (most + 1, 0)):
                x = torch.empty(rows, width, device="meta")
                assert configs.turns(x, torch.float32) == turns


# -- faults ---------------------------------------------------------------------------------------


class Spoilt(InSeveral):
    """One transpose that the forward or the backward pass of the second block writes or reads is
    another tensor; ``None``: none is."""

    name: str | None = None

    @staticmethod
    def turns(x: torch.Tensor, dtype: torch.dtype) -> int:
        return 2

    def spoilt(self, index: int, turned: Any) -> Any:
        if index != 1 or self.name is None or self.name not in turned._fields:
            return turned
        return turned._replace(**{self.name: torch.zeros_like(getattr(turned, self.name))})

    def forward(self, index: int, block: Forward) -> torch.Tensor | None:
        return super().forward(index, block._replace(turned=self.spoilt(index, block.turned)))

    def backward(self, index: int, block: Backward) -> None:
        super().backward(index, block._replace(turned=self.spoilt(index, block.turned)))


class SpoiltWeight(Spoilt):
    """One transposed weight of the second block is stale: it was multiplied since."""

    def backward(self, index: int, block: Backward) -> None:
        assert block.turned is not None
        if index == 1 and self.name is not None:
            getattr(block.turned.w, self.name).mul_(1.25)
        InSeveral.backward(self, index, block)


FIELDS = ["o", "low_2", "h", "qkv", "dqkv", "dout", "dgate_up", "dx"]
SAVED = stack["fused"].derived.saved if stack["fused"].derived else {}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (Spoilt, None),
        *((Spoilt, name) for name in FIELDS),
        *((SpoiltWeight, name) for name in ("qkv", "out", "gate_up", "down")),
    ],
)
def test_a_transpose_that_is_missing_or_stale_is_found(
    way: type[Spoilt], name: str | None, seed: int
) -> None:
    stack.provider("spoilt", **TRAITS, saved=SAVED)(
        type("Changed", (Fused,), {"way": type("Way", (way,), {"name": name})})
    )
    found = OpCase(stack, stack["spoilt"], CASE, torch.float32)
    if name is None:
        assert_accurate(found, CPU, seed)
        return
    with PoisonedMemory(), pytest.raises(AssertionError, match="stack-spoilt"):
        assert_accurate(found, CPU, seed)


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

    def both(given: bool) -> list[torch.Tensor]:
        guarded = torch.full((H * K + 16, rows), 7.0, device=device)
        o_turned, written = guarded[: H * K], torch.empty_like(turned)
        ahead = turned[: H * K], turned[H * K :], do_turned
        o, lse = attention.attend(
            *heads(qkv), turned=(turned[(H + G) * K :], o_turned) if given else None
        )
        dqkv = torch.empty_like(qkv)
        attention.attend_backward(
            *(do_BTHK, *heads(qkv), o, lse, *heads(dqkv)),
            turned=(ahead, written) if given else None,
        )
        if given:
            assert torch.equal(o_turned, o.view(rows, -1).T)
            assert (guarded[H * K :] == 7).all()
            assert torch.equal(written, dqkv.view(rows, -1).T)
        return [o, lse, dqkv]

    for one, other in zip(both(False), both(True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
