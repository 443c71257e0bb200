"""What an op does with inputs that its cases do not have: sizes of zero, sizes that do not fit each
other, dtypes that differ or are unknown. The result is the reference's, or one clear error, and
nothing is read or written past its end."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from correctness_tests.support.launched import tree_ops
from tinyllama.harness import Op, Provider
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs, evaluate
from tinyllama.harness.check.guards import PoisonedMemory
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import OPS

pytest.importorskip("triton")

CLEAR = (ValueError, RuntimeError, ZeroDivisionError)  # torch's own errors are clear enough
KERNELS = [
    (op, provider)
    for op in tree_ops()
    for provider in op.providers.values()
    if "triton" in provider.requires
]


def ids(value: Any) -> str:
    return str(value) if isinstance(value, Provider) else ""


def attempt(op: Op, provider: Provider, inputs: Inputs) -> dict[str, torch.Tensor] | Exception:
    """The results, in memory that holds NaN before it is written, or a clear error."""
    try:
        with PoisonedMemory():
            return evaluate(op, provider.call, inputs, provider.overwrites)
    except CLEAR as error:
        return error


# -- sizes of zero --------------------------------------------------------------------------------


def empties() -> Iterator[Any]:
    for op, provider in KERNELS:
        if not op.mutated:
            for dim in op.cases[0].dims:
                yield pytest.param(op, provider, dim, id=f"{provider}-{dim}")


@pytest.mark.parametrize(("op", "provider", "dim"), list(empties()))
def test_a_size_of_zero_gives_the_reference_or_an_error(
    op: Op, provider: Provider, dim: str
) -> None:
    case = op.cases[0].resized(**{dim: 0})
    try:
        inputs = OpCase(op, provider, case, torch.float32).inputs()
    except RuntimeError as error:
        pytest.skip(f"no inputs of that size: {error}")
    expected = attempt(op, op["eager"], inputs)
    actual = attempt(op, provider, inputs)
    if isinstance(expected, Exception):  # then ours may raise, or have nothing to compute
        assert isinstance(actual, Exception) or not any(x.isnan().any() for x in actual.values())
        return
    assert not isinstance(actual, Exception), actual
    # A gradient without elements is as good as none.
    actual = {name: value for name, value in actual.items() if name in expected or value.numel()}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)


# -- sizes that do not fit each other -------------------------------------------------------------

UNFIT = {
    "attention": [{"H": 3, "G": 2}, {"H": 1, "G": 2}, {"G": 0}],
    "rope": [{"C": 16}, {"C": 4}, {"K": 15}, {"K": 17, "C": 8}],
    "block": [{"Q": 48, "R": 32}, {"Q": 16, "R": 32}, {"R": 0}, {"Q": 40}],
}


@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name, several in UNFIT.items() for sizes in several]
)
def test_sizes_that_do_not_fit_are_one_error(name: str, sizes: dict[str, int]) -> None:
    op = OPS[name]
    case = op.cases[0].resized(**sizes)
    inputs = OpCase(op, op["eager"], case, torch.float32).inputs()
    for call in (op, *(p for p in op.providers.values() if "triton" in p.requires)):
        refused(call, inputs, inputs.args, rf"{name}: ")


def refused(call: Any, inputs: Inputs, args: dict[str, Any], said: str) -> None:
    """One clear error, and not one kernel launched; when it is called again, too."""
    for _ in range(2):
        with recorded() as launches, pytest.raises(ValueError, match=said):
            call(*args.values(), **inputs.params)
        assert not launches


def accepted(op: Op, provider: Provider) -> Inputs:
    """Right inputs, with which the provider was called: what it remembers may not let wrong ones
    pass."""
    inputs = OpCase(op, provider, op.cases[0], torch.float32).inputs()
    with recorded():
        provider.call(*inputs.args.values(), **inputs.params)
    return inputs


@pytest.mark.parametrize(("op", "provider"), KERNELS, ids=ids)
def test_an_axis_that_differs_from_another_inputs_is_one_error(op: Op, provider: Provider) -> None:
    """Each axis that two inputs share: longer, shorter, and one that would be broadcast."""
    inputs = accepted(op, provider)
    shared = [axis for declared in op.inputs.values() for axis in {*declared.axes}]
    for name, declared in op.inputs.items():
        for at, axis in enumerate(declared.axes):
            if shared.count(axis) < 2:
                continue
            value = inputs.args[name]
            for change in (resized_by(1), resized_by(-1), lambda x, at: x.narrow(at, 0, 1)):
                changed = [change(value[0], at), *value[1:]] if declared.many else change(value, at)
                refused(provider.call, inputs, {**inputs.args, name: changed}, op.name)


def resized_by(more: int) -> Any:
    """A function that appends to an axis, or takes from it."""

    def change(x: torch.Tensor, at: int) -> torch.Tensor:
        if more < 0:
            return x.narrow(at, 0, x.shape[at] + more)
        return torch.cat([x, x.narrow(at, 0, more)], at)

    return change


@pytest.mark.parametrize(("op", "provider"), KERNELS, ids=ids)
def test_another_number_of_axes_or_inputs_is_one_error(op: Op, provider: Provider) -> None:
    if op.mutated:
        pytest.skip("it takes parameters of any shape")
    inputs = accepted(op, provider)
    fewer = dict(list(inputs.args.items())[:-1])
    for args in (fewer, {**inputs.args, "one more": 1e-5}):
        refused(provider.call, inputs, args, f"{op.name} takes {len(op.inputs)} tensor")
    with pytest.raises(ValueError, match=f"{op.name} has no parameter 'nonsense'"):
        provider.call(*inputs.args.values(), **inputs.params, nonsense=1)
    for name, value in inputs.args.items():
        for changed in (value[..., None], None):
            refused(provider.call, inputs, {**inputs.args, name: changed}, f"{op.name}: ")


# -- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "provider"), KERNELS, ids=ids)
def test_an_input_on_another_device_is_one_error(op: Op, provider: Provider) -> None:
    """By the provider and by the op, before the first of several kernels is launched."""
    if len(op.inputs) == 1:
        pytest.skip("it has one input")
    inputs = accepted(op, provider)
    for name, declared in op.inputs.items():
        value = inputs.args[name]
        away = [value[0].to("meta"), *value[1:]] if declared.many else value.to("meta")
        args = {**inputs.args, name: away}
        refused(provider.call, inputs, args, rf"{op.name}: .* (device|on meta)")
        if declared.axes:
            refused(op, inputs, args, rf"{op.name}: .* on (meta|cpu): move them to one device")


def test_a_state_on_another_device_than_its_step_is_one_error() -> None:
    op = OPS["adamw"]
    inputs = OpCase(op, op["triton"], op.cases[0], torch.float32).inputs()
    lists = {
        name: [x.to("meta") for x in value] if op.inputs[name].many else value
        for name, value in inputs.args.items()
    }
    refused(op["triton"].call, inputs, lists, "adamw: tensors of param differ .* from step")


BAD = [
    ("beta1", 1.0, "below 1"),
    ("beta1", -0.1, "below 1"),
    ("beta2", 1.0, "below 1"),
    ("weight_decay", -0.01, "at least 0"),
    ("eps", float("nan"), "finite"),
    ("lr", float("inf"), "finite"),
    ("lr", -1.0, "at least 0"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_parameter_that_no_optimizer_takes_is_one_error(
    name: str, value: float, said: str
) -> None:
    op = OPS["adamw"]
    inputs = OpCase(op, op["triton"], op.cases[0], torch.float32).inputs()
    args = list(inputs.args.values())
    before = [x.clone() for x in args[0]]
    for call in (op["triton"].call, op):
        with pytest.raises(ValueError, match=rf"adamw: {name} is .*{said}"):
            call(*args, **{**op.params, name: value})
    assert all(torch.equal(x, y) for x, y in zip(args[0], before, strict=True))
    assert float(args[4]) == 2.0, "no step is counted"


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
@pytest.mark.parametrize(("op", "provider"), KERNELS, ids=ids)
def test_another_dtype_is_refused_by_name(op: Op, provider: Provider, dtype: torch.dtype) -> None:
    def cast(value: Any) -> Any:
        return [x.to(dtype) for x in value] if isinstance(value, list) else value.to(dtype)

    inputs = accepted(op, provider)
    args = [
        cast(value) if op.inputs[name].dtype is None else value
        for name, value in inputs.args.items()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex to real
        said = rf"{op.name}.*: \w+ has dtype {dtype}: use .*float32"
        refused(provider.call, inputs, dict(zip(op.inputs, args, strict=True)), said)


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "mixed"), MIXED, ids=str)
@pytest.mark.parametrize(("op", "provider"), KERNELS, ids=ids)
def test_mixed_dtypes_give_the_dtypes_of_the_reference(
    op: Op, provider: Provider, dtype: torch.dtype, mixed: torch.dtype
) -> None:
    """Where the reference takes them: one input at a time has the other dtype."""
    if op.mutated:
        pytest.skip("its lists have one dtype each, which a test of its own mixes")
    if not {dtype, mixed} <= set(provider.dtypes):
        pytest.skip("it takes no such dtype, and refuses it by name (above)")
    inputs = OpCase(op, provider, op.cases[0], dtype).inputs()
    attempts = 0
    for name, declared in op.inputs.items():
        if declared.dtype is None:
            args = {**inputs.args, name: inputs.args[name].to(mixed)}
            expected = _outcome(op, op["eager"], args, inputs.params)
            if not isinstance(expected, Exception):
                attempts += 1
                actual = _outcome(op, provider, args, inputs.params)
                assert not isinstance(actual, Exception), (name, actual)
                for got, right in zip(actual, expected, strict=True):
                    assert got.dtype == right.dtype, (name, got.dtype, right.dtype)
                    assert (got.double() - right.double()).norm() <= 0.02 * right.double().norm()
    if not attempts:
        pytest.skip("the reference takes no mixed dtypes")


DERIVED = [(op, provider) for op, provider in KERNELS if provider.derived]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "mixed"), MIXED[:2], ids=str)
@pytest.mark.parametrize(("op", "provider"), DERIVED, ids=ids)
def test_the_compiler_is_told_the_dtypes_of_mixed_inputs(
    op: Op, provider: Provider, dtype: torch.dtype, mixed: torch.dtype
) -> None:
    """Compiled code reads results by the dtypes that it was told: of another one it reads past
    their end."""
    derived: Any = provider.derived
    backward = getattr(torch.ops.tinyllama, f"{op.name}_{provider.name}_backward")
    inputs = OpCase(op, provider, op.cases[0], dtype).inputs()
    params = {**op.params, **inputs.params}.values()
    for name, declared in op.inputs.items():
        args = {**inputs.args, name: inputs.args[name].to(mixed)}
        if declared.dtype is None and not isinstance(
            _outcome(op, op["eager"], args, inputs.params), Exception
        ):
            results = several(_as_told(derived.custom_op, len(op.outputs), *args.values(), *params))
            outputs = results[: len(op.outputs)]
            kept_tensors = derived.tensors_to_keep(tuple(args.values()), outputs)
            upstream = [torch.ones_like(y) for y in outputs]
            saved = results[len(outputs) :]
            _as_told(backward, len(op.differentiable), *upstream, *kept_tensors, *saved, *params)


def _as_told(call: Any, count: int, *args: Any) -> Any:
    """The results of a custom op, of which the first ``count`` have the dtypes and shapes of its
    fake version. The rest is saved for the backward pass, and no compiled code reads it."""
    results = call(*args)
    with FakeTensorMode() as mode:
        fakes = call(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
    for real, fake in list(zip(several(results), several(fakes), strict=True))[:count]:
        assert (real.dtype, real.shape) == (fake.dtype, fake.shape)
    return results


def _outcome(
    op: Op, provider: Provider, args: dict[str, Any], params: Any
) -> list[torch.Tensor] | Exception:
    """Outputs and gradients, or the error."""
    tensors = [
        value.detach().requires_grad_(op.inputs[name].grad) if value.is_floating_point() else value
        for name, value in args.items()
    ]
    try:
        results = provider.call(*tensors, **{**op.params, **params})
    except CLEAR as error:
        return error
    outputs = results if isinstance(results, tuple) else (results,)
    leaves = [x for x in tensors if x.requires_grad]
    ones = [torch.ones_like(x) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, ones)]
