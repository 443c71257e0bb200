"""From a forward and a backward the harness derives an autograd function and a custom op."""

from typing import Any

import pytest
import torch

from correctness_tests.support.tried import derived
from tinyllama.harness import Case, DeclarationError, Op, Tensor
from tinyllama.harness.check.cases import op_cases
from tinyllama.harness.check.evaluate import make_inputs
from tinyllama.harness.check.poison import PoisonedMemory
from tinyllama.harness.declare.custom_op import shapes_are_fixed
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.layout import contiguous
from tinyllama.ops import OPS


def scaled_pair(name: str) -> Op:
    """y = x * weight * factor and z = x + 1: two outputs, a parameter, a saved tensor."""
    op = Op(
        name,
        inputs={"x": Tensor("B D", grad=True), "weight": Tensor("D", grad=True)},
        params={"factor": 3.0},
        outputs={"y": "B D", "z": "B D"},
        cases=[Case(B=3, D=8), Case(B=1, D=5)],
    )

    @op.reference
    def eager(x: torch.Tensor, weight: torch.Tensor, factor: float = 3.0) -> Any:
        return x * weight * factor, x + 1

    @op.provider("manual", saved={"scaled": Tensor("D")}, keep=("x",))
    class Manual:
        @staticmethod
        def forward(x: torch.Tensor, weight: torch.Tensor, factor: float) -> Any:
            scaled = weight * factor
            y = torch.empty_like(x)
            y.copy_(x * scaled)
            return y, x + 1, scaled

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
            dy, dz = grads
            dx = torch.zeros_like(kept["x"]) if dz is None else dz.clone()
            dw = torch.zeros_like(saved["scaled"])
            if dy is not None:
                dx += dy * saved["scaled"]
                dw += (dy * kept["x"]).float().sum(0) * factor
            return {"x": dx, "weight": dw}

    return op


PAIR = scaled_pair("pair")
X = {"x": Tensor("B D", grad=True)}
EAGER: Any = PAIR["eager"].call


def twice(name: str) -> Op:
    op = Op(name, inputs=X, outputs={"y": "B D"}, cases=[Case(B=3, D=8)])
    op.reference(lambda x: 2 * x)
    return op


@pytest.mark.long
def test_derived_provider_passes_the_cases_of_its_op() -> None:
    cases = list(op_cases([PAIR], providers=["manual"]))
    assert any(case.absent == "y" for case in cases)
    assert {case.provider.name for case in cases} == {"manual"}
    for case in cases:
        assert all(c.passed for c in case.compare()), str(case)


def test_an_unwritten_tail_shows_as_nan() -> None:
    with PoisonedMemory():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.empty_strided((2, 3), (1, 2)).isnan().all()
        assert torch.ones(2).new_empty(2).isnan().all()
        assert torch.ones(2).new_empty_strided((2, 3), (1, 2)).isnan().all()
        assert torch.empty(2, dtype=torch.int32).eq(2**31 - 1).all()
    assert not torch.zeros(3).isnan().any()


@pytest.mark.parametrize("lost", ["x", "weight"])
def test_a_lost_gradient_is_an_error(lost: str) -> None:
    op = scaled_pair("forgetful")

    def lossy(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
        return {name: torch.ones_like(each) for name, each in kept.items() if name != lost}

    op.provider("lossy", keep=("x", "weight"))(derived(EAGER, lossy))
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    y, _ = op(x, weight, provider="lossy")
    with pytest.raises(RuntimeError, match=rf"no gradient for \['{lost}'\]"):
        y.sum().backward()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("by", ["call", "custom_op"])
def test_an_output_that_no_loss_uses_gives_no_gradient_and_no_zeros(used: int, by: str) -> None:
    op, given = scaled_pair("unused"), []

    def noting(grads: Any, kept: Any, saved: Any, needs: set[str], factor: float) -> Any:
        given.append([one is not None for one in grads])
        return {name: torch.ones_like(each) for name, each in kept.items()}

    op.provider("noting", keep=("x", "weight"))(derived(EAGER, noting))
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    provider = op["noting"]
    assert provider.derived is not None
    custom_op: Any = provider.derived.custom_op
    results = provider(x, weight) if by == "call" else custom_op(x, weight, 3.0)
    results[used].sum().backward()
    assert given == [[place == used for place in range(2)]]


def test_forward_must_return_what_is_declared() -> None:
    op = scaled_pair("short")
    none = derived(lambda x, weight, factor: x, lambda grads, kept, saved, needs, factor: {})
    op.provider("one", keep=("x",))(none)
    with pytest.raises(TypeError, match="returned 1 tensors, declared are 2"):
        op(torch.ones(1, 1), torch.ones(1), provider="one")


@pytest.mark.long
def test_the_custom_op_is_sound_for_the_compiler() -> None:
    """opcheck: schema, fake version, autograd registration, and tracing agree with the op."""
    derived = PAIR["manual"].derived
    assert derived is not None
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    custom_op: Any = derived.custom_op
    torch.library.opcheck(custom_op, (x, weight, 3.0))


@pytest.mark.long
def test_results_in_other_layouts_are_contiguous_for_the_compiler() -> None:
    """An output, a saved tensor and a gradient, the first of views of one memory among them: code
    of the compiler refuses other strides than those that it was told."""

    def wide(like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(len(like), 2 * like.shape[1])[:, : like.shape[1]].copy_(like)

    op, told = twice("strided"), []

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        told.append(shapes_are_fixed())
        return wide(2 * x), wide(x)

    one = derived(forward, lambda grads, kept, saved, needs: {"x": wide(2 * grads[0])})
    op.provider("views", saved={"x_again": Tensor("B D")})(one)
    call, custom = op["views"].call, op["views"].derived
    assert custom is not None
    run: Any = custom.custom_op
    assert all(result.is_contiguous() for result in run(torch.ones(3, 8)))
    x = torch.ones(3, 8, requires_grad=True)
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones(3, 8))
    assert dx.is_contiguous()
    assert torch.equal(dx, torch.full_like(x, 2))
    assert told == [True, True]
    assert not call(x).is_contiguous()
    assert told[2:] == [False]


@pytest.mark.long
def test_compiled_and_eager_agree() -> None:
    """Under torch.compile the custom op runs, in one graph, with the same gradients."""

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, z = PAIR["manual"](x, weight, factor=2.0)
        return (y * z).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        value = function(x, weight)
        value.backward()
        results.append((value.detach(), x.grad, weight.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.long
def test_a_provider_has_the_compilers_limit_to_itself() -> None:
    """The compiler counts how often one code object was compiled, and raises past a limit."""
    op = twice("compiled_apart")
    call = derived(lambda x: 2 * x, lambda grads, kept, saved, needs: {"x": 2 * grads[0]})
    for name in ("one", "other"):
        op.provider(name)(call)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("one", "other"):
            compiled = torch.compile(op[name].call, fullgraph=True, backend="eager")
            assert torch.equal(compiled(torch.ones(3, 8)), torch.full((3, 8), 2.0))


@pytest.mark.long
def test_an_output_of_a_dtype_that_the_compiler_was_not_told_is_an_error() -> None:
    op = twice("untold")
    op.provider("wide")(derived(lambda x: x.double(), lambda grads, kept, saved, needs: {}))
    call = torch.compile(op["wide"].call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"y has dtype torch.float64, the compiler was told"):
        call(torch.ones(3, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_is_read_as_its_provider_asks_and_copied_once(compiled: bool) -> None:
    """Compiled, each pass copies: what the compiler keeps is the input."""
    op, seen = twice("reader"), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return 2 * x

    def backward(grads: Any, kept: Any, saved: Any, needs: set[str]) -> Any:
        seen.append(kept["x"])
        return {"x": 2 * grads[0]}

    op.provider("triton", keep=("x",), reads={"x": contiguous})(derived(forward, backward))
    call = torch.compile(op["triton"].call, backend="aot_eager") if compiled else op["triton"].call
    x = torch.arange(24.0).view(8, 3).T.requires_grad_()
    before = layout.copies
    call(x).sum().backward()
    assert layout.copies - before == (2 if compiled else 1)
    assert all(one.is_contiguous() and torch.equal(one, x) for one in seen)
    assert len(seen) == 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_only_inputs_can_be_read() -> None:
    op = Op("misread", inputs=X, outputs={"y": "B D"}, cases=[Case(B=3, D=8)])
    wanted = r"op 'misread': 'triton' reads unknown inputs \['y'\]: use x"
    with pytest.raises(DeclarationError, match=wanted):
        op.provider("triton", reads={"y": contiguous})(type("Empty", (), {}))


SECOND = [
    pytest.param(op, provider, id=str(provider))
    for op in OPS.values()
    if op.differentiable
    for provider in op.providers.values()
]


@pytest.mark.parametrize(("op", "provider"), SECOND)
def test_double_backward_is_right_or_raises(op: Op, provider: Any) -> None:
    """A provider that supports second derivatives gives the reference's; another raises."""

    def second(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = make_inputs(op, op.cases[0], dtype)
        args = {k: v.requires_grad_(k in op.differentiable) for k, v in inputs.args.items()}
        outputs = call(*args.values(), **inputs.params)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [args[name] for name in op.differentiable]
        first = torch.autograd.grad([y.square().sum() for y in outputs], leaves, create_graph=True)
        found = torch.autograd.grad(
            [g.square().sum() for g in first if g.requires_grad], leaves, allow_unused=True
        )
        return [g for g in found if g is not None]

    if not provider.double_backward:
        with pytest.raises(RuntimeError, match=r"derivative|differentiate|double backward"):
            second(provider.call, torch.float32)
        return
    expected = second(op["eager"].call, torch.float64)
    got = second(provider.call, torch.float32)
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other).norm() <= 1e-4 * other.norm()
        assert other.norm() > 0


@pytest.mark.parametrize("of_input", [True, False])
def test_a_view_of_an_input_is_never_changed_unnoticed(of_input: bool) -> None:
    """A result of its own memory may be changed in place, whatever views made it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x if of_input else x.clone()).view(2, 2, 3)

    op = Op(
        f"viewed_{of_input}".lower(),
        inputs={"x": Tensor("N D", grad=True)},
        outputs={"y": "N/2 N/2 D"},
        cases=[Case(N=4, D=3)],
    )
    op.provider("viewing")(
        derived(forward, lambda grads, kept, saved, needs: {"x": grads[0].view(4, 3)})
    )
    x = torch.zeros(4, 3, requires_grad=True)
    y = op["viewing"](x)
    if of_input:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y += 1
    else:
        y += 1
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.eq(1).all()
    assert not x.any()
