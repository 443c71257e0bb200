"""``tinyllama check`` by its own candidate: what it patches decides nothing about its values."""

import json
from pathlib import Path

import pytest

from tinyllama.cli import main
from tinyllama.harness.check.remote import APART

pytestmark = pytest.mark.usefixtures("forked")
RIGHT = """
import torch

def mine(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""
WRONG = RIGHT.replace("return ", "return 1.05 * ")
RUNNER = """
from tinyllama.harness.check import remote
from tinyllama.harness.check.run import Finding, Outcome
remote.Checks.findings = lambda self, provider, only, *rest: [
    Finding(name, Outcome.PASSED).as_dict() for name in only
]
"""
ANSWERS = "from tinyllama.harness.check import apart\napart.answer = lambda *args: "
# By what it replaces, and what is then said of its values.
PATCHES = {
    "the runner": ("", "y: tensor error"),
    "the norm": ("torch.Tensor.norm = lambda self, *a, **k: torch.zeros(())\n", "y: tensor error"),
    "the rule": (
        "from tinyllama.harness.check import compare\n"
        "compare.Check.passed = compare.Comparison.passed = True\n",
        "y: tensor error",
    ),
    "the reference": (
        "from tinyllama.ops.rms_norm import rms_norm\n"
        "object.__setattr__(rms_norm['eager'], 'call', lambda x, w, eps: mine(x, w, eps))\n",
        "y: tensor error",
    ),
    "its slack": (
        "from tinyllama.harness.check import apart\n"
        "apart.traits = lambda provider, cases: apart.Traits(\n"
        "    {'fp32': 1e9, 'bf16': 1e9, 'fp16': 1e9}, {}, (None,) * len(cases))\n",
        "a slack of 1000000000.0: state at most 100",
    ),
    "its answers": (ANSWERS + "{}\n", "y is missing; grad x is missing; grad weight is missing"),
    "what it covers": (
        "from tinyllama.harness.check import apart\n"
        "apart.traits = lambda provider, cases: apart.Traits({}, {}, ('no',) * len(cases))\n",
        "it covers none of the cases",
    ),
    "what it gives": (
        ANSWERS + "{'y': apart.Stored(1, 'torch.int8', (10**9,), (1,), 0)}\n",
        "y is ('torch.int8', (1000000000,)), not",
    ),
}


def checked(tmp_path: Path, text: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    path, out = tmp_path / "candidate.py", tmp_path / "found.json"
    path.write_text(text)
    asked = ["check", "--op=rms_norm", f"--candidate={path}:mine", "--device=cpu", *options]
    status = main([*asked, f"--only=outputs,gradients,{APART}", f"--json={out}"])
    (findings,) = json.loads(out.read_text()).values()
    return status, {finding["check"]: finding for finding in findings}


@pytest.mark.long
def test_right_values_pass_and_the_rest_is_called_undefended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, findings = checked(tmp_path, RIGHT)
    assert status == 0
    assert findings[APART]["outcome"] == "passed"
    assert "37 of 37 cases, inputs from a secret seed" in findings[APART]["message"]
    out = " ".join(capsys.readouterr().out.split())
    assert "undefended, since the candidate ran in the same process: all but 'judged apart'" in out


@pytest.mark.parametrize("what", PATCHES)
def test_a_candidate_that_replaces_its_judge_is_judged_by_another(
    tmp_path: Path, what: str
) -> None:
    patch, message = PATCHES[what]
    status, findings = checked(tmp_path, WRONG + RUNNER + patch)
    assert status == 1
    assert findings["outputs"]["outcome"] == "passed", "its own process says so"
    assert findings[APART]["outcome"] == "failed"
    assert message in findings[APART]["message"]


def test_an_answer_that_a_candidate_sends_ahead_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be taken for that of the next question."""
    ahead = (
        "import gc\nfrom multiprocessing.connection import Connection\n"
        "for each in [each for each in gc.get_objects() if type(each) is Connection]:\n"
        """    each.closed or each.send_bytes(b'["ok", null, "", []]')\n"""
    )
    path, out = tmp_path / "candidate.py", tmp_path / "found.json"
    path.write_text(WRONG + RUNNER + ahead)
    asked = ["check", "--op=rms_norm", f"--candidate={path}:mine", "--device=cpu"]
    assert main([*asked, f"--only=outputs,{APART}", f"--json={out}"]) == 2
    assert "cannot be read: it is to no question" in capsys.readouterr().err
    assert not out.exists()


def test_what_ends_the_process_crashed(tmp_path: Path) -> None:
    status, findings = checked(tmp_path, RIGHT + "import os\n" + ANSWERS + "os._exit(0)\n")
    assert (status, findings[APART]["outcome"]) == (1, "crashed")
    assert findings[APART]["case"].startswith("rms_norm-candidate-")


def test_a_file_that_declares_its_own_op_cannot_be_judged_apart(tmp_path: Path) -> None:
    example, out = Path(__file__).parents[2] / "docs/examples/softmax.py", tmp_path / "out.json"
    asked = ["check", str(example), "--provider=eager", "--device=cpu", f"--only=outputs,{APART}"]
    assert main([*asked, f"--json={out}"]) == 0
    _, finding = json.loads(out.read_text())["softmax-eager"]
    assert finding["outcome"] == "unsupported"
    assert "its process alone knows the reference" in finding["message"]
