"""Plans of `stack`: which products are kernels of ours, and which the vendor's BLAS."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import (
    EPS,
    forced,
    gradients,
    inputs,
    plans_forgotten,  # noqa: F401 (a fixture)
    turn_fixture,  # noqa: F401 (a fixture)
)
from tinyllama.cli import main
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.kernels.configs import Config
from tinyllama.model.config import ConfigError
from tinyllama.model.tiers import V4
from tinyllama.ops.stack import Inputs, configs, provider_of, stack
from tinyllama.ops.stack.configs import PRODUCTS
from tinyllama.suites.accuracy import assert_accurate

MIX = "out+down+attention_gradient"  # the one that was measured to win for many rows
PLANS = [
    *("all", "none", MIX, "qkv+mlp_gradient", "gate_up+hidden_gradient"),
    *(f"{left_out} left out" for left_out in PRODUCTS),
]


def plan_of(name: str) -> str:
    return (
        "+".join(product for product in PRODUCTS if f"{product} left" not in name)
        if "left" in name
        else name
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.bfloat16, torch.float32)[i % 2]) for i, name in enumerate(PLANS)],
)
def test_every_plan_is_as_accurate_as_eager(
    name: str, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Three blocks, so that one hands its norm to a block and takes that of another."""
    provider = stack[provider_of(plan_of(name))]
    case = next(case for case in stack.cases if case.dims["L"] == 3)
    assert_accurate(OpCase(stack, provider, case, dtype), device, seed)


def vendors(tensors: Inputs, *names: str) -> AbstractContextManager[None]:
    """These products are the vendor's by their tables."""
    vendor = Config(BM=0, BN=0, BK=0, GROUP=8, DESCRIBED=0)
    return forced(lambda: gradients(tensors), {f"stack.{name}": vendor for name in names}.get)


@pytest.mark.long
def test_by_the_table_or_by_name_it_is_the_same_plan(device: torch.device) -> None:
    tensors = inputs(9, 2, 1, 32, device)
    with vendors(tensors, *(name for name in PRODUCTS if name not in MIX.split("+"))):
        by_table = gradients(tensors)
    by_name = gradients(tensors, provider_of(MIX))
    assert all(map(torch.equal, by_table, by_name))
    assert not all(map(torch.equal, by_table, gradients(tensors)))


def test_a_compiled_call_saves_what_is_declared(
    device: torch.device, turn: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither transposes nor one h for all blocks: the compiler reads memory by declared shapes."""
    monkeypatch.setattr(configs, "MOST_KEPT", 0)
    turn(2)
    tensors = [t.float() if t.is_floating_point() else t for t in inputs(16, 2, 1, 64, device)]
    custom = stack[provider_of("none")].derived
    assert custom is not None
    run: Any = custom.custom_op
    actual, fakes = run(*tensors, EPS), custom.fake_forward(*tensors, EPS)
    for name, tensor, fake in zip(("y", *custom.saved), actual, fakes, strict=True):
        assert (tensor.shape, tensor.stride()) == (fake.shape, fake.stride()), name


# -- names ----------------------------------------------------------------------------------------


def test_a_plan_is_one_provider_however_it_is_written() -> None:
    assert provider_of("fused") == "fused"
    assert provider_of("down+out") == provider_of("out+down") == "out_and_down"
    assert stack[provider_of("down+out")] is stack["out_and_down"]
    assert V4.with_plan("down+out").table["stack"] == "out_and_down"
    with pytest.raises(ValueError, match=r"plan 'out\+dwon' .* of qkv, .* \(not 'dwon'\)"):
        provider_of("out+dwon")
    with pytest.raises(ConfigError, match="plan '' does not exist"):
        V4.with_plan("")


# -- printed --------------------------------------------------------------------------------------

SIZES = "L=1,B=2,T=16,D=64,Q=64,R=32,F=64,C=16"


def test_the_plan_of_a_chip_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """For the timed case of the table, and for sizes that it does not have."""
    how = ["tune", "--show", "--op", "stack", "--dtype", "bf16", "--chip", "sm_90"]
    assert main(how) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split(",")[0].strip() for line in lines if "(table)" in line}
    assert {f"stack.{name}" for name in PRODUCTS} <= listed
    assert main([*how, "--sizes", SIZES]) == 0
    output = capsys.readouterr().out
    assert f"stack-fused-{SIZES.replace('=', '').replace(',', '')}-bf16, sm_90" in output
    assert "stack.qkv, columns=128,inner=64,kind=16bit,rows=32: " in output
    assert "(default)" in output
    for precision, kind in (("ieee", "tf32x3"), ("tf32", "tf32")):
        of_kind = [*how[:5], "fp32", *how[6:], "--sizes", SIZES, "--precision", precision]
        assert main(of_kind) == 0
        assert f"stack.qkv, columns=128,inner=64,kind={kind},rows=32: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--sizes", "L=1"], "--sizes are those of one op"),
        (["--op", "stack", "--sizes", "L=1"], "--sizes of stack are B, C, D, F, L, Q, R, T"),
        (["--show", "--chip", "sm_1"], "--chip"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_tune_cannot_show_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *wrong]) == 2
    assert said in capsys.readouterr().err
