"""Of what is slower, which kernels moved: the largest changes first, and what they take."""

import numpy as np
import pytest

from tinyllama.harness.gate.attribution import PROFILES, moved

Kernels = dict[str, tuple[int, float]]


def lines(before: Kernels, after: Kernels) -> list[str]:
    return moved([before] * PROFILES, [after] * PROFILES, timed=True)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(
            {"a": (1, 10e-6), "b": (2, 20e-6), "c": (1, 5e-6)},
            {"a": (1, 12e-6), "b": (2, 29e-6), "c": (1, 5e-6)},
            [
                "b: 2 calls of 10.0 us -> 2 calls of 14.5 us",
                "a: a call of 10.0 us -> a call of 12.0 us",
            ],
            id="the largest change first",
        ),
        pytest.param(
            {"a": (1, 10e-6), "b": (1, 10e-6)},
            {"a": (1, 20e-6), "b": (1, 10.5e-6)},
            ["a: a call of 10.0 us -> a call of 20.0 us"],
            id="not what makes little of the change",
        ),
        pytest.param(
            {"old": (1, 10e-6)},
            {"new": (3, 30e-6)},
            ["new: not called -> 3 calls of 10.0 us"],
            id="one that comes",
        ),
        pytest.param(
            {"a": (1, 5e-6), "b": (1, 9e-6)},
            {"a": (1, 6e-6), "b": (1, 3e-6)},
            ["a: a call of 5.0 us -> a call of 6.0 us"],
            id="not what takes less",
        ),
    ],
)
def test_slower_kernels_are_named(before: Kernels, after: Kernels, said: list[str]) -> None:
    assert lines(before, after) == said


@pytest.mark.parametrize("odd", [9e-3, 1e-9])
def test_a_disturbed_profile_changes_nothing(odd: float) -> None:
    base = [{"a": (1, seconds)} for seconds in (odd, *[1e-6] * (PROFILES - 1))]
    candidate = [{"a": (1, 2e-6)}] * PROFILES
    assert moved(base, candidate, timed=True) == ["a: a call of 1.0 us -> a call of 2.0 us"]


@pytest.mark.long
def test_a_kernel_whose_times_only_scatter_is_not_named() -> None:
    """One is 3% slower; of a hundred times each of ten others may be named once."""
    rng, named = np.random.default_rng(0), 0

    def drawn(slower: float) -> list[Kernels]:
        times = rng.normal(1.0, 0.01, (PROFILES, 11))
        times[:, 0] *= slower
        return [{f"k{n}": (1, t * 1e-6) for n, t in enumerate(row)} for row in times]

    for _ in range(100):
        messages = moved(drawn(1.0), drawn(1.03), timed=True)
        assert any(line.startswith("k0:") for line in messages)
        named += len(messages) - 1
    assert named <= 20


def test_a_slower_host_names_kernels_by_launches_alone() -> None:
    before = [{"a": (1, 5.3e-6), "b": (1, 1e-6)}] * PROFILES
    longer = [{"a": (1, 9.9e-6), "b": (1, 1e-6)}] * PROFILES
    more = [{"a": (1, 5.3e-6), "b": (2, 2e-6)}] * PROFILES
    assert moved(before, longer, timed=False) == ["kernels are launched as often as before"]
    assert moved(before, more, timed=False) == ["b: a call of 1.0 us -> 2 calls of 1.0 us"]
