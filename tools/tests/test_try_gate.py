"""The branches of try_gate fit this tree, and its verdict on what the gate says of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from correctness_tests.support.commands import ENVIRONMENT, ROOT
from tools import try_gate
from tools.try_gate import BRANCHES, branched, copied

RIGHT = """
import os, sys, torch, triton.runtime.interpreter
for root in sys.argv[1:]:
    if not os.fork():
        sys.path.insert(0, root)
        import tinyllama
        from tinyllama.ops import OPS
        op = OPS["rms_norm"]
        x, w = torch.randn(3, 27, 24), torch.randn(24)
        a, b = (op[p].call(x, w, eps=1e-5) for p in ("eager", "triton"))
        torch.testing.assert_close(a, b)
        print(tinyllama.__file__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, root
"""


def test_the_edits_of_each_branch_fit_and_its_results_are_right(tmp_path: Path) -> None:
    """Branches are to be stopped for their time alone. Each is imported in a process of its own."""
    copied(ROOT, tmp_path / "base")
    roots = [tmp_path / name for name in BRANCHES]
    for name, root in zip(BRANCHES, roots, strict=True):
        subprocess.run(["git", "clone", "--quiet", str(tmp_path / "base"), str(root)], check=True)
        branched(root, name)
    env = {**ENVIRONMENT, "PYTHONPATH": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RIGHT, *map(str, roots)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).parents[1] for line in done.stdout.splitlines()] == roots


def gate_report(metric: str = "device_seconds", outcome: str = "SLOWER", moved: str = "") -> Any:
    """What ``--gate-json`` holds: one benchmark that is SLOWER, and one that is the same."""
    name = "rms_norm-triton-N8-bf16/forward+backward"
    figures = [{"metric": metric, "outcome": "SLOWER"}, {"metric": "kernels", "outcome": "SAME"}]
    slower = {"outcome": outcome, "figures": figures, "text": "a\nb", "moved": [moved]}
    same = {"outcome": "SAME", "figures": [], "text": "", "moved": []}
    return {
        "verdicts": [{"outcome": outcome}, {"outcome": "SAME"}, {"outcome": "SAME"}],
        "comparisons": [{"benchmarks": {name: slower, "other": same}, "seconds": {"time": 8.04}}],
    }


def run(status: int, content: Any, seconds: float = 10.0) -> dict[str, Any]:
    outcomes = {verdict["outcome"]: 1 for verdict in content["verdicts"]}
    slower = try_gate.slower(content)
    return {"status": status, "outcomes": outcomes, "slower": slower, "seconds": seconds}


def test_a_slower_kernel_is_to_be_named() -> None:
    kernel, host = BRANCHES["slower-kernel"], BRANCHES["slower-host"]
    right = gate_report(moved="rms_norm_forward: a call of 9.0 us -> a call of 9.7 us")
    assert not kernel.wrong(run(10, right))
    assert "rms_norm_forward" in kernel.wrong(run(10, gate_report(moved="fill: 1 us")))[0]
    assert (
        "device_seconds"
        in kernel.wrong(run(10, gate_report("host_seconds", moved="rms_norm_forward")))[0]
    )
    assert not host.wrong(run(10, gate_report("host_seconds")))
    assert "host_seconds" in host.wrong(run(10, right))[0]
    assert kernel.wrong(run(10, right, seconds=181.0)) == ["it took 181 s, not 180"]
    assert "INCONCLUSIVE" in kernel.wrong(run(11, gate_report(outcome="INCONCLUSIVE")))[0]
