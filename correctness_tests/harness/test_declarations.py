"""A declaration is data, checked before it is registered; discovery refuses duplicates."""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from correctness_tests.support.commands import ROOT, python
from tinyllama.harness import Case, DeclarationError, Op, Registry, Tensor, load_file
from tinyllama.harness.check.cases import OpCase, op_cases
from tinyllama.harness.check.layouts import FAINT, LAYOUTS, UPSTREAMS
from tinyllama.harness.declare import registry as registry_file
from tinyllama.harness.declare.autograd import Grads, Named, Needs
from tinyllama.ops import OPS

X = Tensor("B D", grad=True)


def declare(**changes: Any) -> Op:
    parts: dict[str, Any] = {"inputs": {"x": X}, "outputs": {"y": "B D"}, "cases": [Case(B=2, D=3)]}
    return Op(**{"name": "toy", **parts, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Toy"}, "lower_case"),
        ({"cases": []}, "at least one case"),
        ({"cases": [Case(B=2)]}, "lacks dimensions ['D']"),
        ({"cases": [Case(B=2, D=3, params={"eps": 1})]}, "unknown parameters ['eps']"),
        ({"outputs": {"y": "B E"}}, "unknown dimensions ['E']"),
        ({"outputs": {"y": "B 2*E"}}, "unknown dimensions ['E']"),
        ({"outputs": {"y": Tensor("B", shape_by=lambda params: "B K")}}, "f'N {params[\"k\"]}'"),
        ({"outputs": {}}, "declare outputs, or inputs with mutated=True"),
        ({"inputs": {"x": Tensor("B D", mutated=True)}}, "and not both"),
        ({"params": {"x": 1}}, "share a name"),
        ({"inputs": {"x": Tensor("B D", dtype=torch.int64, grad=True)}}, "integral"),
        (
            {"inputs": {"x": X, "at": Tensor("B", dtype=torch.int64)}},
            "input 'at' is torch.int64: give it values=, such as integers(high)",
        ),
        ({"inputs": {"x": X, "on": Tensor("B", dtype=torch.bool)}}, "(2 for booleans)"),
        ({"extremes": {"big": {"z": None}}}, "overrides unknown ['z']"),
        ({"leading": ("D",)}, "leading ('D',): they are not the first of its first input"),
        (
            {"leading": ("B",), "timed": [Case(B=(2, 3), D=4)]},
            "timed case B2x3D4: give each leading dimension one size",
        ),
        ({"layouts": {"expanded": 2.0}}, "layouts of 'expanded': 2.0: give strided or transposed"),
        ({"layouts": {"strided": 1.0}}, "layouts of 'strided': 1.0: give strided or transposed"),
        ({"layouts": {"strided": float("nan")}}, "a number above 1"),
        ({"layouts": {"strided": "twice"}}, "a number above 1"),
        ({"outputs": {"y": Tensor("B D", dtype_of=lambda x: x.dtype)}}, "is for what is saved"),
    ],
)
def test_a_contradiction_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(DeclarationError, match=r"op '[Tt]oy'") as caught:
        declare(**changes)
    assert message in str(caught.value)


def test_a_provider_is_registered_once_and_with_the_declared_arguments() -> None:
    op = declare(params={"eps": 1.0})
    op.reference(lambda x, eps: x * eps)
    with pytest.raises(DeclarationError, match="registered twice"):
        op.provider("eager")(lambda x, eps: x)
    for wrong in (lambda eps, x: x, lambda x: x, lambda y, eps: y):
        with pytest.raises(DeclarationError, match=r"declared are \(x, eps\)"):
            op.provider("other")(wrong)
    op.provider("other")(lambda x_BD, eps: x_BD)


class Inputs(NamedTuple):
    x: torch.Tensor
    gain: torch.Tensor


class Swapped(NamedTuple):
    gain: torch.Tensor
    x: torch.Tensor


def affine(given: Inputs, factor: float, bias: float) -> torch.Tensor:
    return given.x * given.gain * factor + bias


def declare_affine() -> Op:
    inputs = {"x": X, "gain": Tensor("D", grad=True)}
    op = declare(inputs=inputs, params={"factor": 1.0, "bias": 0.5})
    op.reference(lambda x, gain, factor=1.0, bias=0.5: x * gain * factor + bias)
    return op


@pytest.mark.long
def test_an_implementation_may_take_its_inputs_together() -> None:
    op = declare_affine()
    op.provider("together")(affine)
    op.independent("elsewhere")(affine)

    @op.provider("derived", keep=("x", "gain"))
    class Derived:
        @staticmethod
        def forward(given: Inputs, factor: float, bias: float) -> torch.Tensor:
            return affine(given, factor, bias)

        @staticmethod
        def backward(
            grads: Grads, kept: Named, saved: Named, needs: Needs, factor: float, bias: float
        ) -> Named:
            dy = grads[0] * factor
            return {"x": dy * kept["gain"], "gain": (dy * kept["x"]).sum(0)}

    x, gain = torch.randn(2, 3), torch.randn(3)
    choices: list[dict[str, Any]] = [{}, {"bias": 2.0}, {"factor": 3.0, "bias": -1.0}]
    for params in choices:
        expected = op(x, gain, **params)
        for provider in ("together", "derived"):
            assert torch.equal(op(x, gain, provider=provider, **params), expected)
        assert torch.equal(op.independents["elsewhere"](x, gain, **params), expected)
    for case in op_cases([op], providers=["together", "derived"]):
        assert all(comparison.passed for comparison in case.compare()), str(case)


def swapped(given: Swapped, factor: float, bias: float) -> torch.Tensor:
    return affine(Inputs(given.x, given.gain), factor, bias)


def parameters_swapped(given: Inputs, bias: float, factor: float) -> torch.Tensor:
    return affine(given, factor, bias)


def missing(given: Inputs, factor: float) -> torch.Tensor:
    return affine(given, factor, 0.0)


def last(factor: float, bias: float, given: Inputs) -> torch.Tensor:
    return affine(given, factor, bias)


@pytest.mark.parametrize("wrong", [swapped, parameters_swapped, missing, last])
def test_what_is_taken_together_has_the_declared_names_in_their_order(wrong: Any) -> None:
    op = declare_affine()
    message = r"declared are \(x, gain, factor, bias\)"
    with pytest.raises(DeclarationError, match=message):
        op.provider("other")(wrong)
    with pytest.raises(DeclarationError, match=message):
        op.independent("elsewhere")(wrong)
    with pytest.raises(DeclarationError, match=message):
        op.provider("other")(type("Wrong", (), {"forward": wrong, "backward": affine}))
    assert list(op.providers) == ["eager"]
    assert not op.independents


@pytest.mark.parametrize("annotation", ["Nowhere", "torch.Nowhere", "B D", "1[0]"])
def test_an_annotation_may_be_a_string_that_names_no_type(annotation: str) -> None:
    def twice(x: Any) -> torch.Tensor:
        return 2 * x

    twice.__annotations__["x"] = annotation
    op = declare()
    op.reference(twice)
    assert op["eager"].call is twice


def test_registry_refuses_duplicates_and_incomplete_ops() -> None:
    registry = Registry()
    op = declare()
    with pytest.raises(DeclarationError, match="has no reference"):
        registry.add(op, "here")
    op.reference(lambda x: x)
    registry.add(op, "here")
    with pytest.raises(DeclarationError, match=r"from there is declared in here already"):
        registry.add(op, "there")
    with pytest.raises(KeyError, match="use one of toy"):
        registry["tay"]


FILE = """
from tinyllama.harness.declare import registry as registry_file
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


@pytest.mark.long
def test_a_file_is_all_that_a_new_op_takes(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(FILE)
    registry = Registry()
    load_file(tmp_path / "double.py", registry)
    assert list(registry) == ["double"]
    cases = list(op_cases(registry.values()))
    assert {case.provider.name for case in cases} == {"eager", "added"}
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert {case.upstream for case in cases} == {*UPSTREAMS, "broadcast", FAINT}
    assert all(comparison.passed for case in cases for comparison in case.compare())


KERNEL = """
import triton
import triton.language as tl
from tinyllama.harness.kernels import jit

@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    tl.store(y + at, a + a, mask=at < n)
"""
LAUNCHED = """
import torch
from their_kernels import add

@double.provider("launched", requires=("triton",))
class Launched:
    @staticmethod
    def forward(x):
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        add[(-(-x.numel() // 16),)](x, y, x.numel(), BLOCK=16)
        return y

    @staticmethod
    def backward(grads, kept, saved, needs):
        return {"x": 2 * grads[0]}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "kernel",
    [KERNEL, KERNEL.replace("@triton.jit", "@jit"), KERNEL.replace("@triton.jit", "@triton.jit()")],
    ids=["triton.jit", "jit", "triton.jit()"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["in the op's file", "in a file of its own"])
def test_a_kernel_of_a_package_runs_on_a_cpu_under_either_jit(
    kernel: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    plain = triton.jit
    package = f"package{len(kernel)}{apart}"
    text = FILE + LAUNCHED.replace("their_kernels", f"{package}.their_kernels")
    if not apart:
        text = FILE + kernel + LAUNCHED.replace("from their_kernels import add", "")
    (tmp_path / package).mkdir()
    for name, content in {"__init__": "", "double": text, "their_kernels": kernel}.items():
        (tmp_path / package / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    registry = registry_file.discover(package, plugins=False)
    assert triton.jit is plain, "what is imported later keeps triton's own"
    cases = [case for case in op_cases(registry.values()) if case.provider.name == "launched"]
    assert cases
    assert all(comparison.passed for case in cases for comparison in case.compare())


def test_a_missing_or_broken_file_leaves_nothing_registered(tmp_path: Path) -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="no file"):
        load_file(tmp_path / "none.py", registry)
    (tmp_path / "broken.py").write_text(FILE.replace("cases=[Case(B=2, D=3)]", "cases=[]"))
    with pytest.raises(DeclarationError, match="at least one case"):
        load_file(tmp_path / "broken.py", registry)
    assert len(registry) == 0


PROVIDER = """
from tinyllama.ops.rms_norm import rms_norm

@rms_norm.provider("theirs", dtypes=())
def theirs(x, weight, eps=1e-5):
    return x * weight
"""


@pytest.mark.long
@pytest.mark.slow("it collects the suite in a process of its own")
def test_ops_of_a_file_join_the_suite(tmp_path: Path) -> None:
    """Their references and providers are tested; a provider on an op of the tree is, too."""
    (tmp_path / "double.py").write_text(FILE + PROVIDER.replace(", dtypes=()", ""))
    tests = [f"correctness_tests/ops/{name}.py" for name in ("test_ops", "test_references")]
    options = ("--collect-only", "-q", "--ops", str(tmp_path / "double.py"))
    found = python("-m", "pytest", *(str(ROOT / test) for test in tests), *options)
    assert "test_is_as_accurate_as_eager[double-added-B2D3-fp32" in found.stdout
    assert "test_is_as_accurate_as_eager[rms_norm-theirs-" in found.stdout
    assert "test_every_reference_is_checked[double]" in found.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace('Op("double"', 'Op("rms_norm"'), "is declared in tinyllama.ops.rms_norm"),
        (FILE.replace("cases=[Case(B=2, D=3)]", "cases=[]"), "declare at least one case"),
        (PROVIDER.replace("theirs", "torch"), "provider 'torch' is registered twice"),
        (PROVIDER + FILE.replace("cases=[Case(B=2, D=3)]", "cases=[]"), "declare at least one"),
    ],
)
def test_a_file_that_cannot_join_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wrong.py").write_text(text)
    before = {name: dict(op.providers) for name, op in OPS.items()}
    with pytest.raises(DeclarationError, match=message):
        load_file(tmp_path / "wrong.py", OPS)
    assert {name: op.providers for name, op in OPS.items()} == before


def test_a_plugin_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares ops names a module in the group ``tinyllama.ops``."""
    plugin = ModuleType("their_ops")
    plugin.__spec__ = ModuleSpec("their_ops", None)
    exec(FILE, vars(plugin))
    monkeypatch.setitem(sys.modules, "their_ops", plugin)
    point = EntryPoint("theirs", "their_ops", registry_file.ENTRY_POINTS)
    monkeypatch.setattr(registry_file, "entry_points", lambda group: [point])
    assert "double" in registry_file.discover("tinyllama.ops")
    assert "double" not in registry_file.discover("tinyllama.ops", plugins=False)
    monkeypatch.setattr(plugin.__spec__, "_initializing", True, raising=False)
    with pytest.raises(DeclarationError, match="still being imported"):
        registry_file.discover("tinyllama.ops")


def test_leading_dimensions_may_be_any_number_of_axes() -> None:
    two = {"x": X, "other": Tensor("B D"), "weight": Tensor("D")}
    op = declare(inputs=two, leading=("B",), instead="a bias is added to y")
    op.reference(lambda x, other, weight: x + other * weight)
    weight = torch.ones(4)
    for shape in [(4,), (3, 4), (2, 3, 4), (1, 2, 0, 3, 4)]:
        assert op(torch.ones(shape), torch.ones(shape), weight).shape == shape
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"other has B = 3, other inputs have B = \(2, 3\)"):
        op(x, x[0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \(1, 4\), expected \(D\)"):
        op(x, x, weight[None])
    with pytest.raises(ValueError, match=r"x has shape \(\), expected \(B D\)"):
        op(x[0, 0, 0], x, weight)


def test_a_rule_is_given_each_leading_dimension_as_a_number() -> None:
    """Whatever the axes of a case or of a call are; other dimensions may be several tensors'."""
    asked: list[Any] = []

    def rule(sizes: Any) -> str | None:
        asked.append((sizes["B"], sizes["D"]))
        return "too many" if sizes["B"] > 6 else None

    sizes: list[Any] = [2, (2, 3), (), (1,)]
    cases = [Case(B=size, D=3) for size in sizes]
    op = declare(cases=cases, leading=("B",), fits=rule)
    op.reference(lambda x: x)
    op.provider("small", supports=rule)(lambda x: x)
    found = [one.unsupported() for one in op_cases([op]) if one.provider.name == "small"]
    assert set(found) == {None}
    assert set(asked) == {(2, 3), (6, 3), (1, 3)}
    more = OpCase(op, op["small"], Case(B=(2, 4), D=3), torch.float32)
    assert more.unsupported() == "too many"
    asked.clear()
    for shape in [(2, 3), (2, 3, 3), (3,), (1, 1, 3)]:
        op(torch.ones(shape))
    assert asked == [(2, 3), (6, 3), (1, 3), (1, 3)]
    with pytest.raises(ValueError, match="toy: too many"):
        op(torch.ones(2, 4, 3))
    assert op.numbers({"D": (1, 2)}) == {"D": (1, 2)}


def test_what_an_op_does_not_take_has_something_instead() -> None:
    op = declare(params={"eps": 1.0}, instead="a bias is added to y")
    op.reference(lambda x, eps: x)
    x = torch.ones(2, 3)
    wrong: list[tuple[Any, Any]] = [((x, x), {}), ((x,), {"bias": x}), ((None,), {})]
    for args, params in wrong:
        with pytest.raises(ValueError, match=r"toy.* \(a bias is added to y\)$"):
            op(*args, **params)
