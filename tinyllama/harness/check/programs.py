"""What only shows among several programs: races, and their order."""

from typing import Any

import numpy as np

from tinyllama.harness.check.compare import same_bits
from tinyllama.harness.check.finding import NO_KERNELS, Candidate, Problem, Rank, Unsupported
from tinyllama.harness.kernels.bounds import watched
from tinyllama.harness.kernels.kernel_names import identity
from tinyllama.harness.kernels.programs import NAMES, ordered


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
