"""Times the steps of the tiers, of this tree and of another one alternately, and digests kernels.

    python -m tools.captured_steps [--against FOLDER] [--groups small-bf16,medium-bf16]
        [--tiers v1,v2,v3,v4] [--rounds 20]

Needs a GPU. Each tree has a process for each group, which makes the steps as they run by default
and answers a line of JSON for each request. Prints, for each step, the median milliseconds, the
ratio to the other tree with the range of its middle half, and a digest of the kernels that Triton
compiled for it and for no tier before it. Exit status: 1 if a median ratio is outside 0.99 to 1.01
or a digest differs, else 0.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tinyllama.bench.workloads import ALL
from tinyllama.cli.argument_types import check_known, whole_within
from tinyllama.harness.machine.errors import UsageError
from tinyllama.model.tiers import TIERS

ROOT = Path(__file__).resolve().parent.parent
CALLS = 20  # steps of a turn; the turn's time is their median
WITHIN = 0.01


class Worker:
    """A process with the steps of one group, in one tree."""

    def __init__(self, tree: Path, group: str, tiers: list[str]) -> None:
        self.name = f"{group} in {tree}"
        self.cache = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "tools.captured_steps", "--worker", group, *tiers]
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            # Without lines, the assembly of a kernel that only moved in its file is the same.
            env={
                **os.environ,
                "PYTHONPATH": str(tree),
                "TRITON_CACHE_DIR": self.cache.name,
                "TRITON_DISABLE_LINE_INFO": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.digests: dict[str, str] = self.answer()

    def ask(self, request: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Raises RuntimeError when the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise RuntimeError(f"the process of {self.name} ended: see its output above")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.cache.cleanup()


def serve(group: str, tiers: list[str]) -> None:
    """Make the steps, tell the digests of their kernels, and time the tier that each line names."""
    from tinyllama.bench.steps import TierStep

    steps, digests, digested = {}, {}, set[str]()
    for tier in tiers:
        steps[tier] = TierStep(tier, group=group, device="cuda")
        kernels = kernels_in(Path(os.environ["TRITON_CACHE_DIR"])) - digested
        digests[tier] = hashlib.sha256("".join(sorted(kernels)).encode()).hexdigest()[:12]
        digested |= kernels
    print(json.dumps({"answer": digests}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"answer": steps[line.strip()].turn(CALLS)}), flush=True)


def kernels_in(cache: Path) -> set[str]:
    """A digest of the assembly of each kernel in Triton's cache."""
    files = [*cache.glob("*/*.ptx"), *cache.glob("*/*.amdgcn")]
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compared(group: str, tiers: list[str], trees: list[Path], rounds: int) -> bool:
    """Print the lines of a group; whether every ratio is near 1."""
    workers = [Worker(tree, group, tiers) for tree in trees]
    seconds: dict[str, list[list[float]]] = {tier: [] for tier in tiers}
    for turn in range(rounds):
        for tier in tiers:
            in_order = workers if turn % 2 else workers[::-1]
            times = [worker.ask(tier) for worker in in_order]
            seconds[tier].append(times if turn % 2 else times[::-1])
    near = True
    for tier in tiers:
        text = f"{group} {tier}: {1e3 * statistics.median(s[0] for s in seconds[tier]):.3f} ms"
        text += f", kernels {workers[0].digests[tier]}"
        if len(workers) == 2:
            ratios = [mine / theirs for mine, theirs in seconds[tier]]
            low, median, high = statistics.quantiles(ratios, n=4)
            same = workers[0].digests[tier] == workers[1].digests[tier]
            near = near and same and abs(median - 1) <= WITHIN
            text += f" ({'the same' if same else 'CHANGED'})"
            text += f", times the other tree's {median:.4f} [{low:.4f}, {high:.4f}]"
        print(text, flush=True)
    for worker in workers:
        worker.close()
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout to compare with")
    parser.add_argument("--groups", default="small-bf16,medium-bf16")
    parser.add_argument("--tiers", default="v1,v2,v3,v4")
    parser.add_argument("--rounds", type=whole_within(2, 10_000), default=20)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker[0], args.worker[1:])
        return 0
    groups, tiers = args.groups.split(","), args.tiers.split(",")
    check_known("--groups", groups, [str(group) for group in ALL])
    check_known("--tiers", tiers, TIERS)
    if args.against and not (args.against / "tools/captured_steps.py").is_file():
        raise UsageError(f"--against {str(args.against)!r} has no tools/captured_steps.py")
    if not torch.cuda.is_available():
        raise UsageError("no GPU is available to torch: steps are captured on a GPU")
    trees = [ROOT, args.against.resolve()] if args.against else [ROOT]
    return int(not all([compared(group, tiers, trees, args.rounds) for group in groups]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"captured_steps: {error}", file=sys.stderr)
        sys.exit(2)
