"""`kernel_cases`: boundary sizes, dtypes and layouts for the test of any repository."""

import pytest
import torch

from tinyllama.harness.machine.errors import UsageError
from tinyllama.testing import KernelCase, kernel_cases

pytest_plugins = ["pytester"]


def cases_of(shapes: str, **options: object) -> list[KernelCase]:
    @kernel_cases(shapes, **options)  # type: ignore[arg-type]
    def test(case: KernelCase) -> None: ...

    (mark,) = test.pytestmark
    return [param.values[0] for param in mark.args[1]]


@kernel_cases("x: N D, w: D, index: N int<V, mask: N D bool, bias: D fp32")
def test_tensors_are_as_the_shapes_say(case: KernelCase) -> None:
    x, w, index, mask, bias = case.tensors
    size = case.shape
    assert x.shape == mask.shape == (size["N"], size["D"])
    assert w.shape == bias.shape == (size["D"],)
    assert x.dtype == w.dtype == case.dtype
    assert (index.dtype, mask.dtype, bias.dtype) == (torch.int64, torch.bool, torch.float32)
    assert 0 <= int(index.min()) <= int(index.max()) < size["V"]
    again = case.tensors
    assert torch.equal(x, again[0])
    assert x.stride() == again[0].stride()


def test_lengths_are_next_to_powers_of_two_in_each_dtype_and_layout() -> None:
    cases = cases_of("N D")
    lengths = {case.shape["D"] for case in cases}
    assert {1, 2, 3, 48, 67, 128, 1027} <= lengths
    assert {case.dtype for case in cases} == {torch.float32, torch.bfloat16, torch.float16}
    assert any(not case.tensors[0].is_contiguous() for case in cases)
    assert max(case.tensors[0].numel() for case in cases) < 2**17
    assert {case.dtype for case in cases_of("N", dtypes=[torch.float16])} == {torch.float16}


def test_a_session_shows_each_case_by_its_sizes(pytester: pytest.Pytester) -> None:
    """In a repository that has no plugin of this one, nor an option."""
    pytester.makepyfile(
        "from tinyllama.testing import kernel_cases\n\n"
        '@kernel_cases("N D")\n'
        "def test_double(case):\n"
        "    (x,) = case.tensors\n"
        "    assert x.shape[0] != 128 or x.is_contiguous()\n"
    )
    session = pytester.runpytest_inprocess("-p", "no:tinyllama.suites.entry", "-v")
    session.stdout.fnmatch_lines_random(
        ["*test_double?N128-D67-bf16? PASSED*", "*test_double?N128-D67-*-strided? FAILED*"]
    )


@pytest.mark.parametrize("options", [{"dtypes": []}, {"dtypes": [torch.int8]}])
def test_dtypes_that_are_no_floats_are_refused(options: dict[str, list[torch.dtype]]) -> None:
    with pytest.raises(UsageError, match="dtypes"):
        cases_of("N D", **options)
