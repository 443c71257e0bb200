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


def _loss(tensors: list[torch.Tensor], names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    x, weight, targets = tensors
    return linear_file.chunked_loss(x, weight, targets, names)


@contextlib.contextmanager
def on_streams(count: int, tensors: list[torch.Tensor]) -> Iterator[None]:
    """Meanwhile chunks of this problem use so many streams."""
    with recorded_keys() as keys:
        _loss(tensors, BOTH)
    (key,) = (key for (space, _), key in keys.items() if space == STREAMS.name)
    with STREAMS.force(Config(STREAMS=count), **key):
        yield


def test_without_streams_all_runs_in_order() -> None:
    streams: list[str] = []
    side = Side(torch.device("cpu"))
    side.both(lambda: streams.append("here"), lambda: streams.append("beside"))
    with side.branch():
        streams.append("in a branch")
    assert side.mark() is None
    side.wait(None)
    side.join()
    assert streams == ["here", "beside", "in a branch"]


def gradients(
    tensors: list[torch.Tensor], call: Callable[..., torch.Tensor] = CALL, upstream: float = 0.7
) -> list[torch.Tensor]:
    """The loss and both gradients."""
    x, weight, targets = tensors
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = call(*leaves, targets)
    factor = torch.full_like(loss, upstream)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, factor)]


@pytest.mark.gpu
def test_two_streams_give_the_bits_of_one_every_time(gpu: torch.device) -> None:
    """What a call returned is overwritten at once, as is the memory that it freed."""
    tensors = problem(gpu, 4096, 1024, 16000, torch.bfloat16)
    with on_streams(1, tensors):
        expected = gradients(tensors)
    with on_streams(2, tensors):
        for _ in range(20):
            actual = gradients(tensors)
            copies = [tensor.clone() for tensor in actual]
            del actual
            for shape in (*(tensor.shape for tensor in copies), (chunk_rows(4096), 16000)):
                torch.full(shape, float("nan"), dtype=torch.bfloat16, device=gpu)
            assert all(map(torch.equal, copies, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["captured", "compiled", "on a stream", "on a second GPU"])
def test_two_streams_give_the_bits_of_one(way: str, gpu: torch.device) -> None:
    if way == "on a second GPU":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        gpu = torch.device("cuda", 1)  # while the first one is the current one
    tensors = problem(gpu, 4096, 1024, 16000, torch.bfloat16)
    with on_streams(1, tensors):
        expected = gradients(tensors)
    with on_streams(2, tensors):
        if way == "captured":
            stream = torch.cuda.Stream(gpu)
            stream.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(stream):
                gradients(tensors)
            torch.cuda.synchronize(gpu)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                actual = gradients(tensors)
            for tensor in actual:
                tensor.zero_()
            graph.replay()
        elif way == "compiled":
            actual = gradients(tensors, torch.compile(CALL, dynamic=False))
        elif way == "on a stream":
            stream = torch.cuda.Stream(gpu)
            stream.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(stream):
                actual = gradients(tensors)
            torch.cuda.current_stream(gpu).wait_stream(stream)
        else:
            actual = gradients(tensors)
        assert all(map(torch.equal, actual, expected))
