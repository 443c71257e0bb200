"""Which cases follow from a declaration, and where their inputs lie in memory."""

import itertools
from typing import Any

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.check.layouts import LAYOUTS, UPSTREAMS
from tinyllama.harness.declare.values import normal
from tinyllama.ops import OPS

CPU = torch.device("cpu")
PAIR = Op(
    "pair",
    inputs={"a": Tensor("B D", grad=True), "b": Tensor("D", grad=True), "c": Tensor("B")},
    outputs={"y": "B D", "n": Tensor("B", dtype=torch.int64, off_by=1), "z": "B"},
    cases=[Case(B=2, D=3), Case(B=9, D=9), Case(B=1, D=2)],
    dtypes=(torch.float32, torch.bfloat16),
    extremes={"tiny": {"a": normal(1e-3)}},
)


@PAIR.reference
def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    return a * b, (c > 0).long(), c + a.sum(-1)


@PAIR.provider("narrow", dtypes=(torch.float32,))
def narrow(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    return eager(a, b, c)


def test_each_shape_dtype_layout_extreme_and_gradient_has_a_case() -> None:
    names = [str(case) for case in op_cases([PAIR], providers=["narrow"])]
    assert len({*names}) == len(names)
    in_each_dtype = ["B2D3", "B9D9", "B1D2", "B2D3-tiny", "B2D3-no_y_grad", "B2D3-faint_grads"]
    in_each_dtype += [f"B2D3-{layout}_inputs" for layout in LAYOUTS[1:]]
    in_each_dtype += [f"B2D3-{layout}_grads" for layout in UPSTREAMS[1:]]
    for name, dtype in itertools.product(in_each_dtype, ("fp32", "bf16")):
        shape, _, variation = name.partition("-")
        assert "-".join(filter(None, ("pair-narrow", shape, dtype, variation))) in names
    for name in ("only_grad_a", "only_grad_b", "no_z_grad-only_grad_a", "broadcast_grads"):
        assert f"pair-narrow-B2D3-fp32-{name}" in names
    covered = [case for case in op_cases([PAIR], providers=["narrow"]) if not case.unsupported()]
    assert {case.dtype for case in covered} == {torch.float32}


def test_each_tensor_of_each_seed_and_call_has_values_of_its_own() -> None:
    """A call on values that it has had before may give what it has kept."""
    adamw = OPS["adamw"]
    cases = [OpCase(op, op["eager"], op.cases[0], torch.float32) for op in (PAIR, adamw)]
    drawn = [
        tuple(tensor.flatten()[:2].tolist())
        for case, seed in itertools.product(cases, (0, 1))
        for inputs in [case.inputs(seed=seed)]
        for tensors in (inputs.args, inputs.upstream, *inputs.fresh)
        for value in tensors.values()
        for tensor in (value if isinstance(value, list) else [value])
        if tensor is not None and tensor.numel() > 1
    ]
    assert len(drawn) == 2 * (5 + 8 + 4)
    assert len({*drawn}) == len(drawn)
