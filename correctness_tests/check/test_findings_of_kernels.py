"""What findings say of kernels: the line, the kernel, the argument, and what was not tried."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import FOLDER, Loaded, Variant, findings, variants_of
from tinyllama.harness.check import remote
from tinyllama.harness.check.names import LAUNCHED
from tinyllama.harness.check.remote import Request
from tinyllama.harness.check.run import Finding, Outcome, Rank


def variant_of(file: str, name: str) -> Variant:
    return next(v for v in variants_of(FOLDER / f"{file}.py") if v.name == name)


def finding(folder: Path, file: str, name: str, *checks: str) -> dict[str, Finding]:
    """What checks find in a variant of the corpus, by check."""
    with Loaded(variant_of(file, name), folder) as candidate:
        return {answer.check: answer for answer in findings(candidate, checks)}


def line_of(folder: Path, text: str) -> str:
    """``FILE:LINE`` of the line of a variant's file that has this text."""
    (path,) = folder.glob("*.py")
    lines = path.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"{path}:{number}"


@pytest.mark.parametrize(
    ("name", "line", "access"),
    [
        ("stores_right_behind", "tl.store(y + N * D,", "right behind the end of y"),
        ("loads_before_the_start", "tl.load(x - 1)", "4 bytes before the start of x"),
        ("swaps_far_behind", "tl.atomic_cas(", "bytes behind the end of extra"),
    ],
)
def test_an_access_out_of_bounds_names_line_kernel_program_and_argument(
    name: str, line: str, access: str, tmp_path: Path
) -> None:
    message = finding(tmp_path, "scaled_rows", name, "out of bounds")["out of bounds"].message
    assert message.startswith(f"{line_of(tmp_path, line)}: scaled_rows_{name}.scale_kernel, ")
    assert ", program (" in message
    assert f"{access}, a buffer of " in message


def test_an_access_out_of_bounds_is_left_out_and_checks_of_results_go_on(tmp_path: Path) -> None:
    answers = finding(tmp_path, "scaled_rows", "stores_far_behind", "out of bounds", "outputs")
    assert answers["out of bounds"].outcome is Outcome.FAILED
    assert answers["outputs"].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("factors_taken_as_dense", "input layouts"),
        ("other_bits_in_each_call", "determinism"),
        ("last_row_unwritten", "unwritten memory"),
        ("blocks_overlap", "races"),
    ],
)
def test_a_fault_names_the_kernel_with_its_line(name: str, check: str, tmp_path: Path) -> None:
    answer = finding(tmp_path, "scaled_rows", name, check)[check]
    assert answer.outcome is Outcome.FAILED, answer
    start = int(line_of(tmp_path, "def scale_kernel(").rpartition(":")[2]) - 1
    kernel = f"scaled_rows_{name}.scale_kernel ({tmp_path}/scaled_rows_{name}.py:{start})"
    assert kernel in answer.message


def test_a_wrong_result_in_another_order_names_the_kernel(tmp_path: Path) -> None:
    name = "second_launch_needs_its_order"
    answer = finding(tmp_path, "column_sums", name, "program order")["program order"]
    assert answer.message.startswith("programs interleaved: y: ")
    assert f"column_sums_{name}.sum_kernel (" in answer.message


def test_launches_that_cannot_be_recorded_are_blocked(tmp_path: Path) -> None:
    """torch has no autocast for the device of tensors without values."""
    answers = finding(tmp_path, "linear_under_autocast", "", "resources")
    assert answers["resources"].outcome is Outcome.BLOCKED


@pytest.mark.long
def test_the_second_process_finds_what_only_interpretation_shows(tmp_path: Path) -> None:
    """On a GPU, for which a CPU by another name stands here; it interprets the kernels, and the
    worse finding of the two processes is told."""
    path = variant_of("scaled_copy", "read_beyond_the_end").write(tmp_path)
    request = Request(str(path), None, "triton", "cpu:0", 0)
    answers = remote.check(request, ["outputs", "out of bounds", LAUNCHED])
    findings = {finding.check: finding for _, finding in answers if finding is not None}
    assert findings["out of bounds"].rank is Rank.UNSAFE
    assert "scaled_copy_kernel, program (0, 0, 0): a load" in findings["out of bounds"].message
