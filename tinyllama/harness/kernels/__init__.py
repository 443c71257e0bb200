"""Kernels: the door to Triton, configurations, and what the compiler says of what was compiled.

from tinyllama.harness.kernels import jit, tl
"""

from tinyllama.harness.kernels.launch import (
    HAS_DESCRIPTORS,
    HAS_TRITON,
    begin,
    cdiv,
    chip_of,
    dependent,
    described,
    dot_precisions,
    fetch,
    jit,
    let_next_start,
    next_power_of_2,
    processors_of,
    recorded,
    tl,
    wait_for_last,
)
from tinyllama.harness.kernels.tuned import adopted

__all__ = [
    "HAS_DESCRIPTORS",
    "HAS_TRITON",
    "adopted",
    "begin",
    "cdiv",
    "chip_of",
    "dependent",
    "described",
    "dot_precisions",
    "fetch",
    "jit",
    "let_next_start",
    "next_power_of_2",
    "processors_of",
    "recorded",
    "tl",
    "wait_for_last",
]
