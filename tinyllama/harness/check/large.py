"""Offsets past 2^31 elements: rows that lie far apart, and offsets of 32 bits in dense tensors."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check import accuracy
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import Comparison
from tinyllama.harness.check.finding import (
    Candidate,
    Finding,
    Outcome,
    Problem,
    Rank,
    Unsupported,
    leaves,
)
from tinyllama.harness.check.graph import Graph
from tinyllama.harness.check.offsets import BF16, Far, NoAddressesError
from tinyllama.harness.check.programs import interpreted
from tinyllama.harness.declare.specs import Tensor
from tinyllama.harness.kernels.bounds import author_line, tensors_of
from tinyllama.harness.kernels.launch_cache import among

ENTRIES = 8  # along the first axis, so that an offset within an entry is small
Place = Callable[[torch.Tensor], torch.Tensor]
GAP = 64  # elements between rows that are not far apart
APART = 3  # rows that lie 2^30 elements apart: the last one begins beyond 2^31


class Int32OffsetDetector:
    """Notes the largest offset of 32 bits that all of a block have, by kernel and tensor.

    An offset within a tile begins at 0, one that a program's number is part of grows with the
    tensor, until 32 bits cannot hold it.
    enough: elements of the largest input; a tensor of fewer does not grow with it.
    found: of each kernel, in words, where such an offset passes the middle of its largest tensor.
    """

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self.found: dict[str, str] = {}
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
        if grows and launch.kernel not in self.found:
            text = f"an offset of 32 bits reaches element {least:,} of {elements:,} of {name}"
            self.found[launch.kernel] = f"{author_line()}{launch.kernel}: {text}"


def _largest(launch: Any) -> dict[int, tuple[str, int]]:
    """The arguments of a launch with the most elements, by the numbers of their storages."""
    tensors = list(tensors_of(launch.arguments))
    most = max((tensor.numel() for _, tensor in tensors), default=0)
    return {
        launch.origins.get(tensor.untyped_storage().data_ptr(), 0): (name, most)
        for name, tensor in tensors
        if tensor.numel() == most
    }


def large_offsets(candidate: Candidate) -> Problem | Finding:
    """Results are right for inputs and upstream gradients whose rows lie 2^30 elements apart. Where
    they are wrong for rows that lie a little apart, too, that is a fault of their layout. An
    offset of 32 bits that grows with a dense tensor is advice: beyond 2^31 elements it is wrong."""
    interpreted(candidate)
    problem: Problem | Finding = None
    missing = None
    try:
        problem = _far_rows(candidate)
    except Unsupported as reason:
        missing = reason
    if problem or (problem := _narrow_offsets(candidate)):
        return problem
    if missing:
        raise missing
    return None


def _narrow_offsets(candidate: Candidate) -> Problem:
    from tinyllama.harness.kernels import interpreter_values

    if candidate.op.mutated:
        return None
    try:
        case = _with_entries(candidate, ENTRIES, candidate.dtypes[0])
    except Unsupported:
        return None
    inputs = candidate.inputs(case)
    narrow = Int32OffsetDetector(max(value.numel() for value in leaves(inputs.args)))
    with among(interpreter_values.SUMS, narrow.note):
        candidate.shielded().results(inputs)
    text = "; ".join(narrow.found.values())
    text += "; for more than 2^31 elements it must be int64" if text else ""
    return (case, text, Rank.WARNING) if text else None


def _far_rows(candidate: Candidate) -> Problem | Finding:
    if BF16 not in candidate.dtypes:
        raise Unsupported("it takes no bfloat16, the one dtype in which this is tried")
    case = _with_entries(candidate, APART, BF16)
    try:
        far = Far()
    except NoAddressesError as error:
        raise Unsupported(f"2^31 elements cannot have addresses here: {error}") from error
    if not (wrong := _wrong(candidate, case, far)):
        return None
    for cause, upstream in ((accuracy.LAYOUTS, False), (accuracy.UPSTREAMS, True)):
        if near := _wrong(candidate, case, _a_little_apart, upstream):
            text = f"so it is for rows that lie {GAP} elements apart: {near[0]}"
            return Finding("large offsets", Outcome.FAILED, str(case), text, cause=cause)
    return case, str(wrong[0])


def _wrong(
    candidate: Candidate, case: OpCase, place: Place, upstream: bool = True
) -> list[Comparison]:
    """What is wrong where inputs, and upstream gradients if asked, have their rows placed so."""
    op, inputs, axis = candidate.op, candidate.inputs(case), _first_axis(candidate)

    def is_placed(value: Any, declared: Tensor) -> bool:
        has_rows = isinstance(value, torch.Tensor) and declared.axes[:1] == (axis,)
        return has_rows and value.dtype is BF16

    def apart(values: Mapping[str, Any], declared: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: place(value) if is_placed(value, declared[name]) else value
            for name, value in values.items()
        }

    if not any(is_placed(value, op.inputs[name]) for name, value in inputs.args.items()):
        raise Unsupported(f"no input that it takes in bfloat16 has the first axis {axis}")
    placed = replace(
        inputs,
        args=apart(inputs.args, op.inputs),
        upstream=apart(inputs.upstream, op.outputs) if upstream else inputs.upstream,
    )
    graph = Graph(candidate, placed, prepare=lambda value: value.detach())
    results = {name: value.detach() for name, value in graph.outputs.items()}
    if op.differentiable:
        gradients = graph.gradients(lambda gradient: gradient)
        results |= {f"grad {name}": value for name, value in gradients.items()}
    return candidate.wrong(case, results, inputs)


def _a_little_apart(x: torch.Tensor) -> torch.Tensor:
    rows = x.new_zeros(len(x), x[0].numel() + GAP)
    return rows[:, : x[0].numel()].view_as(x).copy_(x)


def _first_axis(candidate: Candidate) -> str:
    return next(iter(candidate.op.inputs.values())).axes[0]


def _with_entries(candidate: Candidate, entries: int, dtype: torch.dtype) -> OpCase:
    """The smallest case of rows that are not trivial, with so many entries along the first axis.

    Raises Unsupported where the provider covers none.
    """
    axis = _first_axis(candidate)
    for case in candidate.plain():
        size = case.case.dims[axis]
        if candidate.op.mutated or not isinstance(size, int) or case.dtype is not dtype:
            continue
        resized = replace(case, case=case.case.resized(**{axis: entries}))
        if elements(candidate.op, case.case) >= 16 * size and resized.unsupported() is None:
            return resized
    raise Unsupported(f"no case that it covers can have {entries} entries along {axis}")
