"""Which cases follow from a declaration, by their names, and what each of them asks for."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.declare.values import normal
from tinyllama.ops import OPS


def made() -> Op:
    op = Op(
        "pair",
        inputs={"a": Tensor("B D", grad=True), "b": Tensor("D", grad=True), "c": Tensor("B")},
        outputs={"y": "B D", "n": Tensor("B", dtype=torch.int64, off_by=1), "z": "B"},
        cases=[Case(B=2, D=3), Case(B=9, D=9), Case(B=1, D=2), Case(B=4, D=4)],
        dtypes=(torch.float32, torch.bfloat16),
        extremes={"tiny": {"a": normal(1e-3)}},
    )

    @op.reference
    def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return a * b, (c > 0).long(), c + a.sum(-1)

    @op.provider("narrow", dtypes=(torch.float32,), supports=lambda dims: None)
    def narrow(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return eager(a, b, c)

    return op


LAYOUTS = ("strided", "transposed", "expanded", "distinct", "offset", "padded")
UPSTREAMS = ("strided", "transposed", "summed", "distinct", "offset", "padded")
IN_EACH_DTYPE = (
    *("B2D3", "B9D9", "B1D2", "B4D4", "B2D3-tiny"),
    *(f"B2D3-{layout}_inputs" for layout in LAYOUTS),
    *(f"B2D3-{layout}_grads" for layout in (*UPSTREAMS, "faint")),
    *("B2D3-no_y_grad", "B2D3-no_z_grad"),  # none of integers
)
IN_ONE = (
    "B2D3-broadcast_grads",  # no tensor has three axes
    *(f"B2D3-no_{output}_grad-only_grad_{name}" for output in "yz" for name in "ab"),
    *("B2D3-only_grad_a", "B2D3-only_grad_b", "B4D4-tiny", "B9D9-tiny"),
)


def test_the_cases_of_a_declaration_by_name() -> None:
    """Those of one kind follow each other; extremes are tried on the two largest shapes, too."""

    def names(case: str, dtype: str) -> list[str]:
        shape, _, variation = case.partition("-")
        said = "-".join(filter(None, (shape, dtype, variation)))
        return [f"pair-{provider}-{said}" for provider in ("eager", "narrow")]

    each = [(case, dtype) for dtype in ("fp32", "bf16") for case in IN_EACH_DTYPE]
    each += [(case, "fp32") for case in IN_ONE]
    expected = [name for case in each for name in names(*case)]
    assert [str(case) for case in op_cases([made()])] == expected
    alone = [str(case) for case in op_cases([made()], providers=["narrow"])]
    assert alone == [name for name in expected if "narrow" in name]


def plain(**fields: Any) -> OpCase:
    op = made()
    return OpCase(op, op["narrow"], op.cases[0], torch.float32, **fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, ""),
        ({"layout": "offset", "alone": "b"}, "-offset_b"),
        ({"wanted": ("a", "b")}, "-only_grad_a_b"),
        ({"wanted": ()}, "-no_grad"),
        ({"extreme": "tiny", "layout": "offset"}, "-tiny-offset_inputs"),
    ],
)
def test_a_case_is_named_by_what_varies(fields: dict[str, Any], name: str) -> None:
    case = plain(**fields)
    assert str(case) == f"pair-narrow-B2D3-fp32{name}"
    assert case.varied is bool(name)


def test_what_a_provider_does_not_cover_has_a_reason() -> None:
    case = plain()
    assert case.unsupported() is None
    wide = replace(case, dtype=torch.bfloat16)
    assert wide.unsupported() == "pair-narrow does not support bf16"
    small = replace(case.provider, supports=lambda dims: f"not for D={dims['D']}")
    assert replace(case, provider=small).unsupported() == "not for D=3"


def test_one_input_alone_may_have_a_layout_and_one_output_no_gradient() -> None:
    dense, offset = plain().inputs(), plain(layout="offset", alone="a").inputs()
    assert {n: x.data_ptr() % 16 == 0 for n, x in offset.args.items()} == {
        "a": False,
        "b": True,
        "c": True,
    }
    for name, value in dense.args.items():
        assert torch.equal(value, offset.args[name])
    absent = plain(absent="z", wanted=("b",)).inputs()
    assert absent.upstream["z"] is None
    assert absent.upstream["y"] is not None
    assert absent.wanted == ("b",)


def test_each_tensor_of_each_seed_and_call_has_values_of_its_own() -> None:
    """A call on values that it has had before may give what it has kept."""
    adamw = OPS["adamw"]
    in_place = OpCase(adamw, adamw["eager"], adamw.cases[0], torch.float32)
    drawn = [
        tuple(value.flatten()[:2].tolist())
        for case, seed in itertools.product((plain(), in_place), (0, 1))
        for inputs in [case.inputs(seed=seed)]
        for given in (inputs.args, inputs.upstream, *inputs.fresh)
        for one in given.values()
        for value in (one if isinstance(one, list) else [one])
        if value is not None and value.numel() > 1
    ]
    assert len(drawn) == 2 * (5 + 8 + 4)
    assert len({*drawn}) == len(drawn)
