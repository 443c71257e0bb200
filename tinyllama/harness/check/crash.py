"""What an exception of a candidate says: the author's file and line, and whose limit it is."""

import linecache
import traceback
from collections.abc import Iterator

from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.code_numbers import LIBRARIES
from tinyllama.harness.check.evaluate import backward_pass, raised_by
from tinyllama.harness.check.finding import Finding, GpuLostError, Outcome, Rank
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.kernels.resources import CHIPS, compilation, lacking
from tinyllama.harness.machine.device import lost

_INTERPRETER = "InterpreterError"  # of triton.runtime.errors: what it raises for any error
_CHECKS = __name__.rpartition(".")[0]
_HARNESS = _CHECKS.rpartition(".")[0]
_TOO_LARGE = "exceeds triton maximum"  # of a block: what Triton says to interpret and to compile it
_NO_RULE = "There was no rule registered for"  # of torch, about a mode that the harness enters
# What the interpreter raises where a GPU would go on, with whatever result, or for ever.
_UNDEFINED = {"AccessError", "EndlessError", "EndlessLoopError", "FalseHintError"}


def crashed(
    check: str, error: Exception, candidate: Candidate, case: OpCase | None = None
) -> Finding:
    """A finding that is CRASHED, with the author's file and line and the traceback, and unsafe
    where a GPU would go on; or BLOCKED if the candidate is not to blame: the reference or a
    distribution raised, the check itself did, or Triton's interpreter refused a kernel that
    compiles for this case (None: the smallest one).

    Raises GpuLostError if every later call on the GPU would fail, too: the checks that follow need
    a new process.
    """
    if reason := lost():
        raise GpuLostError(f"{place(error)}no call on the GPU works any more: {reason}") from error
    cause = list(_chain(error))[-1] if type(error).__name__ == _INTERPRETER else error
    first = (str(cause).strip().splitlines() or [_source(error) or "no message"])[0]
    text = f"{place(error)}{type(cause).__name__}: {first}"
    reason = ""
    if raiser := raised_by_another(error, candidate):
        reason = f"{raiser} raised an error: "
    elif _of_harness(error):
        reason = "the check itself raised an error, which says nothing about the candidate: "
    elif _refused_by_interpreter(error) and (chip := _compiles_for(candidate, case)):
        reason = f"Triton's interpreter refuses what compiles for {chip}; check it on a GPU. "
    outcome = Outcome.BLOCKED if reason else Outcome.CRASHED
    details = "".join(traceback.format_exception(error))
    undefined = type(cause).__name__ in _UNDEFINED or "Assume failed" in str(cause)
    rank = Rank.UNSAFE if undefined and not reason else None
    return Finding(check, outcome, str(case or ""), reason + text, details, special=rank)


def raised_by_another(error: BaseException, candidate: Candidate) -> str:
    """Who raised it, in words, if the candidate did not: the reference, or a distribution of
    inputs. Nothing is known of the candidate then."""
    raiser = raised_by(error)
    reference = candidate.provider.call is candidate.op["eager"].call
    return "" if reference and raiser == "the reference" else raiser


def place(error: BaseException) -> str:
    """``FILE:LINE: `` of the author's code that raised; empty where none of it was running.

    An error that another one caused names the place of its cause.
    """
    for cause in reversed(list(_chain(error))):
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
            library = module.partition(".")[0] in LIBRARIES
            harness = f"{module}.".startswith(f"{_HARNESS}.")
            if not (library or harness or file.startswith("<")):
                return f"{file}:{line}: "
    return ""


def in_backward(error: BaseException) -> bool:
    """Whether it was raised in the backward pass of a call of `evaluate`."""
    walked = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is backward_pass.__code__ for frame, _ in walked)


def _of_harness(error: BaseException) -> bool:
    """Whether a check raised it, and not what it called: the innermost frame is one of a check's,
    or torch has no rule for a mode that the check entered. `evaluate` calls the candidate, and a
    dispatch mode its operations: their innermost frame says nothing."""
    if isinstance(error, NotImplementedError) and _NO_RULE in str(error):
        return "and mode" in str(error)
    cause = list(_chain(error))[-1]
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    callers = (f"{_CHECKS}.evaluate", f"{_CHECKS}.finding")
    dispatching = frames and frames[-1].f_code.co_name.startswith("__torch_")
    return module.startswith(f"{_CHECKS}.") and module not in callers and not dispatching


def _source(error: BaseException) -> str:
    """The author's line that raised."""
    file, _, line = place(error)[:-2].rpartition(":")
    return linecache.getline(file, int(line)).strip() if file else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _refused_by_interpreter(error: Exception) -> bool:
    """Whether an interpreted kernel raised what need not be raised where it is compiled: neither an
    assertion, nor that a block is too large."""
    asserted = any(isinstance(cause, AssertionError) for cause in _chain(error))
    refused = any(type(cause).__name__ == _INTERPRETER for cause in _chain(error))
    return refused and not asserted and not _too_large(error)


def _too_large(error: BaseException) -> bool:
    return any(isinstance(e, ValueError) and _TOO_LARGE in str(e) for e in _chain(error))


def _compiles_for(candidate: Candidate, case: OpCase | None) -> str | None:
    """A chip that all kernels of a case, else of the smallest, compile for; None without one."""
    case = case or candidate.smallest()
    chip = next((name for name in CHIPS if not lacking(name)), None)
    try:
        if chip is None:
            return None
        op, provider = candidate.op, candidate.provider
        for launch in launches_of(op, provider, case.case, case.dtype, chip=chip):
            compilation(launch, chip).run()
    except Exception:  # then the crash is the kernel's own
        return None
    return chip
