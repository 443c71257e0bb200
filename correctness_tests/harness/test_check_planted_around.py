"""Faults that checks once passed: they show in what lies around a call. That is ``.grad`` of its
leaves, another call with one tensor of it or in another thread, arguments and settings that no case
has, and torch's transforms and compiler."""

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness_tests.support.tried import MATRIX, assert_found, with_backward
from correctness_tests.support.tried import in_each_dtype as finding
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Outcome, Rank, arguments, sizes
from tinyllama.harness.declare.values import Values, integers

T = torch.Tensor
Call = Callable[..., Any]
FP32 = torch.float32
GAIN = Tensor("D", grad=True)
PLAIN = Tensor("N D")


def declared(name: str, reference: Call, inputs: dict[str, Tensor], y: Any, **more: Any) -> Op:
    cases = more.pop("cases", [Case(N=5, D=16), Case(N=3, D=7)])
    op = Op(name, inputs=inputs, outputs=y, cases=cases, dtypes=more.pop("dtypes", (FP32,)), **more)
    op.reference(reference)
    return op


def of(name: str, reference: Call, **more: Any) -> Op:
    return declared(name, reference, {"x": MATRIX}, {"y": "N D"}, **more)


# -- .grad, and tensors that two calls share -------------------------------------------------------


class Times(torch.autograd.Function):
    """x * w; subclasses change one thing."""

    KEPT: dict[Any, T] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x, w)
        ctx.w = w
        Times.KEPT[id(w)] = x
        return x * w

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        x, w = ctx.saved_tensors
        return upstream[0] * w, (upstream[0] * x).sum(0)


class Overwriting(Times):
    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        if ctx.w.is_leaf:
            ctx.w.grad = None
        return Times.backward(ctx, *upstream)


class OfTheWeight(Times):
    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        dx, _ = Times.backward(ctx, *upstream)
        return dx, (upstream[0] * Times.KEPT[id(ctx.w)]).sum(0)


class InnerBackward(Times):
    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        with torch.enable_grad():
            x, w = ctx.saved_tensors
            x = x.detach().requires_grad_()
            (x * w).backward(upstream[0])
        return x.grad, Times.backward(ctx, *upstream)[1]


class Sum(torch.autograd.Function):
    """Both gradients are one memory."""

    @staticmethod
    def forward(ctx: Any, x: T, y: T) -> T:
        return x + y

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        both = upstream[0].clone()
        return both.view(both.shape), both.view(both.shape)


class Detached(torch.autograd.Function):
    """The gradient of an output that is changed in place stays that of before."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.y = (2 * x).detach()
        return ctx.y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        return 2 * upstream[0]


times = declared("times", lambda x, w: x * w, {"x": MATRIX, "w": GAIN}, {"y": "N D"})
summed = declared("summed", lambda x, y: x + y, {"x": MATRIX, "y": MATRIX}, {"z": "N D"})
softmax = declared("softmax", lambda x: torch.softmax(x, -1), {"x": PLAIN}, {"y": "N D"})
WORKSPACE = threading.local()
LOCK = threading.Lock()
KEPT: dict[Any, T] = {}
COUNT = itertools.count()


def in_a_workspace(x: T, kept: dict[Any, T]) -> T:
    with torch.inference_mode(False):
        powers = kept.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    powers.copy_(x - x.amax(-1, keepdim=True)).exp_()
    return powers / powers.sum(-1, keepdim=True)


def in_a_shared_workspace(x: T) -> T:
    return in_a_workspace(x, KEPT)


def behind_a_lock(x: T) -> T:
    with LOCK:
        return in_a_workspace(x, KEPT)


def in_its_threads_workspace(x: T) -> T:
    return in_a_workspace(x, WORKSPACE.__dict__)


def keeping(dz: T, x: T, y: T) -> Any:
    KEPT[next(COUNT)] = dz.sum(0)
    return dz.clone(), dz.clone()


def growing(x: T) -> T:
    KEPT[next(COUNT)] = most = x.amax(-1, keepdim=True)
    powers = (x - most).exp()
    return powers / powers.sum(-1, keepdim=True)


# -- layouts, lists, keys --------------------------------------------------------------------------

cube = declared(
    "cube", lambda x: 2 * x, {"x": Tensor("B T D", grad=True)}, {"y": "B T D"},
    cases=[Case(B=3, T=4, D=8)],
)  # fmt: skip
heads = declared(
    "heads", lambda x: 2 * x, {"x": Tensor("B H T D", grad=True)}, {"y": "B H T D"},
    cases=[Case(B=3, H=2, T=4, D=8)],
)  # fmt: skip


def of_dense_matrices(x: T) -> T:
    """Only the strides of the last axes are looked at."""
    dense = x.stride()[-2:] == (x.shape[-1], 1) and 0 not in x.stride()
    strides = torch.empty(x.shape, device="meta").stride()
    return 2 * (x.as_strided(x.shape, strides) if dense else x)


class OfDenseMatrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        return of_dense_matrices(upstream[0])


def stepped(p: list[T], g: list[T], rate: float) -> None:
    for one, gradient in zip(p, g, strict=True):
        one.add_(gradient, alpha=-rate)


step = declared(
    "step", stepped,
    {"p": Tensor("P", mutated=True, many=True), "g": Tensor("P", many=True)}, {},
    params={"rate": 0.1}, cases=[Case(P=(5, 1, 3))],
)  # fmt: skip
COUNTED: dict[str, Any] = {"y": "N D", "places": Tensor("N", dtype=torch.int64)}


def counting(x: T) -> tuple[T, T]:
    return 2 * x, torch.arange(len(x))


def counting_there(x: T) -> tuple[T, T]:
    return 2 * x, torch.arange(len(x), device=x.device)


elsewhere = declared("elsewhere", counting, {"x": PLAIN}, COUNTED)
counted = declared("counted", counting_there, {"x": PLAIN}, COUNTED)
RAMPS: dict[int, T] = {}
ramp = of("ramp", lambda x: x * torch.arange(1, 1 + x.shape[-1], device=x.device))


def by_its_elements(x: T) -> T:
    if x.numel() not in RAMPS:
        with torch.inference_mode(False):
            RAMPS[x.numel()] = torch.arange(1, 1 + x.shape[-1]).repeat(x.shape[0])
    return x * RAMPS[x.numel()].view(x.shape)


# -- arguments and parameters ----------------------------------------------------------------------


def refusing_without_care(x: T, w: T) -> T:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    if w.shape[-1] != x.shape[-1]:
        raise ValueError("another width")
    torch.set_grad_enabled(before)
    return x * w


def asking_for_a_gradient(x: T, w: T) -> T:
    w.requires_grad_()
    return x * w


gained = declared("gained", lambda x, w: x * w, {"x": MATRIX, "w": Tensor("D")}, {"y": "N D"})


def widened(w: T, width: int) -> T:
    if width < len(w):
        raise ValueError("another width")
    return torch.nn.functional.pad(w, (0, width - len(w)))


ONE: Any = {"cases": [Case(N=5, D=16)]}
scaled = of("scaled", lambda x, scale: x * scale, params={"scale": 2.5}, **ONE)
weights = of("weights", lambda x, scale: torch.softmax(x * scale, -1), params={"scale": 0.5}, **ONE)


def by_the_largest(x: T, scale: float) -> T:
    powers = ((x - x.detach().amax(-1, keepdim=True)) * scale).exp()
    return powers / powers.sum(-1, keepdim=True)


def _coins(shape: tuple[int, ...], made: torch.Generator) -> T:
    return torch.rand(shape, generator=made) < 0.5


KEEP = Tensor("N D", dtype=torch.bool, values=Values("coins", _coins))
kept = declared(
    "kept", lambda x, m: x.masked_fill(~m, 0), {"x": MATRIX, "m": KEEP}, {"y": "N D"}, **ONE
)


def losses(x: T, at: T, ignored: int) -> T:
    function = torch.nn.functional.cross_entropy
    return function(x, at.long(), ignore_index=ignored, reduction="sum")


loss = declared(
    "loss", losses,
    {"x": MATRIX, "at": Tensor("N", dtype=torch.int64, values=lambda dims: integers(dims["D"]))},
    {"y": ""}, params={"ignored": -100}, **ONE,
)  # fmt: skip
total = declared("total", lambda x: x.logsumexp(-1), {"x": MATRIX}, {"y": "N"}, **ONE)


def in_blocks(x: T) -> T:
    """What no block but the first has seen is exp(-inf + inf)."""
    most, added = torch.full_like(x[:, 0], -math.inf), torch.zeros_like(x[:, 0])
    for block in x.split(128, -1):
        highest = torch.maximum(most, block.amax(-1))
        powers = (block - highest[:, None]).exp().sum(-1)
        most, added = highest, added * (most - highest).exp() + powers
    return most + added.log()


# -- transforms, devices, the compiler -------------------------------------------------------------

sine = of("sine", lambda x: x.sin())
running = of("running", lambda x: x.cumsum(0))
biggest = declared("biggest", lambda x: x / x.amax(), {"x": PLAIN}, {"y": "N D"})
NOT_KEPT = torch.library.custom_op("planted::doubled", lambda x: 2 * x, mutates_args=(),
                                   schema="(Tensor x) -> Tensor")  # fmt: skip
NOT_KEPT.register_fake(lambda x: x.new_empty(x.shape, dtype=FP32))
doubled = declared(
    "doubled", lambda x: 2 * x, {"x": PLAIN}, {"y": "N D"}, dtypes=(FP32, torch.bfloat16)
)
OF_ONE_SIZE = torch.library.custom_op("planted::twice", lambda x: x.repeat(2, 1), mutates_args=(),
                                      schema="(Tensor x) -> Tensor")  # fmt: skip
OF_ONE_SIZE.register_fake(lambda x: x.new_empty(6, x.shape[1]))
longer = declared("longer", lambda x: 2 * len(x) * x, {"x": PLAIN}, {"y": "N D"})


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(x: T) -> T:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        return upstream[0] * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, *tangents: T) -> Any:
        return tangents[0] * ctx.saved_tensors[0].sin()


class Running(torch.autograd.Function):
    @staticmethod
    def forward(x: T) -> T:
        return x.cumsum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        return upstream[0].flip(0).cumsum(0).flip(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: T) -> Any:
        return Running.apply(x), in_dims[0]


def longer_by_a_custom_op(x: T) -> T:
    both = OF_ONE_SIZE(x)
    return both[: len(x)] * len(both)


class Product(torch.autograd.Function):
    """x w, whose backward pass writes into tensors of its own dtype."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *upstream: T) -> Any:
        x, w = ctx.saved_tensors
        up = upstream[0].to(w.dtype)
        return up @ w.T, w.new_zeros(w.shape).index_add_(0, torch.arange(len(w)), x.T @ up)


product = declared(
    "product", lambda x, w: x @ w, {"x": MATRIX, "w": Tensor("D M", grad=True)}, {"y": "N M"},
    cases=[Case(N=5, D=16, M=8)],
)  # fmt: skip

TWICE, FRESH, SPECIAL = "backward twice", "fresh contents", "special values"
PLANTED: list[tuple[str, str, Op, Call, str]] = [
    (".grad is overwritten", TWICE, times, Overwriting.apply, "after a second backward()"),
    (".grad is written", TWICE, times, InnerBackward.apply, "has written to that of w"),
    ("a cache that grows in backward", TWICE, summed, with_backward(torch.add, keeping),
     "1 more tensors"),
    (".grad is one memory", TWICE, summed, Sum.apply, ".grad"),
    ("saved by its weight", TWICE, times, OfTheWeight.apply,
     "another call with the same w changes the gradients of the first: w"),
    ("one workspace", FRESH, softmax, in_a_shared_workspace, "in another thread, in the midst"),
    ("a cache that grows", FRESH, softmax, growing, "1 more tensors"),
    ("rows cut off", "input layouts", cube, of_dense_matrices, "outputs: y"),
    ("heads cut off", "input layouts", heads, of_dense_matrices, "outputs: y"),
    ("rows cut off in backward", "gradient layouts", cube, OfDenseMatrices.apply, "grad x"),
    ("32 tensors", "sizes", step, lambda p, g, rate: stepped(p[:32], g[:32], rate), "lists of 67"),
    ("a key of elements", FRESH, ramp, by_its_elements,
     "after a first call of another shape with as many elements: y"),
    ("a refusal", FRESH, times, refusing_without_care, "changes whether gradients are computed"),
    ("a flag", "untouched inputs", gained, asking_for_a_gradient, "requires_grad of its input w"),
    ("a factor of 1", SPECIAL, scaled, lambda x, scale: x if scale == 1 else x * scale,
     "scale = 1.0: y shares memory with x"),
    ("a whole number", SPECIAL, scaled,
     lambda x, scale: x * (scale if isinstance(scale, float) else 2.5), "scale = 2: y"),
    ("nothing to mask", SPECIAL, kept, lambda x, m: x if m.all() else x.masked_fill(~m, 0),
     "m all True: y shares memory with x"),
    ("ignored by its sign", SPECIAL, loss,
     lambda x, at, ignored: losses(x, torch.where(at < 0, -100, at), -100), "ignored = "),
    ("a block of -inf", SPECIAL, total, in_blocks, "half a row of -inf in x: a NaN reaches"),
    ("a forward derivative", "second derivative", sine, Sine.apply, "forward derivative of y by x"),
    ("vmap", "second derivative", running, Running.apply, "torch.vmap along axis 0 of x: y"),
    ("a fake's dtype", "compiled", doubled, lambda x: NOT_KEPT(x), "opcheck of planted.doubled"),
    ("a fake's size", "compiled", longer, longer_by_a_custom_op, "compiled for any size: y"),
    ("backward under autocast", "autocast", product, Product.apply, ": index_add_(): self "),
]  # fmt: skip
ADVICE: list[tuple[str, str, Op, Call, str]] = [
    ("the default device", FRESH, ramp, lambda x: x * torch.arange(1, 1 + x.shape[-1]),
     "is made on the default device"),
    ("an output on the default device", FRESH, counted, counting, "an output is made on the"),
    ("a value read back", FRESH, biggest, lambda x: x / (x.amax().item() if x.numel() else 1),
     "reads values back from the device (_local_scalar_dense)"),
    ("a negative factor", SPECIAL, weights, by_the_largest, "scale = -0.5: y"),
    ("another width", FRESH, times, lambda x, w: x * widened(w, x.shape[-1]),
     "w of shape (6,) is taken"),
]  # fmt: skip
RIGHT = {(check, op.name): op for _, check, op, *_ in (*PLANTED, *ADVICE)}
RIGHT[FRESH, elsewhere.name] = elsewhere  # its reference uses the default device, too
del RIGHT["sizes", step.name]  # its only axis is the number of tensors: unsupported


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SIZES", ())
    monkeypatch.setattr(sizes, "LISTS", (67,))
    KEPT.clear()


@pytest.mark.parametrize(
    ("check", "op", "call", "said"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED]
)
def test_a_planted_fault_is_found(check: str, op: Op, call: Call, said: str) -> None:
    assert_found(op, call, check, said)


@pytest.mark.parametrize(
    ("check", "op", "call", "said"), [one[1:] for one in ADVICE], ids=[one[0] for one in ADVICE]
)
def test_what_may_be_meant_is_advice(check: str, op: Op, call: Call, said: str) -> None:
    one = finding(op, call, check)
    assert one.rank is Rank.ADVICE, one
    assert said in one.message


@pytest.mark.parametrize(("check", "op"), [(check, op) for (check, _), op in RIGHT.items()])
def test_a_right_function_passes(check: str, op: Op) -> None:
    one = finding(op, op["eager"].call, check)
    assert one.outcome is Outcome.PASSED, one


def rows_at(x: T, at: T) -> T:
    return x.index_select(0, at)


def rows_at_64_bits(x: T, at: T) -> T:
    if at.dtype is not torch.int64:
        raise TypeError("use int64")
    return x.index_select(0, at)


def first_row_for_32_bits(x: T, at: T) -> T:
    return x.index_select(0, at if at.dtype is torch.int64 else 0 * at)


@pytest.mark.parametrize(
    ("reference", "call", "wrong"),
    [
        (rows_at, first_row_for_32_bits, True),
        (rows_at, rows_at_64_bits, False),
        (rows_at, rows_at, False),
        (rows_at_64_bits, first_row_for_32_bits, False),
    ],
    ids=["wrong", "refused", "right", "refused by the reference"],
)
def test_integers_of_32_bits_may_be_refused_and_not_be_wrong(
    reference: Call, call: Call, wrong: bool
) -> None:
    at = Tensor("M", dtype=torch.int64, values=lambda dims: integers(dims["N"]))
    op = declared(
        "rows", reference, {"x": PLAIN, "at": at}, {"y": "M D"}, cases=[Case(N=5, M=7, D=4)]
    )
    candidate = Candidate(op, Provider("rows", "tried", call, (FP32,)))
    case = candidate.telling()
    found = arguments._of_32_bits(candidate, case, candidate.inputs(case))
    said = found[1] if found else ""
    assert said.startswith("at of 32 bits, which the reference takes: y") is wrong
    assert bool(said) is wrong


@pytest.mark.parametrize("call", [behind_a_lock, in_its_threads_workspace])
def test_a_workspace_that_is_not_shared_is_right(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyllama.harness.correct.checks import between

    monkeypatch.setattr(between, "PATIENCE", 0.02)
    one = finding(softmax, call, FRESH)
    assert one.outcome is Outcome.PASSED, one


def test_advice_does_not_hide_what_is_wrong() -> None:
    """An output whose memory is transposed is advice; a buffer that two calls return is not."""

    def call(x: T) -> T:
        key = x.shape, x.dtype, torch.is_inference_mode_enabled()
        return KEPT.setdefault(key, x.new_empty(x.shape[::-1])).t().copy_(torch.softmax(x, -1))

    one = finding(softmax, call, FRESH)
    assert "of the first" in one.message, one


def test_a_function_that_computes_in_float32_has_a_right_second_derivative() -> None:
    """It is asked in float64, too, where a width of 1 lets all of it cancel."""

    def norm(x: T) -> T:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    narrow = of("narrow", norm, cases=[Case(N=3, D=1), Case(N=5, D=16)])
    one = finding(narrow, lambda x: norm(x.float()).to(x.dtype), "second derivative")
    assert one.outcome is Outcome.PASSED, one


@pytest.mark.parametrize("kernels", [True, False])
def test_what_launches_a_kernel_is_asked_what_kernels_are(kernels: bool) -> None:
    """Although it does not declare that it has any."""
    pytest.importorskip("triton")
    from tinyllama.harness.kernels.launch import jit, tl

    @jit
    def sum_kernel(x, y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        seen = tl.load(x + tl.program_id(0) * N + at, mask=at < N, other=0.0)
        tl.store(y, tl.load(y) + tl.sum(seen, 0))

    def call(x: T) -> T:
        y = torch.zeros(())
        sum_kernel[(len(x),)](x.contiguous(), y, x.shape[1], BLOCK=16)
        return y

    added = declared("added", lambda x: x.sum(), {"x": PLAIN}, {"y": ""})
    one = finding(added, call if kernels else added["eager"].call, "races")
    assert one.outcome is (Outcome.FAILED if kernels else Outcome.UNSUPPORTED), one
    assert not kernels or "two programs of a launch store to 1 addresses" in one.message
