"""Which configuration a search keeps, and how its table is put together."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.kernels.configs import FORCED, Config, Space
from tinyllama.harness.measure.tuning import MARGIN, Search, merged, search
from tinyllama.ops import OPS

OLD, NEW, OTHER = (Config(BLOCK=block, num_warps=4) for block in (64, 128, 256))
WITHIN, BEYOND = 1 - MARGIN / 2, 1 - 2 * MARGIN


def searched(seconds: dict[Config, float], spilled: dict[Config, int] | None = None) -> Search:
    return Search("space", {"D": 64}, OLD, seconds, spilled or {})


@pytest.mark.parametrize(
    ("seconds", "spilled", "best"),
    [
        ({OLD: 1.0, NEW: WITHIN}, {}, OLD),  # noise changes nothing
        ({OLD: 1.0, NEW: BEYOND}, {}, NEW),
        ({OLD: 1.0, NEW: 1 / WITHIN}, {OLD: 14, NEW: 0}, NEW),  # hardly slower, and spills less
        ({OLD: 1.0, NEW: 1 / BEYOND}, {OLD: 14, NEW: 0}, OLD),
        ({OLD: 1.0, NEW: BEYOND}, {OLD: 0, NEW: 14}, NEW),
        ({NEW: 1.0, OTHER: 1.001}, {}, NEW),  # the one in force fails
        ({}, {}, OLD),
    ],
)
def test_the_fastest_configuration_is_chosen_beyond_noise(
    seconds: dict[Config, float], spilled: dict[Config, int], best: Config
) -> None:
    assert searched(seconds, spilled).best == best


@pytest.fixture(autouse=True)
def choices_restored() -> Iterator[None]:
    """What a search chooses is in force for the rest of a process."""
    with patch.dict(FORCED):
        yield


class Doubling:
    """A provider whose configurations are right, wrong and no kernel at all."""

    SPACE = Space(
        "tuning.doubling",
        default=lambda: Config(TIMES=2),
        configs=lambda: [Config(TIMES=times) for times in (2, 3, 0)],
    )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        times = self.SPACE.choose(x.device)["TIMES"]
        if times == 0:
            raise RuntimeError("it does not compile")
        return times * x


def test_a_configuration_that_fails_or_gives_another_result_is_not_timed() -> None:
    op = Op("doubling", inputs={"x": Tensor("N")}, outputs={"y": "N"}, cases=[Case(N=64)])
    op.reference(lambda x: 2 * x)
    op.provider("tuned")(Doubling())
    case = OpCase(op, op["tuned"], op.cases[0], torch.float32)
    (result,) = search(case, torch.device("cpu"))
    right, wrong, failing = (Config(TIMES=times) for times in (2, 3, 0))
    assert list(result.seconds) == [right]
    assert result.best == right
    assert result.failed.keys() == {wrong, failing}
    assert "y differs by" in result.failed[wrong]
    assert "it does not compile" in result.failed[failing]


@pytest.mark.gpu
def test_a_search_times_each_configuration_and_counts_spills(
    own_gpu: None, gpu: torch.device
) -> None:
    op = OPS["transpose"]
    case = OpCase(op, op["triton"], op.timed[0], torch.float32)
    (result,) = search(case, gpu)
    assert result.space == "transpose"
    assert not result.failed
    assert result.best in result.seconds
    assert set(result.seconds) <= set(result.spilled)
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert set(result.spilled.values()) == {0}


def test_a_search_adds_to_the_chips_table() -> None:
    """What it did not search stays, and so does what it found first."""
    before = {"another": {"D=1": OLD.kwargs()}, "transpose": {"D=2": OLD.kwargs()}}
    searches = [Search("transpose", {"D": d}, OLD, {OLD: 1.0}) for d in (3, 4)]
    spaces = merged(merged(before, searches[:1]), searches[1:])
    assert {name: sorted(keys) for name, keys in spaces.items()} == {
        "another": ["D=1"],
        "transpose": ["D=2", "D=3", "D=4"],
    }
