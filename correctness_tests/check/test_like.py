"""``tinyllama check FILE:FUNCTION --like REFERENCE --shape SHAPES`` needs no declaration."""

from pathlib import Path
from typing import Any

import pytest
import torch

from correctness_tests.support.checked_files import checked
from correctness_tests.support.commands import printed, refused
from tinyllama.harness import Op, Registry, load_file
from tinyllama.harness.check.cases import op_cases

pytestmark = pytest.mark.usefixtures("forked")
FUNCTIONS = """
import torch

def softmax(x, dim=-1):
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)

def unshifted(x, scale=2.0):
    return (scale * x).exp() / (scale * x).exp().sum(-1, keepdim=True) + 1e-3

def norm(x, eps, gain, bias=None, block=64):
    return norm_in_torch(x, gain, bias, eps)

def norm_in_torch(x, gain, bias, eps):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.float()
    return (wide if bias is None else wide + bias).to(x.dtype)

def loss(logits, target):
    return torch.nn.functional.cross_entropy(logits, target)

def kept(x, mask):
    return x * mask, mask.sum(-1)

class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        return torch.nn.functional.glu(x, dim)

gated = Gated.apply

def largest(x, k):
    return torch.topk(x, k)

def turned(x, table):
    x, y = x.chunk(2, -1)
    table = table.detach()[:, None]
    return torch.cat([x * table - y, y * table + x], -1)

def turned_in_two_batches(x, table):
    return torch.cat([turned(x[:2], table), 0 * x[2:]])
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of functions in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return "mine.py"


def declared(file: str, monkeypatch: pytest.MonkeyPatch, *argv: str) -> Op:
    """The op that a command prints, saved beside the file and loaded."""
    text = printed("check", *argv, "--show-declaration", "--device", "cpu")
    monkeypatch.syspath_prepend(str(Path(file).resolve().parent))
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    Path("declaration.py").write_text(text)
    registry = Registry()
    load_file("declaration.py", registry)
    (op,) = registry.values()
    return op


def test_a_function_is_checked_and_the_verdict_is_the_exit_status(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--like", "torch.softmax", "--shape", "N D", "--param", "dim=-1", "--dtype", "fp32"]
    words += ["--only", "outputs,gradients"]
    status, _ = checked(tmp_path, f"{file}:softmax", *words, "--verbose")
    out = capsys.readouterr().out
    assert status == 0, out
    assert "self-declared" not in out
    status, findings = checked(tmp_path, f"{file}:unshifted", *words)
    ((_, by_check),) = findings.items()
    assert (status, by_check["outputs"]["outcome"]) == (1, "failed")


@pytest.mark.parametrize(
    ("function", "options", "outputs", "params"),
    [
        ("softmax", ["torch.softmax", "N D", "dim=-1"], {"output": "N D"}, {"dim": -1}),
        (
            "norm",  # an optional input, casts, and arguments in another order and of its own
            ["mine.py:norm_in_torch", "x: N D, gain: D, bias: D?", "eps=1e-5", "block=32"],
            {"output": "N D"},
            {"eps": 1e-5},
        ),
        (
            "loss",
            ["torch.nn.functional.cross_entropy", "logits: N V, target: N int<V"],
            {"output": ""},
            {},
        ),
        (
            "kept",
            ["mine.py:kept", "x: N D, mask: N D bool"],
            {"output_1": "N D", "output_2": "N"},
            {},
        ),
        ("gated", ["torch.nn.functional.glu", "N 2*R", "dim=-1"], {"output": "N R"}, {"dim": -1}),
        ("turned", ["mine.py:turned", "x: B T H 2*R, table: T R"], {"output": "B T H 2*R"}, {}),
        ("largest", ["torch.topk", "N D", "k=3"], {"output_1": "N 3", "output_2": "N 3"}, {"k": 3}),
    ],
)
def test_the_declaration_says_what_the_line_says(
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    options: list[str],
    outputs: dict[str, str],
    params: dict[str, Any],
) -> None:
    like, shape, *params_given = options
    words = [word for param in params_given for word in ("--param", param)]
    if function == "gated":  # it has no backward
        words.append("--no-grad")
    op = declared(file, monkeypatch, f"{file}:{function}", "--like", like, "--shape", shape, *words)
    assert {name: tensor.shape for name, tensor in op.outputs.items()} == outputs
    assert op.params == params
    for case in (case for case in op_cases([op]) if not case.varied):
        assert all(comparison.passed for comparison in case.compare()), str(case)


def test_gradients_are_those_of_floating_point_inputs_unless_they_are_left_out(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [f"{file}:loss", "--like", "torch.nn.functional.cross_entropy"]
    line += ["--shape", "logits: N V, target: N int<V", "--dtype", "bf16"]
    op = declared(file, monkeypatch, *line)
    assert op.differentiable == ("logits",)
    assert op.dtypes == (torch.bfloat16,)
    assert not declared(file, monkeypatch, *line, "--no-grad").differentiable


@pytest.mark.parametrize(
    ("function", "status"),
    # A gradient that the reference does not give need not be there; every batch is compared.
    [("turned", 0), ("turned_in_two_batches", 1)],
)
def test_a_function_is_compared_in_what_the_reference_gives(
    file: str, tmp_path: Path, function: str, status: int
) -> None:
    words = ["--like", f"{file}:turned", "--shape", "x: B T H 2*R, table: T R", "--dtype", "fp32"]
    words += ["--only", "outputs,gradients,sizes,second derivative"]
    assert checked(tmp_path, f"{file}:{function}", *words)[0] == status


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["mine.py:softmax", "--like", "torch.softmax", "--shape", "N D"], "argument"),  # dim
        (["mine.py:softmax", "--like", "torch.unique", "--shape", "N D"], "no sum or product"),
        (["mine.py:softmax"], "mine.py:softmax --like REFERENCE"),
        (["mine.py"], "mine.py:FUNCTION --like REFERENCE"),
        (["mine.py:soft", "--like", "torch.softmax", "--shape", "N D"], "'soft'"),
        (["mine.py:softmax", "--like", "torch.softmax"], "--shape"),
        (["mine.py", "--shape", "N D"], "--like"),
        (
            ["mine.py:norm", "--like", "mine.py:norm_in_torch", "--shape", "N D"],
            "--shape 'x: N D, eps: N D, gain: N D'",
        ),
        (["mine.py:softmax", "--like", "torch.softmax", "--shape", "y: N D"], "'y'"),
        (
            ["mine.py:loss", "--like", "torch.softmax", "--shape", "logits: N V, target: N int"],
            "int<V",
        ),
        (["mine.py:softmax", "--like", "torch.softmax", "--shape", "N D!"], "'D!'"),
        (
            ["mine.py:softmax", "--like", "torch.softmax", "--shape", "N D", "--param", "dim=last"],
            "dim=last",
        ),
        (
            ["mine.py:softmax", "--like", "mine.py:loss", "--shape", "N D", "--param", "axis=1"],
            "axis",
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_status_2(file: str, argv: list[str], named: str) -> None:
    assert named in refused("check", *argv, "--device", "cpu")
