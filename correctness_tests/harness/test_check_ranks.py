"""The rank of a fault decides the exit status of ``tinyllama check``."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.corpus.variants import variants
from tinyllama.cli import main

pytestmark = pytest.mark.usefixtures("forked")
VARIANTS = {str(variant): variant for variant in variants()}
WARNING = "product_with_backward-gradients_detached", "second derivative", "warning"
REFUSED = "entry_product-asserts_contiguous_inputs", "input layouts", "refused"
UNSAFE = "entry_product-upstream_gradient_scaled_in_place", "untouched inputs", "unsafe"
WRONG = "entry_product-gradients_zero", "gradients", "wrong result"


@pytest.mark.parametrize(
    ("fault", "options", "status"),
    [
        (WARNING, [], 0),
        (WARNING, ["--fail-on", "refused"], 0),
        (WARNING, ["--fail-on", "warning"], 1),
        (REFUSED, [], 0),
        (REFUSED, ["--fail-on", "refused"], 1),
        (UNSAFE, [], 1),
        (WRONG, [], 1),
    ],
)
def test_the_exit_status_follows_the_rank(
    fault: tuple[str, str, str],
    options: list[str],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, check, rank = fault
    path, out = VARIANTS[name].write(tmp_path), tmp_path / "found.json"
    asked = ["check", str(path), "--provider=function", "--device=cpu", f"--only={check}"]
    assert main([*asked, f"--json={out}", *options]) == status
    ((finding,),) = json.loads(out.read_text()).values()
    assert finding["rank"] == rank
    assert f"-function: {rank}: {check}" in capsys.readouterr().out


def test_what_was_not_compared_does_not_hold(tmp_path: Path) -> None:
    path = VARIANTS["doubled_vector-atomic_on_bfloat16"].write(tmp_path)
    asked = ["check", str(path), "--provider=triton", "--device=cpu", "--only=outputs"]
    assert main(asked) == 1
