"""``tinyllama check`` by its own candidate: what it patches decides nothing about its values."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.support.checked_files import checked
from tinyllama.harness.check.names import APART

pytestmark = pytest.mark.usefixtures("forked")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
RIGHT = """
import torch

def mine(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""
SLICE = RIGHT.replace("return ", "y = ") + "    return torch.cat([x[:1], y])[1:]\n"
WRONG = RIGHT.replace("return ", "return 1.05 * ")
RUNNER = """
from tinyllama.harness.check import process
from tinyllama.harness.check.run import Finding, Outcome
process.Checks.findings = lambda self, provider, only, *rest: [
    Finding(name, Outcome.PASSED) for name in only
]
"""
APART_PATCHED = "from tinyllama.harness.check import independent_judge\nindependent_judge."
# What a candidate replaces beside the runner of checks, and what is then said of its values.
PATCHES = {
    "the norm": ("torch.Tensor.norm = lambda self, *a, **k: torch.zeros(())\n", "y: at ["),
    "the reference": (
        "from tinyllama.ops.rms_norm import rms_norm\n"
        "object.__setattr__(rms_norm['eager'], 'call', lambda x, w, eps: mine(x, w, eps))\n",
        "y: at [",
    ),
    "its answers": (
        f"{APART_PATCHED}answer = (\n"
        "    lambda candidate, number, seed, file: independent_judge.save_file({}, file))\n",
        "y is missing",
    ),
    "an error": (f"{APART_PATCHED}answer = None\n", "TypeError"),
}


def judged(tmp_path: Path, text: str, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status and the findings by check."""
    path = tmp_path / "candidate.py"
    path.write_text(text)
    options = ("--op=rms_norm", f"--candidate={path}:mine", f"--only=outputs,gradients,{APART}")
    status, findings = checked(tmp_path, *options, *words)
    return status, findings["rms_norm-candidate"]


@pytest.mark.long
@pytest.mark.parametrize("text", [RIGHT, SLICE], ids=["dense", "slice_of_a_buffer"])
def test_right_values_pass_wherever_they_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    status, findings = judged(tmp_path, text, "--verbose")
    assert (status, findings[APART]["outcome"]) == (0, "passed")
    out = " ".join(capsys.readouterr().out.split())
    assert "undefended, since the candidate ran in the same process: all but 'judged apart'" in out


@pytest.mark.parametrize("what", PATCHES)
def test_a_candidate_that_replaces_its_judge_is_judged_by_another(
    tmp_path: Path, what: str
) -> None:
    patch, message = PATCHES[what]
    status, findings = judged(tmp_path, WRONG + RUNNER + patch)
    assert status == 1
    assert findings["outputs"]["outcome"] == "passed", "its own process says so"
    assert findings[APART]["outcome"] in ("failed", "crashed")
    assert message in findings[APART]["message"]


def test_a_file_that_declares_its_own_op_cannot_be_judged_apart(tmp_path: Path) -> None:
    example = str(EXAMPLES / "softmax.py")
    status, findings = checked(tmp_path, example, "--provider=eager", f"--only=outputs,{APART}")
    finding = findings["softmax-eager"][APART]
    assert (status, finding["outcome"]) == (0, "unsupported")
    assert "its process alone knows the reference" in finding["message"]
