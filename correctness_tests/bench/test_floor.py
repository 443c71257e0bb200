"""The floor of a step does a step's products, all of them, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.bench.floor import Floor
from tinyllama.bench.workloads import Group

GROUP = "tiny-fp32"


@pytest.fixture(scope="module")
def floor() -> Floor:
    return Floor(GROUP, "cpu")


def counted(part: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        part()
    return counter.get_total_flops()


def test_its_products_are_those_of_a_step(floor: Floor) -> None:
    workload = Group.parse(GROUP).shape
    model = workload.model
    width = model.num_heads * model.head_dim
    scores = 6 * model.num_layers * workload.batch_size * width
    attention = scores * workload.seq_len * (workload.seq_len + 1)
    step = model.step_flops(workload.batch_size, workload.seq_len)
    assert counted(floor.parts["products"]) == step - attention


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_operands_are_turned_in_memory_only(floor: Floor, turned: tuple[bool, bool]) -> None:
    a, b = floor._pair((3, 4, 5), turned)
    assert (a.shape, b.shape) == ((3, 4), (4, 5))
    assert [not x.is_contiguous() for x in (a, b)] == list(turned)


def test_the_fastest_layout_is_kept(monkeypatch: pytest.MonkeyPatch, floor: Floor) -> None:
    """As a GPU chooses: by the time that each takes."""
    monkeypatch.setattr(floor, "device", torch.device("meta"))
    monkeypatch.setattr(floor, "_random", lambda *shape: torch.empty(shape, device="meta"))
    monkeypatch.setattr(floor, "_graph", lambda product: product.args)
    monkeypatch.setattr(floor, "_seconds", lambda pair: 1.0 + pair[0].is_contiguous())
    assert floor._fastest_layout((3, 4, 5)) == (True, False)
