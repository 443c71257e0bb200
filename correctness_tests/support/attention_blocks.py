"""Attention's kernels in blocks of a chosen size."""

import contextlib
from collections.abc import Iterator

from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.attention.configs import BACKWARD, BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD

D = 16  # of heads up to this width, as they are padded


@contextlib.contextmanager
def blocks(rows: int, step: int, turn: int = 0, ahead: int = 0) -> Iterator[None]:
    """Every kernel owns ``rows`` rows a program and takes ``step`` a step; turn: products read
    transposes; ahead: those of the scores come first."""
    size = {"num_warps": 4, "num_stages": 2, "TURN": turn}
    queries, keys = {"QM": rows, "QN": step}, {"KN": rows, "KM": step, "AHEAD": ahead}
    with contextlib.ExitStack() as stack:
        for kind in ("fp32", "tf32x3"):
            key = {"D": D, "kind": kind}
            for length in ("short", "long"):
                stack.enter_context(FORWARD.force(Config(**queries, **size), **key, length=length))
            stack.enter_context(BACKWARD_QUERIES.force(Config(**queries, **size), **key))
            stack.enter_context(BACKWARD_KEYS.force(Config(**keys, **size), **key))
            stack.enter_context(BACKWARD.force(Config(**queries, **keys, **size), **key))
        yield
