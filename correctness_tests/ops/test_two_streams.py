"""The two gradients of a chunk of `linear_cross_entropy` on two streams, and `Side.both`."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tinyllama.harness.kernels.configs import Config, recorded_keys
from tinyllama.harness.kernels.streams import Side
from tinyllama.ops import linear_cross_entropy as linear_file
from tinyllama.ops.linear_cross_entropy import STREAMS, chunk_rows, linear_cross_entropy

pytest.importorskip("triton")

CALL = linear_cross_entropy["triton"].call
BOTH = ("x", "weight")


@pytest.fixture(autouse=True)
def _in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_file, "LOGITS_AT_ONCE", 0)


def problem(device: torch.device, N: int, D: int, V: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x (N D), weight (V D), targets (N)."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, D, generator=generator).to(device, dtype) for rows in (N, V))
    return [x, weight, torch.randint(V, (N,), generator=generator).to(device)]


def _loss(given: list[torch.Tensor], wanted: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    x, weight, targets = given
    return linear_file.chunked_loss(x, weight, targets, wanted)


@contextlib.contextmanager
def on_streams(count: int, given: list[torch.Tensor]) -> Iterator[None]:
    """Meanwhile chunks of this problem use so many streams."""
    with recorded_keys() as keys:
        _loss(given, BOTH)
    (key,) = (key for (space, _), key in keys.items() if space == STREAMS.name)
    with STREAMS.force(Config(STREAMS=count), **key):
        yield


def test_without_streams_all_runs_in_order() -> None:
    seen: list[str] = []
    side = Side(torch.device("cpu"))
    side.both(lambda: seen.append("here"), lambda: seen.append("beside"))
    with side.branch():
        seen.append("in a branch")
    assert side.mark() is None
    side.wait(None)
    side.join()
    assert seen == ["here", "beside", "in a branch"]


def gradients(
    given: list[torch.Tensor], call: Callable[..., torch.Tensor] = CALL, upstream: float = 0.7
) -> list[torch.Tensor]:
    """The loss and both gradients."""
    x, weight, targets = given
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = call(*leaves, targets)
    factor = torch.full_like(loss, upstream)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, factor)]


@pytest.mark.gpu
def test_two_streams_give_the_bits_of_one_every_time(gpu: torch.device) -> None:
    """What a call returned is overwritten at once, as is the memory that it freed."""
    given = problem(gpu, 4096, 1024, 16000, torch.bfloat16)
    with on_streams(1, given):
        expected = gradients(given)
    with on_streams(2, given):
        for _ in range(20):
            found = gradients(given)
            copies = [one.clone() for one in found]
            del found
            for shape in (*(one.shape for one in copies), (chunk_rows(4096), 16000)):
                torch.full(shape, float("nan"), dtype=torch.bfloat16, device=gpu)
            assert all(map(torch.equal, copies, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["captured", "compiled", "on a stream", "on a second GPU"])
def test_two_streams_give_the_bits_of_one(way: str, gpu: torch.device) -> None:
    if way == "on a second GPU":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        gpu = torch.device("cuda", 1)  # while the first one is the current one
    given = problem(gpu, 4096, 1024, 16000, torch.bfloat16)
    with on_streams(1, given):
        expected = gradients(given)
    with on_streams(2, given):
        if way == "captured":
            other = torch.cuda.Stream(gpu)
            other.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(other):
                gradients(given)
            torch.cuda.synchronize(gpu)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = gradients(given)
            for one in found:
                one.zero_()
            graph.replay()
        elif way == "compiled":
            found = gradients(given, torch.compile(CALL, dynamic=False))
        elif way == "on a stream":
            other = torch.cuda.Stream(gpu)
            other.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(other):
                found = gradients(given)
            torch.cuda.current_stream(gpu).wait_stream(other)
        else:
            found = gradients(given)
        assert all(map(torch.equal, found, expected))
