"""An op with fewer of its cases."""

import copy
from collections.abc import Collection

import torch

from tinyllama.harness import Case, Op


def narrowed(op: Op, cases: Collection[Case], dtypes: Collection[torch.dtype] = ()) -> Op:
    """The op with these cases alone; dtypes: empty for its own."""
    narrow = copy.copy(op)
    narrow.cases, narrow.dtypes = list(cases), tuple(dtypes) or op.dtypes
    return narrow
