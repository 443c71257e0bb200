"""Kernels: the door to Triton, configurations, and what the compiler says of what was compiled.

    from tinyllama.harness.kernels import jit, tl

launch                  what a launch does: run, interpret, record
chips, kernel_names     what the compiler offers for a chip; what a kernel is called
tuned, foreign, gluon   kernels under triton.autotune, of other projects, in Gluon
configs                 spaces of configurations, and the choices of each chip

launch_cache            which compiled kernel a launch like an earlier one takes
descriptors, plans      descriptors of tensors; calls whose steps are repeated
layout, copying         contiguity at the boundary, and the one copy
parameter_memory, addresses, streams, grid_barrier, precision, tf32     what kernels are given

interpreter             one launch in numpy: a list of what is unlike Triton's own interpreter
  language, libdevice   the language meanwhile, and functions of libdevice
  interpreter_values, interpreter_reductions    values and accesses; scans and reductions
  interpreter_speed     operators of plain types, by one call of numpy
  bounds, compiler_hints, programs     accesses out of bounds, false hints, orders of programs

resources               what is compiled for a chip that need not be there, and its limits
  assembly              registers, spills, widths and products, read from the compiler's output

Private names of Triton are used by launch, launch_cache, chips, resources, gluon, foreign, tf32,
language, libdevice and the interpreter's files; those that differ between triton 3.3 and 3.9 are
asked for there.
"""

from tinyllama.harness.kernels.chips import chip_of, dependent, dot_precisions, processors_of
from tinyllama.harness.kernels.launch import (
    HAS_DESCRIPTORS,
    HAS_TRITON,
    begin,
    cdiv,
    described,
    fetch,
    jit,
    let_next_start,
    next_power_of_2,
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
