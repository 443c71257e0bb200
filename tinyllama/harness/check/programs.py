"""What only interpreted programs show: races, their order, and offsets past 2^31 elements.

Untouched memory is only addresses. So rows may lie 2^30 elements apart.
"""

import contextlib
import errno
import mmap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tinyllama.harness.check.candidate import NO_KERNELS, Candidate, Problem, Unsupported, leaves
from tinyllama.harness.check.cases import OpCase, elements
from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.finding import Rank
from tinyllama.harness.check.history import Graph
from tinyllama.harness.declare.specs import Tensor
from tinyllama.harness.kernels.bounds import author_line, tensors_of, watched
from tinyllama.harness.kernels.kernel_names import identity
from tinyllama.harness.kernels.launch_cache import among
from tinyllama.harness.kernels.programs import NAMES, ordered

ENTRIES = 8  # along the first axis, so that an offset within an entry is small
FAR_ROWS = 3  # rows that lie 2^30 elements apart: the last one begins beyond 2^31
BEYOND = 2**31
APART = 2**30 + 64  # elements; a stride of more would itself have 64 bits, and hide a narrow row
BF16 = torch.bfloat16


class RaceDetector:
    """Notes the addresses that each program of a launch stores without an atomic.

    races: kernel -> what was seen, with its file and line, where two programs of a launch stored
    one address.
    """

    def __init__(self) -> None:
        self.races: dict[str, str] = {}
        self._launch: Any = None
        self._stored: dict[tuple[int, ...], list[Any]] = {}

    def watch(self, addresses: Any, accessed: Any, size: int, kind: str) -> Any:
        from tinyllama.harness.kernels import interpreter, interpreter_values

        if kind != "store":
            return None
        launch, program = interpreter.running()
        if launch is not self._launch:
            self.close()
            self._launch = launch
        in_storage = np.asarray(addresses) & interpreter_values.ADDRESS
        stored = in_storage[np.broadcast_to(accessed, np.shape(addresses))]
        self._stored.setdefault(program, []).append(stored.ravel())
        return None

    def close(self) -> None:
        """Judge the last launch."""
        stored = {program: np.unique(np.concatenate(a)) for program, a in self._stored.items()}
        self._stored = {}
        if not stored:
            return
        addresses, times = np.unique(np.concatenate([*stored.values()]), return_counts=True)
        shared = addresses[times > 1]
        if len(shared):
            first, second, *_ = (program for program, a in stored.items() if shared[0] in a)
            kernel, code = identity(self._launch), self._launch.fn.__code__
            text = f"{kernel} ({code.co_filename}:{code.co_firstlineno}): two programs of a launch "
            text += f"store to {len(shared)} addresses, the first one by programs {first}, {second}"
            self.races.setdefault(kernel, text)


def races(candidate: Candidate) -> Problem:
    """No two programs of a launch store to one address without an atomic, in any plain case."""
    interpreted(candidate)
    for case in candidate.plain_cases():
        if case.dtype is not candidate.dtypes[0]:
            continue
        stores, raised = RaceDetector(), None
        with watched(stores.watch):
            try:
                candidate.results(candidate.inputs(case), watched=False)
            except Exception as error:
                raised = error
        stores.close()
        for kernel, text in stores.races.items():
            if kernel not in candidate.provider.races:
                return case, f"{text}; where a lock or equal values make it right, declare races="
        if raised is not None:
            raise raised
    return None


def program_order(candidate: Candidate) -> Problem:
    """Results are right in whatever order programs run, in any plain case; and they have equal
    bits where that is declared for GPUs: else that is a warning."""
    interpreted(candidate)
    launched: set[str] = set()
    warning: Problem = None  # a wrong result in a later order is worse
    exact = "cuda" in candidate.provider.deterministic
    for case in candidate.plain_cases():
        if case.dtype is not candidate.dtypes[0]:
            continue
        inputs = candidate.inputs(case)
        references = case.references(inputs)
        in_order = candidate.results(inputs)
        for name in NAMES:
            with ordered(name, candidate.seed) as kernels:
                results = candidate.results(inputs)
            launched |= kernels
            if wrong := candidate.wrong(case, results, inputs, references):
                return case, f"programs {name}: {wrong[0]}"
            changed = [n for n, value in results.items() if not same_bits(value, in_order[n])]
            if exact and changed and not warning:
                text = f"programs {name}: other bits of {', '.join(changed)}; "
                warning = case, f"{text}declare deterministic={{'cpu'}}", Rank.WARNING
    if not launched:
        raise Unsupported("it launches no kernel")
    return warning


def interpreted(candidate: Candidate) -> None:
    """Raises Unsupported where no kernel is interpreted."""
    if candidate.device.type != "cpu":
        raise Unsupported("it is seen where kernels of Triton's are interpreted: use --device cpu")
    if not candidate.interpreted:
        raise Unsupported(NO_KERNELS)


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

    def placed(
        values: Mapping[str, Any], declared: Mapping[str, Tensor], least_axes: int = 1
    ) -> dict[str, Any]:
        return {
            name: far(value)
            if isinstance(value, torch.Tensor)
            and value.dtype is dtype
            and declared[name].axes[:1] == (axis,)
            and len(declared[name].axes) >= least_axes
            else value
            for name, value in values.items()
        }

    # A gradient of one number a row, as of losses, is not spread over 2^31 elements by anybody.
    args, upstream = placed(inputs.args, op.inputs), placed(inputs.upstream, op.outputs, 2)
    if all(value is inputs.args[name] for name, value in args.items()):
        raise Unsupported(f"no input of floating-point numbers has the first axis {axis}")
    in_place = replace(inputs, args=args, upstream=upstream)
    graph = Graph(candidate, in_place, prepare=lambda value: value.detach())
    wrong = candidate.wrong(case, graph.results([*graph.upstream.values()]), inputs)
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


class NoAddressesError(RuntimeError):
    """The system promises no memory that it may not have."""


class Far:
    """Puts tensors into one room of zeros, of which only what is touched takes memory; slices of an
    axis lie ``APART`` elements from each other. Raises NoAddressesError."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        size = (BEYOND + 2**25) * dtype.itemsize
        try:
            block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise NoAddressesError(str(error)) from error
        with contextlib.suppress(OSError):  # a system without huge pages
            block.madvise(mmap.MADV_NOHUGEPAGE)
        self._room, self._next = torch.frombuffer(block, dtype=dtype), 0

    def __call__(self, x: torch.Tensor, axis: int = 0) -> torch.Tensor:
        sizes = [n for i, n in enumerate(x.shape) if i != axis]
        strides = list(torch.empty(sizes, device="meta").stride())
        strides.insert(axis, APART)
        view = self._room.as_strided(x.shape, strides, self._next)
        self._next += x.numel() // x.shape[axis]
        return view.copy_(x)
