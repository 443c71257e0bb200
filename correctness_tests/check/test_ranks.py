"""What a fault is called, and the exit status that follows."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import variants
from correctness_tests.support.checked_files import checked, of_rope

pytestmark = pytest.mark.usefixtures("forked")
VARIANTS = {str(variant): variant for variant in variants()}
WARNING = "product_with_backward-gradients_detached", "second derivative", "warning"
REFUSED = "entry_product-asserts_contiguous_inputs", "input layouts", "refused"
UNSAFE = "entry_product-upstream_gradient_scaled_in_place", "untouched inputs", "unsafe"
WRONG = "entry_product-gradients_zero", "gradients", "wrong result"
DECLARED = "entry_product-plain_case_refused", "outputs", "refused"
NOT_TRIED = "doubled_vector-atomic_on_bfloat16", "outputs", ""


@pytest.mark.parametrize(
    ("fault", "options", "status"),
    [
        (WARNING, ["--fail-on", "refused"], 0),
        (WARNING, ["--fail-on", "warning"], 1),
        (REFUSED, [], 0),
        (REFUSED, ["--fail-on", "refused"], 1),
        (UNSAFE, [], 1),
        (WRONG, [], 1),
        (DECLARED, [], 1),
        (NOT_TRIED, [], 1),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(value),
)
def test_the_exit_status_follows_the_rank(
    fault: tuple[str, str, str],
    options: list[str],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, check, rank = fault
    path = str(VARIANTS[name].write(tmp_path))
    ended, found = checked(tmp_path, path, f"--only={check}", *options)
    judged = next(name for name in found if not name.endswith("-eager"))
    assert (ended, found[judged][check]["rank"]) == (status, rank)
    if rank:
        assert f"{judged}: {rank}: {check}" in capsys.readouterr().out


def test_a_check_that_is_blocked_is_counted_and_is_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(VARIANTS["doubled_vector-atomic_on_bfloat16_in_larger_cases"].write(tmp_path))
    status, _ = checked(tmp_path, path, "--provider=triton", "--only=outputs,races")
    assert status == 0
    assert "corpus_doubled_vector-triton: not tried: " in capsys.readouterr().out


def test_an_error_of_the_harness_is_blamed_on_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (
        "from tinyllama.harness.check import programs\n"
        "    programs.RaceDetector.close = None"  # as a part of the check that fails
    )
    _, found = of_rope(tmp_path, broken, "--only", "outputs,races", traits=', requires=("triton",)')
    assert found["races"]["outcome"] == "blocked"
    assert "the check itself raised an error" in found["races"]["message"]
