"""The branches of try_gate fit this tree, and its verdict on what the gate says of them."""

import subprocess
import sys
from pathlib import Path

from correctness_tests.support.commands import ENVIRONMENT, ROOT
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
