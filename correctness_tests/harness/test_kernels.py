"""The door to Triton: where a launch goes, what is recorded, and what is said without triton."""

from pathlib import Path

import pytest
import torch

from correctness_tests.support.commands import python
from correctness_tests.support.launched import every_launch
from tinyllama.harness.kernels import launch as kernels
from tinyllama.harness.kernels.chips import chip_of, dot_precisions
from tinyllama.harness.kernels.launch import cdiv, jit, recorded, tl
from tinyllama.harness.kernels.precision import input_precision
from tinyllama.harness.kernels.resources import CHIPS, lacking
from tinyllama.harness.measure.launches import kind_of
from tinyllama.model.tiers import V3, V4

needs_triton = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed")
CPU = torch.device("cpu")


@jit
def counted(y, n, BLOCK: tl.constexpr = 16, STEP: tl.constexpr = 2):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, STEP * at.to(tl.float32), mask=at < n)


# -- where a launch goes ----------------------------------------------------------------------


@needs_triton
def test_on_the_meta_device_a_launch_is_an_error_that_names_the_kernel() -> None:
    with pytest.raises(RuntimeError, match="counted cannot run on meta tensors"):
        counted[(4,)](torch.empty(50, device="meta"), 50)


@needs_triton
def test_a_grid_may_be_a_function_of_the_arguments() -> None:
    y = torch.zeros(50)
    grid = lambda names: (cdiv(names["n"], names["BLOCK"]),)  # noqa: E731 (as kernels write it)
    with recorded("sm_90") as launches:
        assert chip_of(CPU) == "sm_90"
        counted[grid](y, n=50)
    assert (launches[0].grid, chip_of(CPU)) == ((4,), "")
    assert launches[0].arguments == {"y": y, "n": 50, "BLOCK": 16, "STEP": 2}
    counted[grid](y, 50, BLOCK=32)
    assert torch.equal(y, 2 * torch.arange(50.0))


# -- chips ------------------------------------------------------------------------------------


@needs_triton
def test_tf32_is_asked_for_only_where_allowed_and_where_the_chip_has_it() -> None:
    fp32, bf16 = torch.empty(1, device="meta"), torch.empty(1, device="meta").bfloat16()
    before = torch.get_float32_matmul_precision()
    chips = [chip for chip in CHIPS if not lacking(chip)]
    precisions = {}
    try:
        for allowed in ("highest", "high"):
            torch.set_float32_matmul_precision(allowed)
            for chip in ("", *chips):
                with recorded(chip):
                    precisions[allowed, chip] = input_precision(fp32)
                    assert input_precision(bf16) == "ieee"
            assert input_precision(torch.empty(1)) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    tf32 = {key for key, value in precisions.items() if value == "tf32"}
    thrice = {key for key, value in precisions.items() if value == "tf32x3"}
    nvidia = {chip for chip in chips if chip.startswith("sm_")}
    assert thrice == {("highest", chip) for chip in nvidia}
    assert tf32 == {("high", chip) for chip in nvidia | ({"gfx942"} & set(chips))}
    assert all("ieee" in dot_precisions(chip) for chip in chips)


# -- without triton ---------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["triton"] = None  # to Python, it is not installed
import torch
from tinyllama.harness.kernels import HAS_TRITON, jit, tl
from tinyllama.ops import OPS
assert not HAS_TRITON
print(OPS["rms_norm"](torch.ones(1, 2, 4), torch.ones(4), provider="torch").sum().item())
LOG2E = tl.constexpr(1.4426950408889634)

@jit
def kernel(x, BLOCK: tl.constexpr):
    tl.store(x, 0)

try:
    kernel[(1,)](None, BLOCK=1)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_without_triton_stock_providers_run_and_a_launch_says_what_to_install(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"  # a file: kernels are read from one
    script.write_text(WITHOUT, encoding="utf-8")
    run = python(str(script))
    assert run.returncode == 0, run.stderr
    total, said = run.stdout.splitlines()
    assert abs(float(total) - 8) < 1e-3
    assert said == "kernel needs triton: pip install 'tinyllama-harness[triton]'"


# -- names ------------------------------------------------------------------------------------


@pytest.mark.long
@needs_triton
def test_a_profile_tells_the_kernels_of_the_tree_apart() -> None:
    """By file and function, and each counts among products, attention, and so on."""
    names = {launch.identity: launch.kernel.repr(None) for launch in every_launch()}
    assert names["attention.backward_kernel"] == "attention_backward"
    assert names["transpose.transpose_kernel"] == "transpose"
    assert len(set(names.values())) == len(names)
    for tier in (V3, V4):
        in_tier = {launch.kernel.repr(None) for launch in every_launch(tier.table)}
        assert {name for name in in_tier if kind_of(name) == "other"} == set()
    kinds = {name: kind_of(name) for name in names.values()}
    assert kinds["stack_norm_gradient"] == "products"  # the product is in a function that it calls
    assert kinds["stack_fold"] == kinds["rms_norm_forward"] == "elementwise"
    assert kinds["attention_forward"] == "attention"
