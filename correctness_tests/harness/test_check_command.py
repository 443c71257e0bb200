"""``tinyllama check``: a verdict for each check, on files that are right, wrong, or deadly."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.commands import refused
from correctness_tests.support.own_repository import OP
from correctness_tests.support.tried import small
from tinyllama.cli import main
from tinyllama.cli.check import _not_run, _seen
from tinyllama.harness import Case, Provider, Tensor
from tinyllama.harness.check import remote
from tinyllama.harness.check.run import CHECKS, Finding, Outcome
from tinyllama.harness.machine.worker import Worker
from tinyllama.ops import OPS

pytestmark = pytest.mark.usefixtures("forked")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
GPU_ONLY = {"captured", "side stream"}
DIES = """
import os
import torch
from tinyllama.ops.rope import rope

@rope.provider("dies", dtypes=(torch.float32,))
def dies(q, k, cos, sin):
    if q.stride()[-1] == 2:
        os._exit(7)
    return rope["eager"].call(q, k, cos, sin)

@rope.provider("vast", dtypes=(torch.float32,))
def vast(q, k, cos, sin):
    torch.ones(2**40)
    return rope["eager"].call(q, k, cos, sin)

@rope.provider("much", dtypes=(torch.float32,))
def much(q, k, cos, sin):
    # All that is available, of which the system promises more.
    import mmap, pathlib, re
    facts = pathlib.Path("/proc/meminfo").read_text()
    available = 1024 * int(re.search(r"^MemAvailable: +([0-9]+)", facts, re.M)[1])
    mmap.mmap(-1, available, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return rope["eager"].call(q, k, cos, sin)
"""
WAITS = """
import torch
from tinyllama.ops.rope import rope

@rope.provider("waits", dtypes=(torch.float32,))
def waits(q, k, cos, sin):
    while q.stride()[-1] == 2:
        pass
    return rope["eager"].call(q, k, cos, sin)
"""
RAISES = """
from tinyllama.ops.silu_mul import silu_mul

@silu_mul.provider("raises", dtypes=silu_mul.dtypes[:1])
def raises(gate, up):
    raise ArithmeticError("no result today")
"""


def verdicts(path: Path, tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and provider -> check -> outcome."""
    out = tmp_path / "found.json"
    status = main(["check", str(path), "--device", "cpu", "--json", str(out), *options])
    found = json.loads(out.read_text())
    return status, {
        provider: {one["check"]: one["outcome"] for one in findings}
        for provider, findings in found.items()
    }


def test_a_right_file_holds_every_check(tmp_path: Path) -> None:
    quick = [check for check in CHECKS if check != "sizes"]  # test_sizes.py
    status, found = verdicts(EXAMPLES / "softmax.py", tmp_path, "--only", ",".join(quick))
    assert status == 0
    assert list(found) == ["softmax-triton", "softmax-eager"], "the reference last"
    kernels = found["softmax-triton"]
    unsupported = {check for check, outcome in kernels.items() if outcome != "passed"}
    one_output, one_input = "absent gradients", "wanted gradients"
    assert unsupported == GPU_ONLY | {one_output, one_input, "configurations"}
    assert set(kernels) == set(quick)


def test_a_wrong_file_fails_the_checks_that_are_about_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "found.xml"
    only = ("--only", "gradient layouts,scaled upstream,determinism,compiled")
    options = ("--junit", str(junit), *only)
    status, found = verdicts(EXAMPLES / "rms_norm_hasty.py", tmp_path, *options)
    assert status == 1
    bad = {check for check, outcome in found["rms_norm-hasty"].items() if outcome == "failed"}
    assert bad == {"gradient layouts", "compiled"}  # torch's own check sums, too
    assert "gradient layouts" in capsys.readouterr().out
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("name"), suite.get("failures")) == ("rms_norm-hasty", "2")
    failure = next(suite.iter("failure"))
    assert "grad x" in str(failure.text)


@pytest.mark.parametrize("order", [("right", "wrong"), ("wrong", "right")])
def test_one_wrong_provider_of_several_decides_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: tuple[str, ...]
) -> None:
    kinds = {
        "right": [Outcome.PASSED],
        "wrong": [Outcome.FAILED, Outcome.FAILED, Outcome.CRASHED, Outcome.BLOCKED, Outcome.PASSED],
    }
    each = [(name, [Finding(one.value, one) for one in kinds[name]], False) for name in order]
    monkeypatch.setattr(remote, "check", lambda *_: iter(each))
    junit = tmp_path / "found.xml"
    assert main(["check", "--op", "rope", "--junit", str(junit), "--device", "cpu"]) == 1
    counted = ("tests", "failures", "errors", "skipped")
    suites = {suite.get("name"): suite for suite in ElementTree.parse(junit).getroot()}
    assert [suites["right"].get(one) for one in counted] == ["1", "0", "0", "0"]
    assert [suites["wrong"].get(one) for one in counted] == ["5", "2", "1", "1"]


@pytest.mark.parametrize("traits", ['requires=("gpu",)', 'supports=lambda dims: "no"'])
def test_where_nothing_can_be_checked_nothing_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], traits: str
) -> None:
    path = tmp_path / "unable.py"
    path.write_text(
        "from tinyllama.ops.rope import rope\n"
        f"rope.provider('unable', {traits})(rope['eager'].call)\n"
    )
    status, found = verdicts(path, tmp_path)
    assert set(found["rope-unable"].values()) == {"unsupported"}
    assert status == 1
    assert "rope-unable: nothing could be checked here" in capsys.readouterr().out


def test_what_ends_a_process_is_a_fault_of_that_case_alone(tmp_path: Path) -> None:
    """The checks of other cases pass, and memory that is not there is asked for in vain."""
    path, out = tmp_path / "dies.py", tmp_path / "found.json"
    path.write_text(DIES)
    only = "outputs,out of bounds,input layouts,gradient layouts,scaled upstream"
    asked = ["check", str(path), "--device", "cpu", "--json", str(out), "--only", only]
    assert main(asked) == 1
    found = json.loads(out.read_text())
    dies = {one["check"]: one for one in found["rope-dies"]}
    assert {name: one["outcome"] for name, one in dies.items()} == {
        **dict.fromkeys(only.split(","), "passed"),
        "input layouts": "crashed",
    }
    assert dies["input layouts"]["case"].endswith("-strided_inputs")
    assert "ended with status 7" in dies["input layouts"]["message"]
    vast = {one["check"]: one for one in found["rope-vast"]}
    assert "dies.py:14: RuntimeError: " in vast["outputs"]["message"]
    assert {one["outcome"] for one in vast.values()} == {"crashed", "blocked"}
    (much,) = (one for one in found["rope-much"] if one["check"] == "outputs")
    assert "dies.py:23: OSError: [Errno 12] Cannot allocate memory" in much["message"]


def test_a_case_that_does_not_end_is_named_and_many_cases_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "waits.py"
    path.write_text(WAITS)

    def progress(text: str) -> None:
        """From now on, a request to the process has no time but what it states."""
        usual: Any = Worker.call.__kwdefaults__
        monkeypatch.setitem(usual, "timeout", 0.0)

    asked = remote.Asked("tinyllama.ops", str(path), None, None, "cpu", 0, seconds=2)
    only = ["outputs", "input layouts"]
    ((name, findings, _),) = remote.check(asked, only, progress)
    assert (name, [one.outcome.value for one in findings]) == ("rope-waits", ["passed", "crashed"])
    assert findings[1].case.endswith("-strided_inputs")
    assert re.fullmatch(rf"outputs: {path}:[78]: no end after 2 s", findings[1].message)


def test_a_crash_has_its_line_in_the_table_and_its_traceback_in_the_json(tmp_path: Path) -> None:
    path, out = tmp_path / "raises.py", tmp_path / "found.json"
    path.write_text(
        "from tinyllama.ops.rope import rope\n"
        "@rope.provider('raises')\n"
        "def raises(q, k, cos, sin):\n"
        "    return q.nothing\n"
    )
    asked = ["check", str(path), "--only", "outputs", "--device", "cpu", "--json", str(out)]
    assert main(asked) == 1
    ((one,),) = json.loads(out.read_text()).values()
    assert one["outcome"] == "crashed"
    assert one["message"].startswith(f"{path}:4: AttributeError: ")
    assert one["traceback"].startswith("Traceback")
    assert "return q.nothing" in one["traceback"]


def test_an_op_of_the_tree_is_checked_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    asked = ["--only", "determinism", "--device", "cpu", "--json", str(out)]
    assert main(["check", "--op", "rms_norm", *asked]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {str(provider) for provider in OPS["rms_norm"].providers.values()}
    assert main(["check", "--op", "rms_norm", "--provider", "triton", *asked]) == 0
    assert set(json.loads(out.read_text())) == {"rms_norm-triton"}


def test_a_provider_of_an_op_of_another_file_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file beside it, whose reference it cannot replace: only its own would be self-declared."""
    (tmp_path / "declares_double.py").write_text(OP.format(name="double", body="x + x"))
    path, out = tmp_path / "provides.py", tmp_path / "found.json"
    path.write_text(
        "from declares_double import double\n"
        "double.provider('tried', slack={})(lambda x: 2.5 * x)\n"
    )
    asked = ["--only", "outputs", "--device", "cpu", "--json", str(out)]
    assert main(["check", str(path), *asked]) == 1
    assert set(json.loads(out.read_text())) == {"double-tried"}
    assert "self-declared" not in capsys.readouterr().out
    assert main(["check", str(tmp_path / "declares_double.py"), *asked]) == 0
    said = capsys.readouterr().out
    assert "double-sum: self-declared, its reference is of the same file" in said


def test_a_function_is_judged_by_the_declaration_of_an_op(tmp_path: Path) -> None:
    """What else its file declares is not asked."""
    path, out = tmp_path / "tried.py", tmp_path / "found.json"
    path.write_text(
        OP.format(name="silu_mul", body="x + x").replace('"silu_mul"', '"other"')
        + "def half(gate, up):\n    return torch.nn.functional.silu(gate) * up * 0.5\n"
    )
    options = ["--only", "outputs", "--device", "cpu", "--json", str(out)]
    asked = ["check", "--op", "silu_mul", "--candidate", f"{path}:half", *options]
    assert main(asked) == 1
    (((name, (finding,)),)) = json.loads(out.read_text()).items()
    assert (name, finding["outcome"]) == ("silu_mul-candidate", "failed")


def test_a_file_of_several_ops_is_checked_op_by_op_also_if_they_are_declared_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their_ops.py").write_text(
        "from tinyllama.harness import Case, Op, Tensor\n"
        "one, two, three = (\n"
        "    Op(name, inputs={'x': Tensor('N')}, outputs={'y': 'N'}, cases=[Case(N=3)])\n"
        "    for name in ('one', 'two', 'three')\n"
        ")\n"
        "for op in (one, two, three):\n"
        "    op.reference(lambda x: x + 1)\n"
    )
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from their_ops import one, two\n"
        "for op in (one, two):\n"
        "    op.provider('mine')(lambda x: 1 + x)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    out = tmp_path / "found.json"
    options = ["--device", "cpu", "--only", "outputs", "--json", str(out)]
    assert main(["check", str(mine), "--provider", "mine", *options]) == 0
    assert set(json.loads(out.read_text())) == {"one-mine", "two-mine"}
    assert main(["check", str(mine), "--op", "two", "--provider", "mine", *options]) == 0
    assert set(json.loads(out.read_text())) == {"two-mine"}
    assert main(["check", str(mine), "--op", "none", *options]) == 2
    assert "--op 'none' does not exist: use one of " in capsys.readouterr().err


def test_each_op_that_a_file_gave_a_provider_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first module, in the one between and in the last; by any of its providers."""
    x, y, cases = {"x": Tensor("N")}, {"y": "N"}, [Case(N=3)]
    names = ("known", "other", "first", "middle", "last")
    ops = {name: small(name, lambda x: x.clone(), x, y, cases) for name in names}
    for name, op in ops.items():
        for number, module in enumerate(("before", "mine", "after")):
            if (name, module) not in (("other", "mine"), ("last", "after")):
                one = Provider(name, module, torch.clone, (), module=module)
                op.providers[f"{name}{number}"] = one
    modules: dict[str, dict[str, Any]] = {
        "one": {"a": ops["first"], "b": 3, "c": ops["known"]},
        "two": {"a": ops["other"], "b": ops["middle"], "c": ops["first"]},
        "three": {"a": "first", "b": ops["middle"], "c": ops["last"]},
    }
    fakes = {name: SimpleNamespace(**values) for name, values in modules.items()}
    monkeypatch.setattr(remote, "sys", SimpleNamespace(modules=fakes))
    found = list(remote._elsewhere("mine", {"known": ops["known"]}))
    assert [op.name for op in found] == ["first", "middle", "last"]


@pytest.mark.parametrize("named", ["softmax_package", "softmax_package:softmax"])
def test_an_op_of_an_installed_package_is_checked_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "softmax_package.py").write_text((EXAMPLES / "softmax.py").read_text())
    facts = tmp_path / "softmax_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: softmax-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[tinyllama.ops]\nsoftmax = {named}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    out = tmp_path / "found.json"
    options = ["--provider", "triton", "--only", "determinism", "--device", "cpu"]
    assert main(["check", "--op", "softmax", *options, "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())) == {"softmax-triton"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "name a file or an op: FILE, or --op NAME"),
        ("--op rope --candidate some.py", "--candidate 'some.py': use FILE:FUNCTION, with --op"),
        ("some.py --op rope --candidate some.py:f", "use FILE:FUNCTION, with --op NAME alone"),
        ("--op softmax", "error: --op 'softmax' does not exist: use one of adamw, add_rms_norm, "),
        (
            "--op rope --provider cuda",
            "error: --provider 'cuda' does not exist: use one of torch, ",
        ),
    ],
)
def test_a_name_that_is_no_op_or_provider_is_one_error(options: str, message: str) -> None:
    assert message in refused("check", *options.split())


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "no file"),
        ("x = 1\ny = = 2", [], "some.py:2: SyntaxError: "),  # test_plugin.py has others
        ("x = 1", [], "declares no op and no provider"),
        ("", ["--only", "speed"], "--only 'speed' does not exist: use one of"),
        ("", ["--device", "tpu"], "device 'tpu' is unknown"),
    ],
)
def test_what_cannot_be_checked_is_one_error(
    tmp_path: Path, text: str | None, options: list[str], message: str
) -> None:
    path = tmp_path / "some.py"
    if text is not None:
        path.write_text(text)
    assert message in refused("check", str(path), *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json {tmp}/x --junit {tmp}/x", "--json and --junit are both '{tmp}/x': name two files"),
        ("--json {tmp}/some.py", "FILE and --json are both '{tmp}/some.py': name two files"),
        ("--junit {tmp}/some.py", "FILE and --junit are both '{tmp}/some.py': name two files"),
        ("--json {tmp}/pipe", "--json '{tmp}/pipe' is a pipe or a device"),
    ],
)
def test_an_output_that_would_be_lost_or_take_anothers_place_is_refused(
    tmp_path: Path, options: str, message: str
) -> None:
    path = tmp_path / "some.py"
    path.write_text("x = 1")
    os.mkfifo(tmp_path / "pipe")
    asked = ["check", str(path), *options.format(tmp=tmp_path).split()]
    assert message.format(tmp=tmp_path) in refused(*asked)
    assert path.read_text() == "x = 1"


def test_progress_is_shown_and_one_crash_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raises.py"
    path.write_text(RAISES)
    only = "outputs,backward twice,determinism"
    assert main(["check", str(path), "--only", only, "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert re.sub(r"\(\d+\.\d s\)", "(0.1 s)", err).splitlines() == [
        "silu_mul-raises: trying outputs",
        "silu_mul-raises: outputs crashed (0.1 s)",
        "silu_mul-raises: trying backward twice",
        "silu_mul-raises: backward twice crashed (0.1 s)",
        "silu_mul-raises: trying determinism",
        "silu_mul-raises: determinism crashed (0.1 s)",
    ]
    assert out.count("no result today") == 1
    assert "    what follows: backward twice, determinism\n" in out


def test_what_was_not_tried_or_cannot_be_made_is_one_line_for_each_reason() -> None:
    blocked, unsupported = Outcome.BLOCKED, Outcome.UNSUPPORTED
    findings = [
        Finding("sizes", blocked, message="it crashed"),
        Finding("captured", unsupported, message="no GPU"),
        Finding("races", blocked, message="it crashed"),
        Finding("side stream", unsupported, message="no GPU"),
        Finding("outputs", Outcome.PASSED),
    ]
    expected = ["not tried: sizes, races (it crashed)"]
    assert _not_run(findings) == [*expected, "not possible here: captured, side stream (no GPU)"]
    assert _seen(findings) == []
