"""The two gradients of a chunk of `linear_cross_entropy` on two streams, and `Side.both`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllama.harness.kernels import streams
from tinyllama.harness.kernels.configs import Config, asked
from tinyllama.harness.kernels.launch import recorded
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
    with asked() as keys:
        _loss(given, BOTH)
    (key,) = (key for (space, _), key in keys.items() if space == STREAMS.name)
    with STREAMS.force(Config(STREAMS=count), **key):
        yield


# -- which, and in which order --------------------------------------------------------------------


class Noted:
    """Stands for `Side`; notes what it is asked for."""

    seen: list[str]

    def __init__(self, device: torch.device) -> None:
        pass

    def both(self, here: Callable[[], object], beside: Callable[[], object]) -> None:
        self.seen.append("on this stream")
        here()
        self.seen.append("on the other one")
        beside()
        self.seen.append("both waited for")


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.seen.append(str(func).removeprefix("aten."))
        return func(*args, **kwargs or {})


def products(
    wanted: tuple[str, ...], streams: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], int]:
    """What is multiplied in which order, and the number of chunks."""
    given = problem(torch.device("cpu"), 11, 8, 40, torch.float32)
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(linear_file, "Side", Noted)
    with on_streams(streams, given):
        seen.clear()
        with Products(seen):
            _loss(given, wanted)
    return seen, -(-11 // chunk_rows(11))


def test_the_gradient_of_x_comes_first_and_logits_are_written_over_after_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other order was slower than one stream: the larger product leaves nothing idle."""
    seen, chunks = products(BOTH, 2, monkeypatch)
    of_one = ["mm.out", "on this stream", "mm.out", "on the other one"]
    first = [*of_one, "mm.out", "both waited for"]
    following = [*of_one, "addmm_.default", "both waited for"]
    assert chunks > 2
    assert seen == first + (chunks - 1) * following


@pytest.mark.parametrize(
    ("wanted", "streams"), [(BOTH, 1), (("x",), 2), (("weight",), 2), ((), 2)], ids=str
)
def test_one_stream_where_that_is_chosen_or_one_gradient_is_wanted(
    wanted: tuple[str, ...], streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, chunks = products(wanted, streams, monkeypatch)
    assert len(seen) == (1 + len(wanted)) * chunks
    assert all("mm" in one for one in seen)


def test_there_is_one_stream_unless_the_table_of_a_chip_says_two() -> None:
    """And a chip's table speaks of large products alone."""
    small, *_, large = linear_cross_entropy.timed
    of = {"gfx942": (1, 1), "sm_80": (1, 1), "sm_90": (1, 2), "": (1, 1)}
    for chip, expected in of.items():
        found = []
        for case in (small, large):
            meta = problem(torch.device("meta"), **case.dims, dtype=torch.bfloat16)
            with asked() as keys, recorded(chip):
                _loss(meta, BOTH)
            (key,) = (key for (space, _), key in keys.items() if space == STREAMS.name)
            found.append(STREAMS.on(chip, **key)[0]["STREAMS"])
        assert tuple(found) == expected, chip


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("wanted", [BOTH, ("x",), ("weight",)], ids=str)
def test_the_gradients_of_held_logits_are_made_together(
    wanted: tuple[str, ...], streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the logits are not in chunks, too; that of the weight in the weight's own dtype."""
    monkeypatch.setattr(linear_file, "LOGITS_AT_ONCE", 2**26)
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(linear_file, "Side", Noted)
    monkeypatch.setattr(linear_file, "product", product := Mock(wraps=linear_file.product))
    x, weight, targets = problem(torch.device("cpu"), 11, 8, 40, torch.float32)
    leaves = {"x": x.bfloat16(), "weight": weight}
    for name in wanted:
        leaves[name].requires_grad_()
    key: dict[str, Any] = {"rows": 16, "D": 8, "V": 64, "dtype": "bf16"}
    with torch.autocast("cpu", torch.bfloat16), STREAMS.force(Config(STREAMS=streams), **key):
        loss = CALL(leaves["x"], leaves["weight"], targets)
    with Products(seen), STREAMS.force(Config(STREAMS=streams), **key):
        found = torch.autograd.grad(loss, [leaves[name] for name in wanted])
    assert [one.dtype for one in found] == [leaves[name].dtype for name in wanted]
    wide = [one.args[-1].dtype for one in product.call_args_list]
    assert wide == [torch.float32] * ("weight" in wanted)
    of = {"x": "mm.out", "weight": "mm.default"}  # a CPU rounds that of the weight in between
    products = [of[name] for name in wanted]
    if streams == 2 and len(wanted) == 2:
        products = ["on this stream", of["x"], "on the other one", of["weight"], "both waited for"]
    assert seen == products


# -- the two streams ------------------------------------------------------------------------------


@pytest.fixture
def posed(monkeypatch: pytest.MonkeyPatch) -> tuple[Side, list[str]]:
    """A `Side` of a GPU that is not there, and what is asked of streams."""
    seen: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            seen.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            return f"a point of {self.name}"

        def wait_event(self, point: str) -> None:
            seen.append(f"{self.name} waits for {point}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        seen.append(f"on {stream.name}")
        yield
        seen.append("back")

    current = {torch.device("cuda", 0): Stream("zero"), torch.device("cuda", 1): Stream("one")}
    monkeypatch.setattr(streams, "_side_stream", lambda device, urgent: Stream("branch"))
    monkeypatch.setattr(torch.cuda, "current_stream", current.__getitem__)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return Side(torch.device("cuda", 1)), seen


def test_both_run_behind_what_was_launched_and_before_what_follows(
    posed: tuple[Side, list[str]],
) -> None:
    """On the device of the tensors, whichever is the current one."""
    side, seen = posed
    side.both(lambda: seen.append("here"), lambda: seen.append("beside"))
    before = ["branch waits for one", "here", "on branch", "beside", "back"]
    assert seen == [*before, "one waits for branch"]


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_leaves_nothing_running_beside(which: int, posed: tuple[Side, list[str]]) -> None:
    """Else memory that is freed on the way out would be written by the other stream."""
    side, seen = posed

    def wrong() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        side.both(*((wrong, print) if which == 0 else (print, wrong)))
    assert seen[-1] == "one waits for branch"


def test_a_branch_runs_behind_what_was_launched_and_is_waited_for_once(
    posed: tuple[Side, list[str]],
) -> None:
    """And what it reads lives until then, and no longer."""
    side, seen = posed
    side.join()
    assert seen == [], "nothing was branched"
    read = torch.ones(1)
    held = weakref.ref(read)
    with side.branch(keep=read):
        seen.append("beside")
    del read
    branched = ["branch waits for one", "on branch", "beside", "back"]
    assert seen == branched
    side.wait(side.mark())
    side.wait(None)
    assert seen[4:] == ["one waits for a point of branch"]
    assert held() is not None
    side.join()
    side.join()
    assert seen[5:] == ["one waits for branch"]
    assert held() is None


def test_a_device_has_one_stream_beside_and_one_that_is_urgent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def stream(device: torch.device, priority: int) -> int:
        made.append((device.index, priority))
        return len(made)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    streams._side_stream.cache_clear()
    try:
        sides = [
            Side(torch.device("cuda", index), urgent)
            for index, urgent in [(0, False), (1, False), (0, True), (0, False), (0, True)]
        ]
        assert [one._stream for one in sides] == [1, 2, 3, 1, 3]
    finally:
        streams._side_stream.cache_clear()
    assert made == [(0, 0), (1, 0), (0, -1)], "the lowest number comes first"


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


# -- what they compute ----------------------------------------------------------------------------


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
