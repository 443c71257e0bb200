"""``tinyllama check`` by its own candidate: what it patches decides nothing about its values."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tinyllama.cli import main
from tinyllama.harness.correct import apart
from tinyllama.harness.correct.checks import Finding, Outcome, remote
from tinyllama.harness.correct.checks.remote import APART
from tinyllama.harness.correct.evaluate import Inputs
from tinyllama.ops import OPS

pytestmark = pytest.mark.usefixtures("forked")
RIGHT = """
import torch

def mine(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""
WRONG = RIGHT.replace("return ", "return 1.05 * ")
RUNNER = """
from tinyllama.harness.correct.checks import Finding, Outcome, remote
remote.Checks.findings = lambda self, provider, only, *rest: [
    Finding(name, Outcome.PASSED).as_dict() for name in only
]
"""
# By what it replaces, and what is then seen of its values.
PATCHES = {
    "the runner": ("", "y: tensor error"),
    "the norm": ("torch.Tensor.norm = lambda self, *a, **k: torch.zeros(())\n", "y: tensor error"),
    "the rule": (
        "from tinyllama.harness.correct import compare\n"
        "compare.Check.passed = compare.Comparison.passed = True\n",
        "y: tensor error",
    ),
    "the reference": (
        "from tinyllama.ops.rms_norm import rms_norm\n"
        "object.__setattr__(rms_norm['eager'], 'call', lambda x, w, eps: mine(x, w, eps))\n",
        "y: tensor error",
    ),
    "its slack": (
        "from tinyllama.harness.correct import apart\n"
        "apart.traits = lambda provider, cases: apart.Traits(\n"
        "    {'fp32': 1e9, 'bf16': 1e9, 'fp16': 1e9}, {}, (None,) * len(cases))\n",
        "a slack of 1000000000.0: state at most 100",
    ),
    "its answers": (
        "from tinyllama.harness.correct import apart\napart.answer = lambda *args: {}\n",
        "y is missing; grad x is missing; grad weight is missing",
    ),
    "what it covers": (
        "from tinyllama.harness.correct import apart\n"
        "apart.traits = lambda provider, cases: apart.Traits({}, {}, ('no',) * len(cases))\n",
        "it covers none of the cases",
    ),
    "what it gives": (
        "from tinyllama.harness.correct import apart\n"
        "apart.answer = lambda *args: {'y': apart.Stored(1, 'torch.int8', (10**9,), (1,), 0)}\n",
        "y is ('torch.int8', (1000000000,)), not",
    ),
}


def checked(tmp_path: Path, text: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    path, out = tmp_path / "candidate.py", tmp_path / "found.json"
    path.write_text(text)
    asked = ["check", "--op=rms_norm", f"--candidate={path}:mine", "--device=cpu", *options]
    status = main([*asked, f"--only=outputs,gradients,{APART}", f"--json={out}"])
    (findings,) = json.loads(out.read_text()).values()
    return status, {one["check"]: one for one in findings}


def test_right_values_pass_and_the_rest_is_called_undefended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = checked(tmp_path, RIGHT)
    assert status == 0
    assert found[APART]["outcome"] == "passed"
    assert "37 of 37 cases, inputs from a secret seed" in found[APART]["message"]
    out = " ".join(capsys.readouterr().out.split())
    assert "undefended, since the candidate ran in the same process: all but 'judged apart'" in out


@pytest.mark.parametrize("what", PATCHES)
def test_a_candidate_that_replaces_its_judge_is_judged_by_another(
    tmp_path: Path, what: str
) -> None:
    patch, seen = PATCHES[what]
    status, found = checked(tmp_path, WRONG + RUNNER + patch)
    assert status == 1
    assert found["outputs"]["outcome"] == "passed", "its own process says so"
    assert found[APART]["outcome"] == "failed"
    assert seen in found[APART]["message"]


def test_an_answer_that_a_candidate_sends_ahead_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be taken for that of the next question."""
    ahead = (
        "import gc\nfrom multiprocessing.connection import Connection\n"
        "for one in [one for one in gc.get_objects() if type(one) is Connection]:\n"
        """    one.closed or one.send_bytes(b'["ok", null, "", []]')\n"""
    )
    path, out = tmp_path / "candidate.py", tmp_path / "found.json"
    path.write_text(WRONG + RUNNER + ahead)
    asked = ["check", "--op=rms_norm", f"--candidate={path}:mine", "--device=cpu"]
    assert main([*asked, f"--only=outputs,{APART}", f"--json={out}"]) == 2
    assert "cannot be read: it is to no question" in capsys.readouterr().err
    assert not out.exists()


def test_what_ends_the_process_crashed(tmp_path: Path) -> None:
    ends = "from tinyllama.harness.correct import apart\nimport os\n"
    status, found = checked(tmp_path, RIGHT + ends + "apart.answer = lambda *args: os._exit(0)\n")
    assert status == 1
    assert found[APART]["outcome"] == "crashed"
    assert found[APART]["case"].startswith("rms_norm-candidate-")


def test_a_file_that_declares_its_own_op_cannot_be_judged_apart(tmp_path: Path) -> None:
    example, out = Path(__file__).parents[2] / "docs/examples/softmax.py", tmp_path / "out.json"
    asked = ["check", str(example), "--provider=eager", "--device=cpu", f"--only=outputs,{APART}"]
    assert main([*asked, f"--json={out}"]) == 0
    _, one = json.loads(out.read_text())["softmax-eager"]
    assert one["outcome"] == "unsupported"
    assert "its process alone knows the reference" in one["message"]


def test_tensors_keep_their_layout_in_files(tmp_path: Path) -> None:
    for number, case in enumerate(apart.cases_of(OPS["rope"])[-2:]):
        (tmp_path / str(number)).mkdir()
        for place, value in enumerate(case.inputs().args.values()):
            stored = apart.store(value, tmp_path / str(number), place)
            read = apart.load(stored, tmp_path / str(number), torch.device("cpu"))
            assert (read.stride(), read.dtype) == (value.stride(), value.dtype)
            assert torch.equal(read, value)


def test_each_process_is_closed_also_where_the_candidate_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder goes with that."""
    started, closed = [], set()

    class Noted(remote.Worker):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(id(self))

        def close(self) -> None:
            closed.add(id(self))
            super().close()

    monkeypatch.setattr(remote, "Worker", Noted)
    ends = "from tinyllama.harness.correct import apart\nimport os\n"
    checked(tmp_path, RIGHT + ends + "apart.answer = lambda *args: os._exit(0)\n")
    assert len(started) > 1
    assert closed == set(started)


def test_memory_is_limited_to_what_is_available_but_a_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    (facts := tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8388608 kB\n")
    monkeypatch.setattr(remote, "Path", lambda name: facts)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (-1, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    remote.limit_memory()
    assert limits == [(8 * 2**30 - remote.RESERVE, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(("device", "limited"), [("cpu", True), ("cuda", False)])
def test_memory_is_limited_where_kernels_run_on_the_cpu(
    device: str, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a GPU reserves more addresses than the machine has memory."""
    limits = Mock()
    monkeypatch.setattr(remote, "limit_memory", limits)
    names = {"file": None, "op": "rms_norm", "provider": "eager"}
    remote.Checks(str(tmp_path / "log"), package="tinyllama.ops", device=device, seed=0, **names)
    assert limits.called == limited


def test_each_tensor_of_inputs_is_replaced_and_nothing_else() -> None:
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    inputs = Inputs(
        args={"x": one, "many": [one, two, three], "deep": {"a": [two], "b": three}, "n": 3},
        upstream={"y": two, "z": None},
        params={"kept": one},
        fresh=[{"x": one}, {"x": two}],
    )
    found = apart._mapped(inputs, lambda tensor: int(tensor[0]))
    assert found.args == {"x": 0, "many": [0, 1, 2], "deep": {"a": [1], "b": 2}, "n": 3}
    assert found.upstream == {"y": 1, "z": None}
    assert found.params["kept"] is one
    assert found.fresh == [{"x": 0}, {"x": 1}]


def judged(
    monkeypatch: pytest.MonkeyPatch,
    declines: list[str | None],
    wrong: str = "",
    missing: str = "",
    before: tuple[Outcome, ...] = (Outcome.PASSED,),
    **asked: Any,
) -> Finding:
    """The finding of a candidate that answers so, whose case of this name is wrong."""
    names = [f"case {number}" for number, _ in enumerate(declines)]
    answers = {"named": ("norm", missing), "traits": SimpleNamespace(declines=declines)}
    checks: Any = object.__new__(remote._Run)
    checks.worker = SimpleNamespace(call=lambda whose, what, provider: answers[what])
    checks.asked = SimpleNamespace(
        **{"op": "norm", "candidate": False, "package": "", "file": None, **asked}
    )

    def found(provider: str, case: str, stated: Any) -> Finding | None:
        return Finding(APART, Outcome.FAILED, case, "wrong") if case == wrong else None

    checks._apart = found
    monkeypatch.setattr(remote, "discover", lambda package, plugins: {"norm": "an op"})
    monkeypatch.setattr(apart, "cases_of", {"an op": names}.__getitem__)
    plain = [Finding("outputs", outcome) for outcome in before]
    made: Finding = checks.judged_apart("mine", False, plain)
    return made


def test_each_case_that_is_not_declined_is_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [None, "no", None, None]) == Finding(
        APART, Outcome.PASSED, message="3 of 4 cases, inputs from a secret seed"
    )
    for number in range(3):
        name = f"case {number}"
        assert judged(monkeypatch, [None] * 3, wrong=name).case == name
        assert judged(monkeypatch, [None] * 3, wrong=name).outcome is Outcome.FAILED
    none = "it covers none of the cases"
    for before, outcome in [
        ((Outcome.PASSED,), Outcome.FAILED),
        ((Outcome.UNSUPPORTED,), Outcome.UNSUPPORTED),
    ]:
        found = judged(monkeypatch, ["no", "no"], before=before)
        assert (found.outcome, found.message) == (outcome, none)
        found = judged(monkeypatch, [None, None], missing="no triton", before=before)
        assert (found.outcome, found.message) == (outcome, "no triton")
    blocked = judged(monkeypatch, [None], before=(Outcome.PASSED, Outcome.FAILED))
    assert blocked.outcome is Outcome.BLOCKED
    own = judged(monkeypatch, [None], candidate=True, op="other", file="mine.py")
    assert own.outcome is Outcome.UNSUPPORTED
    assert "declares op 'other'" in own.message


def test_results_are_of_the_named_candidate_and_in_the_folder_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Mock(return_value={"y": 1})
    monkeypatch.setattr(apart, "answer", answer)
    one, other = (
        SimpleNamespace(op=f"op {name}", provider=name, device="cpu") for name in ("one", "other")
    )
    checks: Any = object.__new__(remote.Checks)
    checks.candidates, checks.asked = {"one": one, "other": other}, SimpleNamespace(seconds=60.0)
    assert checks.answer("other", "inputs", str(tmp_path)) == {"y": 1}
    answer.assert_called_once_with("op other", "other", "inputs", "cpu", tmp_path)


def test_a_process_of_its_own_gets_every_trait_of_a_provider_in_words() -> None:
    slack = {torch.float32: 2.0, torch.float64: 9.0, torch.float16: 3.0}
    dtypes = {"y": torch.bfloat16, "z": torch.float32}
    provider: Any = SimpleNamespace(slack=slack, output_dtypes=dtypes)
    words = {"y": "torch.bfloat16", "z": "torch.float32"}
    assert apart.traits(provider, []) == apart.Traits({"fp32": 2.0, "fp16": 3.0}, words, ())
