"""The gradient of a table: blocks that no case has, and tokens in any order."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness import Case
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.declare.values import constant, integers, ranked
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops import embedding as file
from tinyllama.ops.embedding import GRADIENT, ORDER, embedding

CASE = OpCase(embedding, embedding["triton"], Case(N=40, V=6, D=50), torch.float32)


@pytest.mark.parametrize(("columns", "at_once"), [(16, 4), (32, 2)])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (4, 32), (8, 64)])
def test_blocks_of_any_proportion(
    rows: int, tokens: int, columns: int, at_once: int, device: torch.device
) -> None:
    """Several of all; in most cases of the op there is one block of tokens, and of columns."""
    order = Config(ROWS=rows, TOKENS=tokens, num_warps=1)
    gradient = Config(COLUMNS=columns, AT_ONCE=at_once, num_warps=1)
    with ORDER.force(order, N=64), GRADIENT.force(gradient, D=64):
        compared = CASE.compare(device)
    assert [comparison.name for comparison in compared] == ["y", "grad weight"]
    assert all(comparison.passed for comparison in compared), [
        str(comparison) for comparison in compared
    ]


TOKENS = {
    "mixed": torch.randint(9, (70,), generator=torch.Generator().manual_seed(0)),
    "equal": torch.full((70,), 4),
    "the last row": torch.full((70,), 8),
    "falling": torch.arange(69, -1, -1) % 9,
    "none": torch.zeros(0, dtype=torch.int64),
}


COUNTS = list(itertools.product((0, 3, 4, 5), (3, 4, 12), (0, 4)))


@pytest.mark.long
def test_rows_of_many_tokens_are_summed_in_parts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts of four, two at a time: rows with fewer tokens, as many, more and several parts,
    from each position of a part. Tokens and dy are strided; small integers are summed exactly."""
    monkeypatch.setattr(file, "PART", 4)
    config = Config(COLUMNS=8, AT_ONCE=2, num_warps=1)
    for counts in COUNTS:
        tokens = torch.arange(3).repeat_interleave(torch.tensor(counts)).to(device)
        weight = torch.zeros(3, 12, device=device, requires_grad=True)
        columns = torch.randint(
            -8, 8, (len(tokens), 24), generator=torch.Generator().manual_seed(0)
        )
        dy = columns.float().to(device)[:, ::2]
        expected = torch.zeros(3, 12, device=device).index_add_(0, tokens, dy)
        strided = torch.stack([tokens, tokens - tokens], 1)[:, 0]
        for few in (len(tokens) - 1, len(tokens)):  # with parts, and without
            monkeypatch.setattr(file, "FEW", few)
            with GRADIENT.force(config, D=16):
                rows = embedding["triton"](weight, strided)
                (actual,) = torch.autograd.grad(rows, weight, dy)
            assert torch.equal(actual, expected), counts


def test_many_tokens_and_rows_are_left_to_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where comparing each token with each row takes too long, in both passes."""
    monkeypatch.setattr(file, "MOST", 0)
    compared = CASE.compare(device)
    assert all(comparison.passed for comparison in compared), [
        str(comparison) for comparison in compared
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uniform", "ranked", "equal"])
def test_repeated_the_gradient_has_equal_bits(name: str, gpu: torch.device) -> None:
    """50 times, of 8,192 tokens, and near a sum in float64."""
    generator = torch.Generator(gpu).manual_seed(0)
    drawn = {"uniform": integers(1000), "ranked": ranked(1000), "equal": constant(7)}[name]
    tokens = drawn.sample((8192,), generator).long()
    weight = torch.zeros(1000, 1024, device=gpu, requires_grad=True)
    dy = torch.randn(8192, 1024, generator=generator, device=gpu)
    first = None
    for _ in range(50):
        (actual,) = torch.autograd.grad(embedding["triton"](weight, tokens), weight, dy)
        first = actual if first is None else first
        assert torch.equal(actual, first)
    exact = torch.zeros(1000, 1024, dtype=torch.float64, device=gpu)
    exact.index_add_(0, tokens, dy.double())
    assert first is not None
    assert (first - exact).norm() / exact.norm() < 1e-6
