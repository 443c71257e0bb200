"""A declaration is data, checked before it is registered; discovery refuses duplicates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama.harness import Case, DeclarationError, Op, Registry, Tensor, load_file
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.ops import OPS
from tinyllama.ops.rms_norm import rms_norm

X = Tensor("B D", grad=True)


def declare(**changes: Any) -> Op:
    parts: dict[str, Any] = {"inputs": {"x": X}, "outputs": {"y": "B D"}, "cases": [Case(B=2, D=3)]}
    return Op(**{"name": "toy", **parts, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Toy"},
        {"cases": []},
        {"cases": [Case(B=2)]},
        {"cases": [Case(B=2, D=3, params={"eps": 1})]},
        {"outputs": {"y": "B E"}},
        {"outputs": {"y": "B 2*E"}},
        {"outputs": {"y": Tensor("B", shape_by=lambda params: "B K")}},
        {"outputs": {}},
        {"inputs": {"x": Tensor("B D", mutated=True)}},
        {"params": {"x": 1}},
        {"inputs": {"x": Tensor("B D", dtype=torch.int64, grad=True)}},
        {"inputs": {"x": X, "at": Tensor("B", dtype=torch.int64)}},
        {"extremes": {"big": {"z": None}}},
        {"leading": ("D",)},
        {"leading": ("B",), "timed": [Case(B=(2, 3), D=4)]},
        {"layouts": {"expanded": 2.0}},
        {"layouts": {"strided": 1.0}},
        {"inputs": {"x": Tensor("B D", optional=True)}},
        {"inputs": {"x": Tensor("B D/2")}, "outputs": {"y": "B"}},
        {"inputs": {"x": Tensor("B D", off_by=1)}},
    ],
)
def test_a_contradiction_is_refused_by_the_op_s_name(changes: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"op '[Tt]oy'"):
        declare(**changes)


def test_a_provider_is_registered_once_and_with_the_declared_arguments() -> None:
    op = declare(params={"eps": 1.0})
    op.reference(lambda x, eps: x * eps)
    with pytest.raises(DeclarationError, match="registered twice"):
        op.provider("eager")(lambda x, eps: x)
    for wrong in (lambda eps, x: x, lambda x: x, lambda y, eps: y):
        with pytest.raises(DeclarationError, match=r"declared are \(x, eps\)"):
            op.provider("other")(wrong)
    op.provider("other")(lambda x_BD, eps: x_BD)


@pytest.mark.parametrize(
    "traits",
    [
        {"frozen": ("gain",)},
        {"overwrites": ("dy",)},
        {"output_dtypes": {"z": torch.float32}},
        {"slack": {torch.float32: 1e9}},
    ],
    ids=str,
)
def test_a_trait_of_nothing_and_a_slack_without_end_are_refused(traits: dict[str, Any]) -> None:
    op = declare()
    op.reference(lambda x: x)
    with pytest.raises(DeclarationError, match=f"{next(iter(traits))} of 'other'"):
        op.provider("other", **traits)(lambda x: x)


def test_registry_refuses_duplicates_and_incomplete_ops() -> None:
    registry = Registry()
    op = declare()
    with pytest.raises(DeclarationError, match="has no reference"):
        registry.add(op)
    op.reference(lambda x: x)
    registry.add(op)
    with pytest.raises(DeclarationError, match=r"is declared in .* already"):
        registry.add(op)


FILE = """
from tinyllama.harness import Case, Op, Tensor

double = Op("double", inputs={"x": Tensor("B D", grad=True)}, outputs={"y": "B D"},
            cases=[Case(B=2, D=3)])

@double.reference
def eager(x):
    return 2 * x

@double.provider("added")
def added(x):
    return x + x
"""


PROVIDER = """
from tinyllama.ops.rms_norm import rms_norm

@rms_norm.provider("theirs", dtypes=())
def theirs(x, weight, eps=1e-5):
    return x * weight
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace('Op("double"', 'Op("rms_norm"'), "is declared in tinyllama.ops.rms_norm"),
        (PROVIDER.replace("theirs", "torch"), "provider 'torch' is registered twice"),
        (PROVIDER + FILE.replace("cases=[Case(B=2, D=3)]", "cases=[]"), "declare at least one"),
    ],
)
def test_a_file_that_cannot_join_leaves_nothing_registered(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "wrong.py").write_text(text)
    before = {name: dict(op.providers) for name, op in OPS.items()}
    with pytest.raises(DeclarationError, match=message):
        load_file(tmp_path / "wrong.py", OPS)
    assert {name: op.providers for name, op in OPS.items()} == before


def test_leading_dimensions_may_be_any_number_of_axes() -> None:
    two = {"x": X, "other": Tensor("B D"), "weight": Tensor("D")}
    op = declare(inputs=two, leading=("B",))
    op.reference(lambda x, other, weight: x + other * weight)
    weight = torch.ones(4)
    for shape in [(4,), (3, 4), (2, 3, 4), (1, 2, 0, 3, 4)]:
        assert op(torch.ones(shape), torch.ones(shape), weight).shape == shape
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"other has B = 3, other inputs have B = \(2, 3\)"):
        op(x, x[0], weight)


def test_a_rule_is_given_each_leading_dimension_as_a_number() -> None:
    """Whatever the axes of a case or of a call are."""

    def rule(sizes: Any) -> str | None:
        return "too many" if sizes["B"] > 6 else None

    op = declare(cases=[Case(B=(2, 3), D=3)], leading=("B",), fits=rule)
    op.reference(lambda x: x)
    op.provider("small", supports=rule)(lambda x: x)
    supported = [case.unsupported() for case in op_cases([op]) if case.provider.name == "small"]
    assert set(supported) == {None}
    more = OpCase(op, op["small"], Case(B=(2, 4), D=3), torch.float32)
    assert more.unsupported() == "too many"
    op(torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="toy: too many"):
        op(torch.ones(2, 4, 3))


X_BTD, WEIGHT = torch.ones(2, 3, 4), torch.ones(4)


@pytest.mark.parametrize(
    ("args", "params", "message"),
    [
        ((X_BTD, torch.ones(5)), {}, "other inputs have D = 4"),
        ((X_BTD, WEIGHT[:, None]), {}, r"weight has shape \(4, 1\), expected \(D\)"),
        ((X_BTD,), {}, "takes 2 tensors"),
        ((X_BTD, WEIGHT), {"epsilon": 1.0}, "no parameter 'epsilon': use eps"),
        ((X_BTD, WEIGHT), {"provider": "tritn"}, "no provider 'tritn': use one of eager, torch"),
    ],
)
def test_a_call_with_wrong_arguments_is_refused(
    args: tuple[Any, ...], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(*args, **params)
