"""What checks passed once: a table of addresses that was none, targets read as if they were dense,
autocast that is ignored; and spilled registers, which are no fault."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.memory import filled
from correctness_tests.support.tried import MATRIX, finding, small
from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, frameworks
from tinyllama.harness.declare.values import Values
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.harness.kernels.resources import Resources

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
INDICES = Values("indices", lambda shape, made: torch.randint(1, 8, shape, generator=made))


def pick(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.gather(1, at[:, None])[:, 0]


inputs = {"x": Tensor("N D"), "at": Tensor("N", dtype=torch.int64, values=INDICES)}
chosen = small("chosen", pick, inputs, {"y": "N"})


@jit
def choose(x, at, y, stride, D: tl.constexpr, BEYOND: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    index = tl.load(at + row * stride + BEYOND)
    tl.store(y + row, tl.load(x + row * D + index - index * BEYOND))


@jit
def choose_by_address(x, at, y, where, D: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    pointer = tl.load(where).to(tl.pointer_type(tl.float32))
    tl.store(y + row, tl.load(pointer + row * D + tl.load(at + row)))


def found(op: Op, call: Any, check: str) -> Finding:
    return finding(op, call, check, requires=("triton",))


def launching(dense: bool = False, beyond: int = 0) -> Any:
    def call(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty(len(x))
        choose[(len(x),)](x, at, y, 1 if dense else at.stride(0), D=x.shape[1], BEYOND=beyond)
        return y

    return call


def by_address(low: bool) -> Any:
    def call(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        held = filled(0.0, low=low, count=x.numel()).copy_(x.flatten())
        at, y, where = at.contiguous(), torch.empty(len(x)), torch.tensor([held.data_ptr()])
        choose_by_address[(len(x),)](held, at, y, where, D=x.shape[1])
        return y

    return call


def test_indices_are_no_addresses_and_a_launch_with_them_is_held_to_its_tensors() -> None:
    one = found(chosen, launching(beyond=1), "out of bounds")
    assert one.outcome is FAILED, one
    assert "behind the end of at, a buffer of 40 bytes" in one.message
    one = found(chosen, launching(), "out of bounds")
    assert (one.outcome, one.message) == (PASSED, "")


@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
def test_a_launch_with_addresses_is_named_where_only_canaries_tell(low: bool) -> None:
    assert found(chosen, by_address(low), "outputs").outcome is PASSED
    one = found(chosen, by_address(low), "out of bounds")
    assert one.outcome is PASSED
    assert "canaries alone tell of test_check_holes.choose_by_address" in one.message


def test_integers_that_are_read_as_if_they_were_dense_are_found() -> None:
    assert found(chosen, launching(), "input layouts").outcome is PASSED
    one = found(chosen, launching(dense=True), "input layouts")
    assert (one.outcome, one.rank) == (FAILED, Rank.WRONG)
    assert "at alone in this layout is enough" in one.message


# -- wanted gradients ------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
inputs = {name: Tensor("N", grad=True) for name in NAMES}
four = small("four", lambda a, b, c, d: a * b + c * d, inputs, {"y": "N"}, [Case(N=5)])


class WrongFor(torch.autograd.Function):
    """`four`, whose gradients are halved if exactly these inputs want one."""

    @staticmethod
    def forward(ctx: Any, wanted: str, *args: torch.Tensor) -> torch.Tensor:
        ctx.wanted = wanted
        ctx.save_for_backward(*args)
        a, b, c, d = args
        return a * b + c * d

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, b, c, d = ctx.saved_tensors
        asked = "".join(n for n, one in zip(NAMES, ctx.needs_input_grad[1:], strict=True) if one)
        factor = 0.5 if asked == ctx.wanted else 1.0
        return None, *(gradients[0] * one * factor for one in (b, a, d, c))


@pytest.mark.parametrize("wanted", ["a", "d", "ac", "bd", "abd", "bcd"])
def test_each_part_of_the_gradients_is_wanted_alone(wanted: str) -> None:
    one = found(four, lambda *args: WrongFor.apply(wanted, *args), "wanted gradients")
    assert (one.outcome, one.rank) == (FAILED, Rank.WRONG), one
    assert one.case.endswith(f"-only_grad_{'_'.join(wanted)}")


# -- autocast -------------------------------------------------------------------------------------

product = small(
    "product",
    lambda x, w: (x @ w.T).to(torch.promote_types(x.dtype, torch.float32)),
    {"x": MATRIX, "w": Tensor("F D", grad=True)},
    {"y": Tensor("N F", dtype=torch.float32)},
    [Case(N=5, D=8, F=6)],
)


def ignoring(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ w.T


def obeying(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w.T).float()


@pytest.mark.parametrize(
    ("call", "rank"), [(ignoring, Rank.ADVICE), (obeying, None)], ids=["ignoring", "obeying"]
)
def test_autocast_that_is_ignored_is_advice(call: Any, rank: Rank | None) -> None:
    one = found(product, call, "autocast")
    assert one.rank is rank, one
    assert rank is None or "autocast is ignored" in one.message
    candidate = Candidate(product, Provider("product", "tried", call, (torch.float32,)))
    case = candidate.smallest(torch.float32)
    first, second = (frameworks._autocast(candidate, one, case) for one in frameworks.NARROW)
    assert (first is None, second) == (rank is None, None), "it is said once"


def test_positions_that_autocast_rounds_are_found_on_a_long_axis() -> None:
    """A product gives the angles: bfloat16 has no 257."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[0]).mul(0.1).to(x.dtype).cos()[:, None]

    def by_product(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(float(x.shape[0]))[:, None] @ torch.tensor([[0.1]])
        return x * at.cos()

    op = small("turned", turned, {"x": Tensor("N D")}, {"y": "N D"})
    one = found(op, by_product, "autocast")
    assert (one.outcome, one.rank) == (FAILED, Rank.WRONG), one
    assert "N259" in one.case
    assert found(op, turned, "autocast").outcome is PASSED


def test_a_row_that_is_zero_has_no_bound_on_a_long_axis() -> None:
    """The weight of a single key is one, and the gradient of its query cancels to zero."""

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        alone = (torch.arange(len(q)) == 50)[:, None] & (torch.arange(len(k)) > 0)
        return (q @ k.T).masked_fill(alone, -torch.inf)

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores(q, k), 1) @ v

    def divided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = scores(q, k)
        weights = (weights - weights.detach().amax(1, keepdim=True)).exp()
        return weights @ v / weights.sum(1, keepdim=True)

    inputs = {"q": MATRIX, "k": Tensor("M D", grad=True), "v": Tensor("M D", grad=True)}
    op = small("attended", attended, inputs, {"y": "N D"}, [Case(N=5, M=6, D=8)])
    one = found(op, divided, "autocast")
    assert one.outcome is PASSED, one


def test_a_reference_that_autocast_does_not_change_asks_for_nothing() -> None:
    assert found(chosen, pick, "autocast").rank is None


# -- spills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spilled", "shared", "rank"),
    [(0, 0, None), (64, 0, Rank.ADVICE), (64, 2**30, Rank.UNSAFE), (0, 2**30, Rank.UNSAFE)],
    ids=["fits", "spills", "spills and does not fit", "does not fit"],
)
def test_spilled_registers_are_advice(
    monkeypatch: pytest.MonkeyPatch, spilled: int, shared: int, rank: Rank | None
) -> None:
    from tinyllama.harness.correct.checks import compiling

    def verdict(found: Any, known: Any) -> Any:
        unread: Any = None
        taken = Resources(found.kernel, found.chip, 4, 32, spilled, 0, shared, unread)
        return taken.excesses(), taken

    monkeypatch.setattr(compiling, "verdict", verdict)
    one = found(chosen, launching(), "resources")
    assert one.rank is rank, one


def test_each_launch_is_compiled_for_the_chip_that_it_was_chosen_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinyllama.harness.correct.checks import compiling

    asked: list[tuple[Any, str]] = []
    compiled: list[tuple[Any, str]] = []
    launches_of, compilation = compiling.launches_of, compiling.compilation

    def chosen_for(*args: Any, chip: str) -> Any:
        launches = launches_of(*args, chip=chip)
        asked.extend((one, chip) for one in launches)
        return launches

    def compiled_for(launch: Any, chip: str) -> Any:
        compiled.append((launch, chip))
        return compilation(launch, chip)

    monkeypatch.setattr(compiling, "launches_of", chosen_for)
    monkeypatch.setattr(compiling, "compilation", compiled_for)
    assert found(chosen, launching(), "resources").outcome is PASSED
    assert len({chip for _, chip in compiled}) > 1
    assert [(id(one), chip) for one, chip in compiled] == [(id(one), chip) for one, chip in asked]


def test_one_entry_is_tried_along_axes_that_have_more() -> None:
    from tinyllama.harness.correct.checks.compiling import _of_one_entry

    def sizes(**dims: Any) -> list[dict[str, Any]]:
        op = Op("kept", {"x": Tensor("N D")}, {"y": "N D"}, cases=[Case(**dims)])
        op.reference(lambda x: 2 * x)
        candidate = Candidate(op, Provider("kept", "tried", lambda x: 2 * x, (torch.float32,)))
        return [dict(one.case.dims) for one in _of_one_entry(candidate)]

    assert sizes(N=1, D=4) == [{"N": 1, "D": 1}]
    assert sizes(N=3, D=4) == [{"N": 1, "D": 4}, {"N": 3, "D": 1}]
