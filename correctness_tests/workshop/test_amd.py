"""The first hour on an AMD machine, rehearsed without one: its commands, in order.

ROCm's profilers are there as stand-ins; what they are given and what they write is tested in
correctness_tests/profiling.
"""

import os
import re
import shlex
from pathlib import Path

import pytest

from correctness_tests.support import profiler_files
from correctness_tests.support.commands import ROOT, python

ROWS = re.compile(r"^\| ([\w ]+) \| `([^`]+)` \|", re.M)
SHORTER = {  # what is added, so that a machine without a GPU ends within minutes
    "record": "-q -p no:cacheprovider --groups tiny-fp32",
    "profile": "--tier v1 --preset tiny --seq-len 16",
}
ELSEWHERE = {  # rehearsed by other tests
    "correctness": "it is this suite",
    "certify": "correctness_tests/gate/test_gate_certify_command.py",
    "stages": "correctness_tests/workshop/test_stages.py",
}
NEEDS_GPU = {"tune": "tune needs a GPU"}


def steps() -> dict[str, str]:
    return dict(ROWS.findall((ROOT / "docs" / "profile.md").read_text(encoding="utf-8")))


def test_every_step_is_rehearsed_somewhere() -> None:
    assert set(steps()) == {"what is here", "kernels", *SHORTER, *ELSEWHERE, *NEEDS_GPU}
    for where in ELSEWHERE.values():
        assert "/" not in where or (ROOT / where).is_file(), where


@pytest.mark.slow("kernels are compiled, and a record is made: three minutes")
def test_steps_of_first_hour_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    tools = profiler_files.install(tmp_path / "rocm", "7.0")
    for name in ("tinyllama", "perf_tests", "conftest.py", "pytest.ini", "pyproject.toml", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(tools), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "ROCM_PATH": str(tools.parent)}
    environment["PYTHONPATH"] = str(tmp_path)
    for step, command in steps().items():
        if step in ELSEWHERE:
            continue
        words = shlex.split(f"{command} {SHORTER.get(step, '')}")  # tinyllama or pytest is first
        done = python("-m", *words, cwd=tmp_path, env=environment, timeout=600)
        said = f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, said
        if step in NEEDS_GPU:
            assert done.returncode == 2, said
            assert NEEDS_GPU[step] in done.stderr
            continue
        assert done.returncode == 0, said
        if step == "profile":
            for tool in ("trace", "hotspots", "flops", "memory"):
                assert re.search(rf"^{tool} +done$", done.stdout, re.M), said
            for tool in ("counters", "rocprof-compute", "rocprof-sys"):
                assert re.search(rf"^{tool} +not here: .*there is no GPU", done.stdout, re.M), said
        if step == "what is here":
            assert re.search(r"rocprof-compute +│ yes", done.stdout), said
