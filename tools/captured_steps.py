"""Times the steps of the tiers, of this tree and of another one alternately, and digests kernels.

    python -m tools.captured_steps [--against FOLDER] [--groups small-bf16,medium-bf16]
        [--tiers v1,v2,v3,v4] [--rounds 20]

Needs a GPU. Prints, for each step, the median milliseconds, the
ratio to the other tree with the range of its middle half, and a digest of the kernels that Triton
compiled for it and for no tier before it. Exit status: 1 if a median ratio is outside 0.99 to 1.01
or a digest differs, else 0.
"""

import argparse
import contextlib
import hashlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tinyllama.bench.workloads import ALL
from tinyllama.cli.argument_types import check_known, whole_within
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.worker import Worker
from tinyllama.harness.measure.rounds import interleaved
from tinyllama.model.tiers import TIERS

ROOT = Path(__file__).resolve().parent.parent
CALLS = 20  # steps of a turn; the turn's time is their median
WITHIN = 0.01


class Side:
    """The steps of one group in one tree, made as they run by default in a process of that tree.

    digests: of the kernels that Triton compiled for each tier and for none before it.
    """

    def __init__(self, tree: Path, group: str, tiers: Sequence[str], device: str) -> None:
        self._cache = tempfile.TemporaryDirectory()
        # Without lines, the assembly of a kernel that only moved in its file is the same.
        env = {"TRITON_CACHE_DIR": self._cache.name, "TRITON_DISABLE_LINE_INFO": "1"}
        self._worker = Worker(f"{group} in {tree}", cwd=tree, env=env)
        self.digests: dict[str, str] = {}
        digested = set[str]()
        for tier in tiers:
            factory = "tinyllama.bench.steps:TierStep"
            self._worker.make(tier, factory, tier=tier, group=group, device=device)
            kernels = kernels_in(Path(self._cache.name)) - digested
            self.digests[tier] = hashlib.sha256("".join(sorted(kernels)).encode()).hexdigest()[:12]
            digested |= kernels

    def seconds(self, tier: str) -> float:
        """The median of some steps."""
        return float(self._worker.call(tier, "turn", CALLS))

    def close(self) -> None:
        self._worker.close()
        self._cache.cleanup()


def kernels_in(cache: Path) -> set[str]:
    """A digest of the assembly of each kernel in Triton's cache."""
    files = [*cache.glob("*/*.ptx"), *cache.glob("*/*.amdgcn")]
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compared(
    group: str, tiers: Sequence[str], trees: Sequence[Path], rounds: int, device: str = "cuda"
) -> bool:
    """Print the lines of a group; whether every ratio is near 1."""
    near = True
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(contextlib.closing(Side(tree, group, tiers, device)))
            for tree in trees
        ]
        for tier in tiers:
            turns = {f"{n}": partial(side.seconds, tier) for n, side in enumerate(sides)}
            mine, *others = interleaved(turns, rounds).values()
            text = f"{group} {tier}: {1e3 * statistics.median(mine):.3f} ms"
            text += f", kernels {sides[0].digests[tier]}"
            for theirs in others:
                ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
                low, median, high = statistics.quantiles(ratios, n=4)
                same = sides[0].digests[tier] == sides[1].digests[tier]
                near = near and same and abs(median - 1) <= WITHIN
                text += f" ({'the same' if same else 'CHANGED'})"
                text += f", times the other tree's {median:.4f} [{low:.4f}, {high:.4f}]"
            print(text, flush=True)
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout to compare with")
    parser.add_argument("--groups", default="small-bf16,medium-bf16")
    parser.add_argument("--tiers", default="v1,v2,v3,v4")
    parser.add_argument("--rounds", type=whole_within(2, 10_000), default=20)
    args = parser.parse_args()
    groups, tiers = args.groups.split(","), args.tiers.split(",")
    check_known("--groups", groups, [str(group) for group in ALL])
    check_known("--tiers", tiers, TIERS)
    if args.against and not (args.against / "tinyllama/bench/steps.py").is_file():
        raise UsageError(f"--against {str(args.against)!r} is no checkout of this project")
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
