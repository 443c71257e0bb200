"""The ops, one file each; every module here is found, and its declarations are registered, when
`OPS` is first used. One op's file imports no other op for that.

Dimension names, used in declarations and as suffixes on tensors:

    B batch   T time (sequence length)   N tokens (B x T)     D model width
    H query heads   G key/value heads   K head width   C = K / 2 rotated pairs
    Q = H x K   R = G x K   F feed-forward width   V vocabulary   P parameters

    from tinyllama.ops import OPS
    from tinyllama.ops.rms_norm import rms_norm
    y = rms_norm(x, weight, eps=1e-5, provider="torch")
"""

from typing import TYPE_CHECKING

from tinyllama.harness.declare.registry import discover

if TYPE_CHECKING:
    from tinyllama.harness.declare.registry import Registry

    OPS: Registry


def __getattr__(name: str) -> "Registry":
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = registry = discover(__name__)
    return registry
