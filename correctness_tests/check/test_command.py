"""``tinyllama check``: a verdict for each check, on files that are right, wrong, or deadly."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from correctness_tests.support.checked_files import ROPE, checked, of_rope
from correctness_tests.support.commands import refused
from correctness_tests.support.own_repository import OP
from tinyllama.harness.check import remote
from tinyllama.harness.check.names import APART, DEFAULT
from tinyllama.harness.check.remote import Request
from tinyllama.ops import OPS

pytestmark = pytest.mark.usefixtures("forked")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
ON_STRIDES = "if q.stride()[-1] == 2: "


def test_a_right_file_holds_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [name for name in DEFAULT if name not in ("sizes", "special values")]
    status, findings = checked(tmp_path, str(EXAMPLES / "softmax.py"), "--only", ",".join(quick))
    assert status == 0
    assert list(findings) == ["softmax-triton", "softmax-eager"], "the reference last"
    kernel = {n for n, x in findings["softmax-triton"].items() if x["outcome"] == "passed"}
    one_output_one_input = {"absent gradients", "wanted gradients"}
    assert set(quick) - kernel == {"captured", "side stream"} | one_output_one_input
    out = capsys.readouterr().out
    assert "softmax-triton: no fault" in out
    assert not any(word in out for word in ("undefended", "self-declared", "not possible here"))


def test_a_wrong_file_fails_the_check_that_is_about_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later fault of the same cause is one line."""
    only = ("--only", "gradient layouts,large offsets,scaled upstream,determinism")
    file = str(EXAMPLES / "rms_norm_hasty.py")
    status, findings = checked(tmp_path, file, *only)
    assert status == 1
    outcomes = {name: finding["outcome"] for name, finding in findings["rms_norm-hasty"].items()}
    wrong = [name for name, outcome in outcomes.items() if outcome == "failed"]
    assert wrong == ["gradient layouts", "large offsets"]
    out, err = capsys.readouterr()
    case = findings["rms_norm-hasty"]["gradient layouts"]["case"]
    block = f"gradient layouts: wrong result in {case}\n    tried: "
    assert out.index(block) < out.index("verdict"), "it is told before the table"
    assert ", as gradient layouts: grad x: at [" in out
    assert "wrong result: gradient layouts (also large offsets); of 4 checks 2 passed" in out
    assert "gradient layouts: wrong result (" in err


@pytest.mark.parametrize(
    ("body", "rank", "said"),
    [
        ("os._exit(7)", "wrong result", "ended with status 7"),
        ("ctypes.string_at(8)", "unsafe", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "refused", "SIGKILL"),
        ("torch.ones(2**40)", "refused", "mine.py:7: RuntimeError: "),
    ],
)
def test_what_ends_a_process_is_a_fault_of_that_case_alone(
    tmp_path: Path, body: str, rank: str, said: str
) -> None:
    only = "outputs,out of bounds,input layouts,gradient layouts,scaled upstream"
    _, findings = of_rope(tmp_path, ON_STRIDES + body, "--only", only)
    outcomes = {name: finding["outcome"] for name, finding in findings.items()}
    assert outcomes == {**dict.fromkeys(only.split(","), "passed"), "input layouts": "crashed"}
    layouts = findings["input layouts"]
    assert layouts["case"].endswith("-strided_inputs")
    assert said in layouts["message"]
    assert layouts["rank"] == rank


def test_a_case_that_does_not_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ROPE.format(body="while q.stride()[-1] == 2: pass", traits=""))
    request = Request(str(path), None, None, "cpu", 0, seconds=2)
    answers = remote.check(request, ["outputs", "input layouts"])
    outputs, layouts = [finding for _, finding in answers if finding is not None]
    assert outputs.outcome.value == "passed"
    assert layouts.case.endswith("-strided_inputs")
    assert f"{path}:7: no end after 2 s" in layouts.message


STOPS = "if torch.is_autocast_enabled('cpu'): os.kill({pid}, signal.{signal}); time.sleep(60)"


@pytest.mark.parametrize(
    ("sent", "faulty", "status"),
    [
        ("SIGINT", "", 130),
        ("SIGTERM", "", 143),
        ("SIGALRM", "", 124),  # as --time-limit sends it
        ("SIGTERM", ON_STRIDES + "q = 2 * q\n    ", 1),
    ],
)
def test_what_was_found_before_the_end_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: str, faulty: str, status: int
) -> None:
    body = faulty + STOPS.format(pid=os.getpid(), signal=sent)
    words = ("--only", "outputs,input layouts,autocast,second derivative", "--time-limit", "500")
    ended, findings = of_rope(tmp_path, body, *words)
    assert ended == status
    assert [findings[name]["outcome"] for name in ("outputs", "autocast")] == ["passed", "blocked"]
    out = capsys.readouterr().out
    assert "not tried: autocast, second derivative (" in out
    assert ("input layouts: wrong result" in out) is bool(faulty)


def test_it_stops_at_the_first_fault_that_fails(tmp_path: Path) -> None:
    words = ("--only", "outputs,determinism", "--fail-fast")
    status, findings = of_rope(tmp_path, "q = 2 * q", *words)
    assert status == 1
    assert findings["determinism"]["message"] == "stopped by --fail-fast"


def test_a_crash_has_its_line_and_its_traceback(tmp_path: Path) -> None:
    _, findings = of_rope(tmp_path, "return q.nothing", "--only", "outputs")
    assert findings["outputs"]["message"].startswith(f"{tmp_path}/mine.py:7: AttributeError: ")
    assert "return q.nothing" in findings["outputs"]["traceback"]


def test_a_kernel_that_is_declared_and_not_launched_fails(tmp_path: Path) -> None:
    traits = ', requires=("triton",)'
    status, findings = of_rope(tmp_path, "", "--only", "outputs,kernel launched", traits=traits)
    assert status == 1
    assert "no kernel launched" in findings["kernel launched"]["message"]


def test_where_nothing_can_be_checked_nothing_holds(tmp_path: Path) -> None:
    status, findings = of_rope(tmp_path, "", traits=', supports=lambda dims: "no"')
    assert {finding["outcome"] for finding in findings.values()} == {"unsupported"}
    assert status == 1


def test_an_op_of_the_tree_is_checked_by_its_name(tmp_path: Path) -> None:
    words = ("--op", "rms_norm", "--only", "determinism")
    status, findings = checked(tmp_path, *words)
    assert status == 0
    assert set(findings) == {str(provider) for provider in OPS["rms_norm"].providers.values()}
    status, findings = checked(tmp_path, *words, "--provider", "triton")
    assert set(findings) == {"rms_norm-triton"}


def test_each_op_that_a_file_provides_for_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where a file declares its own reference, --verbose says so."""
    ops = "\n".join(OP.format(name=name, body="x + x") for name in ("one", "two", "three"))
    (tmp_path / "their_ops.py").write_text(ops)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from their_ops import one, two\n"
        "one.provider('mine')(lambda x: 2.5 * x)\n"
        "two.provider('mine')(lambda x: 2 * x)\n"
    )
    words = (str(mine), "--only", "outputs", "--verbose")
    status, findings = checked(tmp_path, *words)
    assert (status, set(findings)) == (1, {"one-mine", "two-mine"})
    assert "self-declared" not in capsys.readouterr().out
    assert set(checked(tmp_path, *words, "--op", "two")[1]) == {"two-mine"}
    status, _ = checked(tmp_path, str(tmp_path / "their_ops.py"), *words[1:])
    assert status == 0
    assert "one-sum: self-declared" in capsys.readouterr().out
    assert "--op 'none' does not exist: use one of " in refused("check", str(mine), "--op", "none")


def test_an_op_of_an_installed_package_is_checked_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "softmax_package.py").write_text((EXAMPLES / "softmax.py").read_text())
    facts = tmp_path / "softmax_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: softmax-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[tinyllama.ops]\nsoftmax = softmax_package:softmax\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("--op", "softmax", "--provider", "triton", "--only", "determinism")
    assert set(checked(tmp_path, *words)[1]) == {"softmax-triton"}


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", "", "name a file or an op: FILE, or --op NAME"),
        ("", "--op rope --candidate some.py", "use FILE:FUNCTION, with --op NAME alone"),
        ("", "--op softmax", "--op 'softmax' does not exist: use one of adamw, add_rms_norm, "),
        ("", "--op rope --provider cuda", "--provider 'cuda' does not exist: use one of torch, "),
        ("", "nofile.py", "no file"),
        ("x = 1\ny = = 2", "{file}", "some.py:2: SyntaxError: "),
        ("x = 1\n1 / 0", "{file}", "some.py:2: "),
        ("x = 1", "{file}", "declares no op and no provider"),
        ("", "{file} --only speed", "--only 'speed' does not exist: use one of"),
        ("", "{file} --device tpu", "device 'tpu' is unknown"),
        ("", "{file} --json {file}", "name two files"),
        (OP.format(name="op", body="x").replace("cases=", "fits=len(0), cases="), "{file}", "len"),
        (
            OP.format(name="op", body="x").replace("cases=", "fits=lambda s: s['M'], cases="),
            "{file}",
            "op 'op': fits raises KeyError: 'M' for the case N3D8",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_error(
    tmp_path: Path, text: str, words: str, message: str
) -> None:
    path = tmp_path / "some.py"
    path.write_text(text)
    assert message in refused("check", *words.format(file=path).split())
    assert path.read_text() == text


# -- --candidate: what it patches decides nothing about its values --------------------------------

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
