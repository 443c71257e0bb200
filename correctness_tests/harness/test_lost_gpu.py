"""A test that leaves a GPU which its process can use no longer; the GPU is stood in for."""

import json
from pathlib import Path

import pytest
import torch

from tinyllama.cli import main

pytest_plugins = ["pytester"]

CONFTEST = """
import torch

pytest_plugins = ["tinyllama.harness.plugins.suite"]
errors = []


def synchronize():
    if errors:
        raise RuntimeError("CUDA error: misaligned address\\nSearch for it in ...")


torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize
"""
TESTS = """
import pytest
from conftest import errors


@pytest.mark.parametrize("number", range(9))
def test_one(number):
    assert number != 1
    if number == 3:
        errors.append(number)
    assert not errors
"""
WHY = "no call on the GPU works in this process any more (*test_one[[]3[]]): CUDA error: mis*"


@pytest.mark.slow("workers of its own, which import torch")
def test_a_worker_that_lost_its_gpu_is_replaced(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("--device", "cpu", "-n", "1", "-rf")
    result.stdout.fnmatch_lines([WHY, "FAILED *test_one[[]1[]]*", "FAILED *test_one[[]3[]]*"])
    # The worker's end is a failure of that test, too.
    assert result.parseoutcomes() == {"passed": 7, "failed": 3}


@pytest.mark.long
def test_without_workers_the_session_ends_there(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_initialized", "synchronize"):  # which the conftest replaces
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("--device", "cpu")
    result.stdout.fnmatch_lines([WHY, f"! {WHY} !"])
    assert result.parseoutcomes() == {"passed": 2, "failed": 2}
    assert result.ret == pytest.ExitCode.TESTS_FAILED


CANDIDATE = """
import torch
from tinyllama.ops.rope import rope

errors = []


def synchronize(*device):
    if errors:
        raise errors[0]


torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize


@rope.provider("loses", dtypes=(torch.float32,))
def loses(q, k, cos, sin, interleaved=True):
    if q.stride()[-1] == 2:
        errors.append(RuntimeError("CUDA error: misaligned address"))
    synchronize()
    return rope["eager"].call(q, k, cos, sin, interleaved)
"""


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_the_checks_behind_a_lost_gpu_have_another_process(tmp_path: Path) -> None:
    path, out = tmp_path / "candidate.py", tmp_path / "result.json"
    path.write_text(CANDIDATE)
    only = "--only=outputs,input layouts,gradients,scaled upstream,determinism"
    assert main(["check", str(path), "--device=cpu", f"--json={out}", only]) == 1
    result = {finding["check"]: finding for finding in json.loads(out.read_text())["rope-loses"]}
    wrong = {
        check: finding["message"]
        for check, finding in result.items()
        if finding["outcome"] != "passed"
    }
    assert list(wrong) == ["input layouts"]
    assert "no call on the GPU works any more: CUDA error: misaligned" in wrong["input layouts"]
    assert "strided" in result["input layouts"]["case"]
