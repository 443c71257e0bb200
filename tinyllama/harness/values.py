"""Named distributions of test inputs: ``from tinyllama.harness.values import normal``.

The public name of `tinyllama.harness.declare.values`, which declares them.
"""

from tinyllama.harness.declare.values import (
    Values,
    constant,
    integers,
    normal,
    philox,
    ranked,
    scaled_rows,
    uniform,
)

__all__ = [
    "Values",
    "constant",
    "integers",
    "normal",
    "philox",
    "ranked",
    "scaled_rows",
    "uniform",
]
