"""Every provider of every op is as accurate as eager, in outputs and in every gradient.

The cases follow from the declarations: shapes, dtypes, memory layouts of inputs and of
upstream gradients, extreme values, and absent upstream gradients. Inputs must stay as they
were, and memory that a provider asks for holds NaN until it is written.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from correctness_tests.support.launched import tree_ops
from tinyllama import ops
from tinyllama.harness import Case, Op
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.harness.plugins.suite import worker_device
from tinyllama.ops import OPS
from tinyllama.suites.accuracy import assert_accurate, parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if worker_device(metafunc.config).type == "cpu":
        parametrize_cases(metafunc, OPS.values(), lambda case: True, adds_nothing_here)
    else:  # how wide an access may be depends on a tensor's strides in bytes
        parametrize_cases(metafunc, OPS.values(), lambda case: True)


def adds_nothing_here(case: OpCase) -> str | None:
    """Why a case is left to the slow lane on a processor: another one shows what it varies.

    Strides, absent and unwanted gradients are wrong in elements, whatever their size: they are
    tried in the op's first dtype, and on the first provider with kernels. The others call torch's
    operators, or the same kernels in another order. So are extreme values in larger shapes. Range
    and rounding, which are of a dtype, show in every shape: the first one and the two largest,
    plain, and extreme values in the first one are tried in each dtype on providers with kernels,
    and the first one, plain, on the others.
    """
    op = case.provider.offered(case.op)
    with_kernels = [p for p in case.op.providers.values() if "triton" in p.requires]
    if case.varied and not (case.extreme and case.case is op.cases[0]):
        if case.dtype is not op.dtypes[0]:
            return "layouts in every dtype"
        return None if case.provider in with_kernels[:1] else "layouts of every provider"
    if case.dtype is op.dtypes[0]:
        return None
    if case.provider not in with_kernels:
        plain = case.case is op.cases[0] and not case.extreme
        return None if plain else "torch's operators in every dtype"
    largest = sorted(op.cases[1:], key=lambda shape: elements(op, shape))[-2:]
    return None if case.case in (op.cases[0], *largest) else "every shape in every dtype"


def test_is_as_accurate_as_eager(case: OpCase, device: torch.device, seed: int) -> None:
    assert_accurate(case, device, seed)


@pytest.mark.slow("every combination of shape, values and layouts")
def test_is_as_accurate_in_combination(
    combination: OpCase, device: torch.device, seed: int
) -> None:
    assert_accurate(combination, device, seed)


def test_every_op_of_the_tree_is_found() -> None:
    """A file or a folder in tinyllama/ops is an op; one that declares none is missed."""
    folder = Path(ops.__file__).parent
    places = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    places |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert places == {op.name for op in tree_ops()}


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_values_are_finite_where_each_size_is_one(op: Op) -> None:
    """Drawn shapes may be that small, and as NaN equals NaN such a case would hold anything. An
    in-place op may get infinities, as an optimizer does in a step that it leaves out."""
    ones: dict[str, Any] = dict.fromkeys(op.cases[0].dims, 1)
    case = op.cases[0] if op.dims_of else Case(**ones)
    for extreme in (None, *op.extremes):
        inputs = OpCase(op, op["eager"], case, torch.float32, extreme).inputs()
        results = evaluate(op, op["eager"].call, inputs) if op.mutated else inputs.args
        tensors = tree_leaves(list(results.values()))
        assert all(x.isfinite().all() for x in tensors), f"{op.name} {extreme} at {case}"


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_declares_bytes_and_flops_of_each_pass(op: Op) -> None:
    passes = {"forward", "backward"} if op.differentiable else {"forward"}
    assert set(op.bytes) == set(op.flops) == passes
    for case in [*op.cases, *op.timed]:
        if any(isinstance(case.dims[name], tuple) for name in op.leading):
            continue  # what is counted is counted of one size a dimension, as a timed case has
        for which in passes:
            view = which == "backward" and not op.computes  # of the upstream gradient
            assert op.bytes[which](4, **case.dims) > 0 or view
            assert (op.flops[which](**case.dims) > 0) == op.computes
