"""How kernels of `stack` may be launched: attention with its product, and tensor descriptors."""

from contextlib import AbstractContextManager

import pytest
import torch

from correctness_tests.support.stacks import EPS, forced, gradients, inputs
from tinyllama.harness.kernels import HAS_DESCRIPTORS
from tinyllama.harness.kernels.configs import Config
from tinyllama.harness.kernels.descriptors import is_descriptor
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops.stack import Fused, Inputs
from tinyllama.ops.stack.configs import PRODUCTS
from tinyllama.ops.stack.in_one import ATTEND

pytest.importorskip("triton")

pytestmark = pytest.mark.long
# tokens, heads, heads of keys and values, head dimension: whole blocks, nothing that is whole, and
# whole sequences of heads that are not
SHAPES = [(16, 4, 2, 16), (9, 6, 2, 8), (33, 2, 2, 24), (1, 1, 1, 2)]


def named(shape: tuple[int, int, int, int]) -> str:
    return "T{}H{}G{}K{}".format(*shape)


def key(tokens: int, width: int) -> dict[str, int]:
    D, length = (max(16, 1 << (n - 1).bit_length()) for n in (width, tokens))
    return {"D": D, "tokens": length}


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_in_one_launch_it_writes_what_two_launches_write(
    shape: tuple[int, int, int, int], device: torch.device
) -> None:
    """Everything that the forward pass gives and saves."""
    tensors, where = inputs(*shape, device), key(shape[0], shape[3])
    results = []
    for step in (0, 16, 32):  # the last one does not divide the width
        with ATTEND.force(Config(BK=step, DESCRIBED=0, num_warps=4), **where):
            results.append(Fused.forward(tensors, EPS))
    for first, *together in zip(*results, strict=True):
        for tensor in together:
            difference = (first.double() - tensor.double()).norm()
            assert difference <= 1e-2 * first.double().norm()


def tiles(tensors: Inputs, described: int, one_launch: bool) -> AbstractContextManager[None]:
    """Small tiles for all products of these inputs."""
    attend = Config(BK=16 * one_launch, DESCRIBED=described)
    product = Config(BM=32, BN=32, BK=32, GROUP=8, DESCRIBED=described)

    def config_of(space: str) -> Config | None:
        return attend if space == ATTEND.name else product if space.startswith("stack.") else None

    return forced(lambda: gradients(tensors), config_of)


@pytest.mark.skipif(not HAS_DESCRIPTORS, reason="this triton has no tensor descriptors")
@pytest.mark.parametrize(
    ("shape", "one_launch"),
    [((16, 2, 1, 16), True), ((33, 2, 2, 24), True), ((6, 3, 3, 4), False)],
    ids=str,
)
def test_descriptors_read_what_pointers_read(
    shape: tuple[int, int, int, int],
    one_launch: bool,
    device: torch.device,
) -> None:
    """To the bit, also past the end of a matrix, a sequence and a head, and where some rows do not
    begin at 16 bytes, which no descriptor describes."""
    tensors, results = inputs(*shape, device), []
    for described in (0, 1):
        with tiles(tensors, described, one_launch):
            results.append(gradients(tensors))
            with recorded() as launches:
                gradients(tensors)
        arguments = [x for launch in launches for x in launch.arguments.values()]
        assert any(is_descriptor(type(x)) for x in arguments) == bool(described)
    assert len(results[0]) == 11
    for pointers, descriptors in zip(*results, strict=True):
        assert torch.equal(pointers, descriptors)


@pytest.mark.parametrize(
    ("hidden", "ffn", "tokens", "columns", "step"),
    [(272, 24, 4, 16, 128), (64, 32, 16, 32, 16)],
    ids=["many", "whole"],
)
def test_tiles_may_be_narrow(
    hidden: int,
    ffn: int,
    tokens: int,
    columns: int,
    step: int,
    device: torch.device,
) -> None:
    """Tiles of 16 rows: a norm's sum of squares, and a row's factor backward, are of more tiles
    than a tile has rows; and several tiles, wider than long, divide every size."""
    tensors = inputs(tokens, 2, 1, 16, device, hidden=hidden, ffn=ffn)
    expected = gradients(tensors)
    tiles = Config(BM=16, BN=columns, BK=step, GROUP=8, DESCRIBED=0)
    asked_for = {f"stack.{name}": tiles for name in PRODUCTS}
    with forced(lambda: gradients(tensors), asked_for.get):
        actual = gradients(tensors)
    for left, right in zip(expected, actual, strict=True):
        assert (left.double() - right.double()).norm() <= 1e-2 * left.double().norm()
