"""A launch like an earlier one is not specialised again, and one that differs is.

No GPU is needed: Triton's part of a launch is a stand-in, which compiles nothing.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tinyllama.harness.kernels import jit, known, launch, tl, tuned


class Compiled:
    """Stands for a compiled kernel: the grids and arguments that it was launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launched.append((grid, args))


@pytest.fixture
def specialised(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """The kernels that Triton was asked for, where tensors of the CPU pass for those of a GPU."""
    asked: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        asked.append(Compiled())
        return asked[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(known, "knows", lambda index: True)
    monkeypatch.setattr(known, "takes_stream", lambda kernel: False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: int(self.is_sparse))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return asked


def kernel() -> Any:
    @jit
    def scale_kernel(  # type: ignore[no-untyped-def]
        x, y, factor, n, BLOCK: tl.constexpr, TURN: tl.constexpr = 0
    ):
        """Never run."""

    return scale_kernel


X = torch.zeros(64)


def test_a_launch_like_an_earlier_one_runs_its_kernel(specialised: list[Compiled]) -> None:
    double = kernel()
    for factor in (2.0, 3.0, 4.0):
        double[(7,)](X, None, factor, 64, BLOCK=16, num_warps=4)
    (one,) = specialised
    # By position, with the constants and defaults of the signature, and without the options.
    assert [grid[:3] for grid, _ in one.launched] == [(7, 1, 1)] * 2
    assert [args for _, args in one.launched] == [(X, None, f, 64, 16, 0) for f in (3.0, 4.0)]


def test_constants_are_put_in_the_signatures_order(specialised: list[Compiled]) -> None:
    double = kernel()
    for _ in range(2):
        double[(7, 2)](X, None, 2.0, TURN=1, BLOCK=16, n=64)
    (one,) = specialised
    assert [args for _, args in one.launched] == [(X, None, 2.0, 64, 16, 1)]


def test_first_and_later_launches_are_on_the_device_of_their_tensors(
    specialised: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen, shown = [0], [], list[known.Known]()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        now[0] = index
        yield
        now[0] = 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Compiled:
        seen.append(("first", now[0]))
        return Compiled()

    later = lambda *args: seen.append(("later", now[0]))  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(Compiled, "__getitem__", lambda self, grid: later)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(launch, "show", shown.append)
    double = kernel()
    for index in (1, 1, 0, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, index=index: index)
        double[(7,)](X, None, 2.0, 64, BLOCK=16)
    assert seen == [("first", 1), ("later", 1), ("first", 0), ("later", 0)]
    assert [one.gpu for one in shown] == [1, 1, 0, 0]


UNLIKE = {
    "dtype": ((X.bfloat16(), None, 2.0, 1), {}),
    "address": ((X[1:], None, 2.0, 1), {}),
    "a tensor for None": ((X, X, 2.0, 1), {}),
    "a whole number": ((X, None, 2.0, 64), {}),
    "a whole number for a real one": ((X, None, 2, 1), {}),
    "a truth value for a whole number": ((X, None, 2.0, True), {}),
    "constant": ((X, None, 2.0, 1), {"BLOCK": 32}),
    "a constant's type": ((X, None, 2.0, 1), {"TURN": False}),
    "option": ((X, None, 2.0, 1), {"num_warps": 8}),
}


@pytest.mark.parametrize(("args", "more"), UNLIKE.values(), ids=UNLIKE)
def test_a_launch_that_differs_is_specialised(
    args: tuple[Any, ...], more: dict[str, Any], specialised: list[Compiled]
) -> None:
    double, usual = kernel(), {"BLOCK": 16, "TURN": 0, "num_warps": 4}
    double[(7,)](X, None, 2.0, 1, **usual)
    double[(7,)](*args, **{**usual, **more})
    assert len(specialised) == 2
    assert not any(one.launched for one in specialised)


def test_a_real_number_that_is_a_constant_is_one_by_position_too(
    specialised: list[Compiled],
) -> None:
    """A kernel is compiled for it, as it is where it is given by name."""

    @jit
    def shift_kernel(x, BY: tl.constexpr, n):  # type: ignore[no-untyped-def]
        """Never run."""

    for by in (0.5, 0.25, 0.5):
        shift_kernel[(7,)](X, by, 64)
    assert len(specialised) == 2
    assert [args for _, args in specialised[0].launched] == [(X, 0.5, 64)]


DESCRIBED = pytest.mark.skipif(
    not launch.HAS_DESCRIPTORS, reason="this triton makes no descriptors on the host"
)
ROWS = torch.zeros(8, 64)


def with_padding() -> Any:
    found = launch.described(ROWS, (4, 32))
    found.padding = "nan"
    return found


UNLIKE_DESCRIPTORS: dict[str, Callable[[], Any]] = {
    "block": lambda: launch.described(ROWS, (8, 32)),
    "dtype": lambda: launch.described(ROWS.bfloat16(), (4, 32)),
    "rank": lambda: launch.described(ROWS.view(2, 4, 64), (4, 32)),
    "another field": with_padding,
    "a tensor": lambda: ROWS,
}


@DESCRIBED
@pytest.mark.parametrize("made", UNLIKE_DESCRIPTORS.values(), ids=UNLIKE_DESCRIPTORS)
def test_descriptors_of_other_forms_are_specialised(
    made: Callable[[], Any], specialised: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block of a rank of its own is an error of the class, which another one may not make.
    monkeypatch.setattr("triton.tools.tensor_descriptor.TensorDescriptor.__post_init__", Mock())
    double = kernel()
    double[(7,)](launch.described(ROWS, (4, 32)), X, 2.0, 1, BLOCK=16)
    double[(7,)](made(), X, 2.0, 1, BLOCK=16)
    assert len(specialised) == 2


@DESCRIBED
def test_a_descriptor_of_the_same_form_takes_the_same_kernel(specialised: list[Compiled]) -> None:
    double, others = kernel(), (ROWS, ROWS[4:], torch.zeros(16, 64), torch.zeros(8, 128)[:, :64])
    made = [launch.described(x, (4, 32)) for x in others]
    for one in made:
        double[(7,)](one, None, 2.0, 1, BLOCK=16)
    (compiled,) = specialised
    given = [args[0] for _, args in compiled.launched]
    assert all(map(operator.is_, given, made[1:])), "each with its own shape, strides and address"


@DESCRIBED
def test_a_descriptor_that_is_given_by_name_or_of_another_gpu_is_left_to_triton(
    specialised: list[Compiled],
) -> None:
    one = launch.described(ROWS, (4, 32))
    assert known.launch_key((one,), {}) is not None
    assert known.launch_key((X,), {"y": one}) is None
    one.base = torch.zeros(4, 4).to_sparse()  # stands for another GPU
    assert known.launch_key((X, one), {}) is None
    one.base = ROWS.as_subclass(Odd)
    assert known.launch_key((X, one), {}) is None


def test_a_kernel_with_hooks_before_its_launches_is_left_to_triton(
    specialised: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_HOOKED", [])
    double = kernel()
    double.add_pre_run_hook(lambda *args, **kwargs: None)
    seen: list[known.Known | None] = []
    with known.traced(seen.append):
        for _ in range(3):
            double[(7,)](X, None, 2.0, 64, BLOCK=16)
    assert seen == [None] * 3


def test_kernels_do_not_share_what_they_know(specialised: list[Compiled]) -> None:
    for double in (kernel(), kernel()):
        double[(7,)](X, None, 2.0, 64, BLOCK=16)
    assert len(specialised) == 2


class Odd(torch.Tensor):
    """A tensor that may hold its memory elsewhere."""


@pytest.mark.parametrize(
    "odd",
    [(X, "text"), (X.as_subclass(Odd), 2.0), (None, 2.0), (X, torch.zeros(4).to_sparse())],
    ids=["text", "subclass", "no tensor", "another GPU"],  # a sparse one stands for the last
)
def test_what_is_not_known_is_left_to_triton(
    odd: tuple[Any, ...], specialised: list[Compiled]
) -> None:
    assert known.launch_key((X, 2.0), {}) is not None
    assert known.launch_key(odd, {}) is None


def test_where_a_kernel_is_not_specialised_by_its_key_triton_is_asked(
    specialised: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "knows", lambda index: False)
    assert known.launch_key((X, 2.0), {}) is None
    monkeypatch.setattr(known, "knows", lambda index: True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: -1)
    assert known.launch_key((X, 2.0), {}) is None


def test_addresses_that_are_multiples_of_16_are_alike(specialised: list[Compiled]) -> None:
    found = [known.launch_key((X[start:], 2.0), {}) for start in (0, 4, 8, 1, 5)]
    assert found[0] == found[1] == found[2] != found[3] == found[4]


def test_of_what_is_given_by_name_the_name_counts(specialised: list[Compiled]) -> None:
    found = [known.launch_key((X,), one) for one in ({"BLOCK": 16}, {"TURN": 16})]
    assert None not in found
    assert found[0] != found[1]


@pytest.mark.parametrize("watched", [False, True])
def test_a_profiler_sees_launches_of_known_kernels(
    watched: bool, specialised: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are launched by Triton, which calls its hooks; else directly."""
    double, direct = kernel(), Mock()
    double[(7,)](X, None, 2.0, 64, BLOCK=16)
    (one,) = specialised
    (ready,) = double._ready.values()
    monkeypatch.setattr(ready, "_direct", True)
    monkeypatch.setattr(known, "stream_of", lambda: lambda gpu: 5)
    vars(one).update(run=direct, function=1, packed_metadata=2)
    monkeypatch.setattr(known, "hooks", lambda: (print if watched else None, None))
    double[(7,)](X, None, 2.0, 64, BLOCK=16)
    assert (len(one.launched), direct.call_count) == (watched, not watched)


@pytest.mark.parametrize("named", [X, (X,), [64]], ids=["tensor", "tuple", "list"])
def test_a_tensor_given_by_name_is_not_kept(named: Any, specialised: list[Compiled]) -> None:
    """A key that held it would keep its memory."""
    assert known.launch_key((X, 2.0), {"BLOCK": 16}) is not None
    assert known.launch_key((X, 2.0), {"y": named}) is None


def test_a_type_of_a_block_is_shared_and_never_with_a_kind_of_its_own() -> None:
    class Kind(tl.block_type):
        pass

    own = Kind(tl.float32, [2, 64, 8])
    sizes = ([2, 64, 8], [2, 64, 16], [2, 64, 8])
    found = [tl.block_type(tl.float32, size) for size in sizes]
    assert found[0] is found[2], "others between do not end that"
    found = [found[0], found[2]]
    assert [type(one) for one in (own, *found)] == [Kind, tl.block_type, tl.block_type]
    named = tl.block_type(element_ty=tl.float32, shape=[2, 64, 8])
    others = [tl.block_type(tl.float16, [2, 64, 8]), tl.block_type(tl.float32, [2, 8, 64])]
    assert named == found[0] == found[1]
    assert [one == found[0] for one in others] == [False, False]
    assert [list(one.shape) for one in (own, named, *others)] == [[2, 64, 8]] * 3 + [[2, 8, 64]]


@pytest.mark.parametrize(
    ("device", "forced", "expected"),
    [
        ("cuda", False, "tuned"),
        ("cuda", True, "forced"),
        ("cpu", False, "first"),
        ("cpu", True, "forced"),
        (None, False, "first"),
    ],
)
def test_a_kernel_is_tuned_on_a_gpu_unless_a_configuration_is_forced(
    device: str | None, forced: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    class Known(SimpleNamespace):
        def all_kwargs(self) -> dict[str, str]:
            return {"CONFIG": self.name}

    first, second = (Known(name=name, pre_hook=None) for name in ("first", "forced"))
    kernel = SimpleNamespace(arg_names=["x"], run=lambda *args, **named: ran.append(named))
    tuner = SimpleNamespace(run=lambda *args, **named: ran.append({"CONFIG": "tuned", **named}))
    made = tuned.AutoTuned(kernel, [first, second], lambda kernel: tuner)
    monkeypatch.setattr(tuned, "device_of", lambda given: device and torch.device(device))
    monkeypatch.setattr(tuned, "current", lambda device: contextlib.nullcontext())
    with tuned.tuned() as seen, contextlib.ExitStack() as stack:
        if forced:
            stack.enter_context(tuned.Tuned(made, [first], first).forced(second))
        made.run(3, grid=(1,))
    assert ran == [{"CONFIG": expected, "grid": (1,)}]
    assert seen[made].configs == [first, second]
