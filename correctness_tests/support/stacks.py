"""A small stack of blocks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from tinyllama.harness.declare.registry import providers_restored
from tinyllama.harness.kernels.configs import SPACES, Config, recorded_keys
from tinyllama.ops.rope import rope_tables
from tinyllama.ops.stack import Inputs, stack

LAYERS, HIDDEN, FFN, EPS = 2, 48, 24, 1e-5


@pytest.fixture(autouse=True)
def plans_forgotten() -> Iterator[None]:
    """In a file that imports it: a plan by name registers its provider."""
    with providers_restored([stack]):
        yield


@pytest.fixture(name="turn")
def turn_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets whether passes and the optimizer go by transposes, whatever the chip's table says."""

    def choose(choice: int) -> None:
        for place in ("ops.stack.configs.turns", "model.optim.turns"):
            monkeypatch.setattr(f"tinyllama.{place}", lambda x, dtype: choice)

    return choose


def inputs(
    tokens: int,
    heads: int,
    groups: int,
    width: int,
    device: torch.device,
    batch: int = 3,
    hidden: int = HIDDEN,
    ffn: int = FFN,
) -> Inputs:
    """Of a stack of `LAYERS` blocks, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = heads * width, groups * width

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * 0.3
        return values.to(device, torch.bfloat16)

    attention = [drawn(LAYERS, n, hidden) for n in (columns, rows, rows)]
    mlp = [drawn(LAYERS, ffn, hidden), drawn(LAYERS, ffn, hidden), drawn(LAYERS, hidden, ffn)]
    cos, sin = (table.to(device) for table in rope_tables(tokens, width))
    gains = torch.linspace(0.5, 1.5, 2 * LAYERS * hidden, device=device).view(2, LAYERS, -1)
    x, out = drawn(batch, tokens, hidden), drawn(LAYERS, hidden, columns)
    return Inputs._make((x, cos, sin, gains[0], *attention, out, gains[1], *mlp))


def gradients(tensors: Inputs, provider: str = "fused") -> list[torch.Tensor]:
    """The output and all gradients."""
    declared = stack.inputs.values()
    leaves = Inputs._make(
        tensor.detach().requires_grad_(spec.grad)
        for tensor, spec in zip(tensors, declared, strict=True)
    )
    y = stack[provider].call(*leaves, eps=EPS)
    y.backward(torch.ones_like(y))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@contextmanager
def forced(run: Callable[[], object], config_of: Callable[[str], Config | None]) -> Iterator[None]:
    """Of what this run asks for, the spaces that have a configuration by their name have it."""
    with recorded_keys() as keys:
        run()
    with ExitStack() as spaces:
        for (space, _), key in keys.items():
            if (config := config_of(space)) is not None:
                spaces.enter_context(SPACES[space].force(config, **key))
        yield
