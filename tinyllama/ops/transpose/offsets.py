"""The transpose at offsets past 2^31."""

from tinyllama.harness.declare.offsets import Ends, Pairs
from tinyllama.ops.transpose import transpose, transposed


@transpose.many_programs
def many_columns(ends: Ends) -> Pairs:
    width = 64
    rows = 2**31 // width + 2
    return ends(lambda x: [transposed(x).T], 1, ends.room(rows * width).view(rows, width))
