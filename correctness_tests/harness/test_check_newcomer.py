"""What a newcomer's first file is told: code that asks for a GPU, what was not declared, what an op
has none of."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.tried import found, small
from tinyllama.cli import main
from tinyllama.harness import Case, Tensor
from tinyllama.harness.correct.checks import Finding, Outcome, accuracy
from tinyllama.harness.correct.checks.remote import _following
from tinyllama.harness.kernels.launch import jit, tl

PASSED, FAILED, UNSUPPORTED = Outcome.PASSED, Outcome.FAILED, Outcome.UNSUPPORTED
FILE = """
import torch
import triton
import triton.language as tl
from tinyllama.harness import Case, Op, Tensor

DEVICE = triton.runtime.driver.active.get_active_torch_device()
COUNT = triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"]

@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

double = Op("double", inputs={"x": Tensor("N")}, outputs={"y": "N"}, cases=[Case(N=40)])
double.reference(lambda x: x + x)

@double.provider("first", requires=("triton",))
def first(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
    ASSERTED
    grid = lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)
    double_kernel[grid](x.contiguous(), y, len(x), BLOCK=16)
    return y
"""


def checked(tmp_path: Path, asserted: str, *only: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and the findings on the provider by their checks."""
    path, out = tmp_path / "mine.py", tmp_path / "found.json"
    path.write_text(FILE.replace("ASSERTED", asserted))
    asked = ["--device", "cpu", "--only", ",".join(only), "--json", str(out)]
    status = main(["check", str(path), *asked])
    return status, {one["check"]: one for one in json.loads(out.read_text())["double-first"]}


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers itself")
def test_code_that_asks_for_a_gpu_is_checked_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, seen = checked(tmp_path, "", "outputs", "races")
    assert (status, [one["outcome"] for one in seen.values()]) == (0, ["passed", "passed"])
    out = capsys.readouterr().out
    assert "double-eager: the reference passes 1 checks" in out
    assert "│ outputs" in out


@pytest.mark.usefixtures("forked")
def test_an_assertion_without_words_is_told_by_its_line_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, seen = checked(tmp_path, "assert y is None", "outputs", "races", "determinism")
    assert status == 1
    line = f"{tmp_path}/mine.py:21: AssertionError: assert y is None"
    assert {one["message"] for one in seen.values()} == {line}
    assert [one["outcome"] for one in seen.values()] == ["crashed"] * 3
    assert [one["cause"] for one in seen.values()] == ["", "outputs", "outputs"]
    out = capsys.readouterr().out
    assert out.count("assert y is None") == 1
    assert "double-first: wrong result: outputs; what follows: races, determinism" in out


def test_a_cause_is_one_that_was_found() -> None:
    one = Finding("large offsets", FAILED, message="so it is", cause="input layouts")
    layouts = Finding("input layouts", FAILED, message="x is dense")
    assert _following(one, [layouts]).cause == "input layouts"
    assert _following(one, [replace(layouts, outcome=PASSED)]).cause == ""
    assert _following(one, []).cause == ""


# -- what is not declared -------------------------------------------------------------------------

plain = small("plain", lambda x: x + x, {"x": Tensor("N")}, {"y": "N"}, [Case(N=40)])


@jit
def doubled(x, y, BEYOND: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 64)
    tl.store(y + at, tl.load(x + at, mask=at < 40) * 2, mask=at < 40 + BEYOND)


def launching(beyond: int) -> Any:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape)
        doubled[(1,)](x.contiguous(), y, BEYOND=beyond)
        return y

    return call


def test_kernels_that_are_not_declared_are_asked_what_declared_ones_are() -> None:
    assert found(plain, launching(0), "out of bounds")["out of bounds"].outcome is PASSED
    findings = found(plain, launching(1), "out of bounds", "races", "resources", "program order")
    bounds = findings.pop("out of bounds")
    assert bounds.outcome is FAILED
    assert "doubled, program (0, 0, 0): a store of 4 bytes, right behind" in bounds.message
    assert {one.outcome for one in findings.values()} == {PASSED}


def test_what_an_op_has_none_of_is_told_apart_from_what_a_provider_does_not_cover() -> None:
    none = found(plain, launching(0), *accuracy.NONE)
    assert {one.check: one.message for one in none.values()} == accuracy.NONE
    refusing = {"supports": lambda dims: "never"}
    findings = found(plain, launching(0), "outputs", "input layouts", "extreme values", **refusing)
    covers = "the provider covers no such case"
    assert [one.message for one in findings.values()] == [
        covers,
        accuracy.NONE["extreme values"],
        covers,
    ]
