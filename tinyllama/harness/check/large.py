"""Offsets past 2^31 elements: rows that lie far apart, and offsets of 32 bits in dense tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.finding import Candidate, Problem, Rank, Unsupported, leaves
from tinyllama.harness.check.history import Graph
from tinyllama.harness.check.offsets import Far, NoAddressesError
from tinyllama.harness.check.programs import interpreted
from tinyllama.harness.declare.specs import Tensor
from tinyllama.harness.kernels.bounds import author_line, tensors_of
from tinyllama.harness.kernels.launch_cache import among

ENTRIES = 8  # along the first axis, so that an offset within an entry is small
FAR_ROWS = 3  # rows that lie 2^30 elements apart: the last one begins beyond 2^31


class Int32OffsetDetector:
    """Notes the largest offset of 32 bits that all of a block have, by kernel and tensor.

    An offset within a tile begins at 0, one that a program's number is part of grows with the
    tensor, until 32 bits cannot hold it.
    enough: elements of the largest input; a tensor of fewer does not grow with it.
    by_kernel: in words, where such an offset passes the middle of its largest tensor.
    """

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self.by_kernel: dict[str, str] = {}
        self._launch: Any = None
        self._tensors: dict[int, tuple[str, int]] = {}

    def note(self, pointers: Any, offsets: Any) -> None:
        from tinyllama.harness.kernels import interpreter, interpreter_values

        if not np.size(offsets) or np.asarray(offsets).dtype.itemsize > 4:
            return
        launch, _ = interpreter.running()
        if launch is not self._launch:
            self._launch = launch
            self._tensors = _largest(launch)
        number = int(np.asarray(pointers).flat[0]) >> interpreter_values.ADDRESS_BITS
        name, elements = self._tensors.get(number, ("", 0))
        least = int(np.min(offsets))
        grows = elements >= self.enough and elements // 2 <= least < elements
        if grows and launch.kernel not in self.by_kernel:
            text = f"an offset of 32 bits reaches element {least:,} of {elements:,} of {name}"
            self.by_kernel[launch.kernel] = f"{author_line()}{launch.kernel}: {text}"


def _largest(launch: Any) -> dict[int, tuple[str, int]]:
    """The arguments of a launch with the most elements, by the numbers of their storages."""
    tensors = list(tensors_of(launch.arguments))
    most = max((tensor.numel() for _, tensor in tensors), default=0)
    return {
        launch.origins.get(tensor.untyped_storage().data_ptr(), 0): (name, most)
        for name, tensor in tensors
        if tensor.numel() == most
    }


def large_offsets(candidate: Candidate) -> Problem:
    """Results are right for inputs and upstream gradients whose rows lie 2^30 elements apart.

    An offset of 32 bits that grows with a dense tensor is a warning: beyond 2^31 elements it is
    wrong.
    """
    interpreted(candidate)
    if candidate.op.mutated:
        raise Unsupported("it works in place")
    try:
        problem, reason = _far_rows(candidate), ""
    except Unsupported as error:
        problem, reason = None, str(error)
    problem = problem or _narrow_offsets(candidate)
    if problem is None and reason:
        raise Unsupported(reason)
    return problem


def _narrow_offsets(candidate: Candidate) -> Problem:
    from tinyllama.harness.kernels import interpreter_values

    try:
        case = _with_entries(candidate, ENTRIES, candidate.dtypes[0])
    except Unsupported:
        return None
    inputs = candidate.inputs(case)
    narrow = Int32OffsetDetector(max(value.numel() for value in leaves(inputs.args)))
    with among(interpreter_values.SUMS, narrow.note):
        candidate.results(inputs, watched=False)
    if not narrow.by_kernel:
        return None
    text = "; ".join(narrow.by_kernel.values())
    return case, f"{text}; for more than 2^31 elements it must be int64", Rank.WARNING


def _far_rows(candidate: Candidate) -> Problem:
    if candidate.provider.contiguous:
        raise Unsupported("it takes contiguous inputs alone")
    op, axis = candidate.op, _first_axis(candidate)
    dtype = min(candidate.dtypes, key=lambda dtype: dtype.itemsize)  # of the fewest bytes
    case = _with_entries(candidate, FAR_ROWS, dtype)
    try:
        far = Far(dtype)
    except NoAddressesError as error:
        raise Unsupported(f"2^31 elements cannot have addresses here: {error}") from error
    inputs = candidate.inputs(case)

    def placed(values: Mapping[str, Any], declared: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: far(value)
            if isinstance(value, torch.Tensor)
            and value.dtype is dtype
            and declared[name].axes[:1] == (axis,)
            else value
            for name, value in values.items()
        }

    args, upstream = placed(inputs.args, op.inputs), placed(inputs.upstream, op.outputs)
    if all(value is inputs.args[name] for name, value in args.items()):
        raise Unsupported(f"no input of floating-point numbers has the first axis {axis}")
    in_place = replace(inputs, args=args, upstream=upstream)
    graph = Graph(candidate, in_place, prepare=lambda value: value.detach())
    wrong = candidate.wrong(case, graph.results(lambda gradient: gradient), inputs)
    return (case, str(wrong[0])) if wrong else None


def _first_axis(candidate: Candidate) -> str:
    return next(iter(candidate.op.inputs.values())).axes[0]


def _with_entries(candidate: Candidate, entries: int, dtype: torch.dtype) -> OpCase:
    """The smallest case of rows that are not trivial, with so many entries along the first axis.

    Raises Unsupported where the provider covers none.
    """
    axis = _first_axis(candidate)
    for case in candidate.plain_cases():
        size = case.case.dims[axis]
        if not isinstance(size, int) or case.dtype is not dtype:
            continue
        resized = replace(case, case=case.case.resized(**{axis: entries}))
        if elements(candidate.op, case.case) >= 16 * size and resized.unsupported() is None:
            return resized
    raise Unsupported(f"no case that it covers can have {entries} entries along {axis}")
