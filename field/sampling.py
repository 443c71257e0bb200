"""Distributions that the field's ops draw from."""

import torch

from tinyllama.harness.declare.values import Values, normal


def probabilities(spread: float = 1.0) -> Values:
    """Rows that sum to one: the softmax of normal logits."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return normal(spread).sample(shape, generator).softmax(-1)

    return Values(f"probabilities({spread:g})", sample)


def log_probabilities(spread: float = 1.0) -> Values:
    """The logarithms of such rows."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return normal(spread).sample(shape, generator).log_softmax(-1)

    return Values(f"log_probabilities({spread:g})", sample)


def unlikely_first(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Log-probabilities, of which the first class's is near -200: 0 in float32."""
    logits = normal().sample(shape, generator)
    logits[..., 0] = -200.0
    return logits.log_softmax(-1)


UNLIKELY = Values("unlikely", unlikely_first)
