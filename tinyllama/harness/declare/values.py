"""Distributions of test inputs.

A distribution is a function of a shape and a generator that returns a float64 (or int64)
tensor on the generator's device. Tests draw on the CPU, so that one seed gives one input on
every device and in every dtype; timings draw large inputs where they are used.
Its name is part of a case's name, because the data alone can change what a kernel computes and how
fast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Sampler = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Values:
    """A named distribution, and the domain that it is drawn from.

    sample: a function of a shape and a generator that returns a float64 or int64 tensor on the
        generator's device.
    least, most: the ends of the domain: values that a caller may pass, drawn or not. Checks also
        try values near them. None: nothing is known, so that only drawn values are tried.
    """

    name: str
    sample: Sampler
    least: float | None = None
    most: float | None = None

    def within(self, least: float, most: float) -> "Values":
        """The same draws from a domain that is wider: ``uniform(0, 1).within(0, math.inf)``.

        Raises ValueError where ``least`` is not below ``most``.
        """
        if not least < most:
            raise ValueError(f"a domain from {least} to {most} is empty: give its least end first")
        return replace(self, least=least, most=most)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def normal(std: float = 1.0, mean: float = 0.0) -> Values:
    """Normal values with this mean."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return _normal(shape, generator) * std + mean

    return Values(f"normal({mean:g},{std:g})", sample, -math.inf, math.inf)


def uniform(low: float, high: float) -> Values:
    """Uniform values in [low, high), for inputs with a domain such as second moments."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        unit = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return low + (high - low) * unit

    return Values(f"uniform({low:g},{high:g})", sample, low, high)


def integers(high: int) -> Values:
    """Integers in [0, high)."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, device=generator.device)

    return Values(f"integers({high})", sample, 0, high - 1)


def ranked(high: int) -> Values:
    """Integers k in [0, high), with probabilities in proportion to 1 / (1 + k), as words of text by
    Zipf's law. Uniform integers hide what a few frequent ones cost."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        weights = 1 / torch.arange(1, high + 1, dtype=torch.float64, device=generator.device)
        drawn = torch.multinomial(weights, math.prod(shape), True, generator=generator)
        return drawn.reshape(shape)

    return Values(f"ranked({high})", sample, 0, high - 1)


def constant(value: float) -> Values:
    """One value everywhere."""

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float64, device=generator.device)

    return Values(f"{value:g}", sample)


def scaled_rows(low: float, high: float) -> Values:
    """Normal rows whose magnitudes run geometrically from ``low`` to ``high``.

    A kernel that mixes up rows, or ignores an epsilon, is wrong on the small rows, while a norm
    over the whole tensor shows only the large rows.
    """

    def sample(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        values = _normal(shape, generator)
        rows = values.reshape(-1, shape[-1]) if shape else values.reshape(1, 1)
        scale = torch.logspace(0, 1, rows.shape[0], base=high / low, dtype=torch.float64) * low
        return (rows * scale[:, None].to(rows.device)).reshape(shape)

    return Values(f"rows({low:g}..{high:g})", sample, -math.inf, math.inf)


def philox(seed: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What ``tl.rand(seed, offset)`` of Triton returns at the offsets 0 to n - 1, below 2^32:
    float32 in [0, 1), the first word of Philox 4x32-10. A reference with it drops as a kernel does.
    """
    word = 0xFFFFFFFF
    c0 = torch.arange(n, dtype=torch.int64, device=device) & word
    c1, c2, c3 = (torch.zeros_like(c0) for _ in range(3))
    k0, k1 = seed & word, (seed >> 32) & word
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0 = ((b >> 32) & word) ^ c1 ^ k0
        c2 = ((a >> 32) & word) ^ c3 ^ k1
        c1, c3 = b & word, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    signed = torch.where(c0 >= 2**31, c0 - 2**32, c0)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * 4.6566127342e-10
