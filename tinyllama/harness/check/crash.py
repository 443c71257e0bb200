"""What an exception of a candidate says: the author's file and line, and whose limit it is."""

import dis
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import backward_pass, raised_by
from tinyllama.harness.check.finding import Candidate, Finding, Outcome
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.kernels.resources import CHIPS, compile_launch, lacking
from tinyllama.harness.machine.device import lost

_REFUSAL = "InterpreterError"  # of triton.runtime.errors: what it raises for any error of a kernel
_HARNESS = __name__.partition(".check.")[0]
_TOO_LARGE = "exceeds triton maximum"  # of a block: what Triton says to interpret and to compile it
_REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)
_OTHERS = {"torch", "triton", "numpy", *sys.stdlib_module_names}  # machinery that is no candidate's


class GpuLostError(RuntimeError):
    """No call on the GPU works in this process any more."""


def crashed(
    check: str, error: Exception, candidate: Candidate, case: OpCase | None = None
) -> Finding:
    """A finding that is CRASHED, or BLOCKED where Triton's interpreter refused a kernel that
    compiles for this case, or for the smallest where it is None, or where the candidate is not the
    one who raised it. The message begins with the author's file and line; the finding has the
    traceback.

    Raises GpuLostError if every later call on the GPU would fail, too: the checks that follow need
    a new process.
    """
    if reason := lost():
        raise GpuLostError(f"{place(error)}no call on the GPU works any more: {reason}") from error
    shown = list(_chain(error))[-1] if type(error).__name__ == _REFUSAL else error
    first = (str(shown).strip().splitlines() or [_source(error) or "no message"])[0]
    text = f"{place(error)}{type(shown).__name__}: {first}"
    details = "".join(traceback.format_exception(error))
    where = str(case or "")
    if by := raised_by_another(error, candidate):
        return Finding(check, Outcome.BLOCKED, where, f"{by} raised an error: {text}", details)
    chip = _compiles_for(candidate, case) if _refused_by_interpreter(error) else None
    if chip is None:
        return Finding(check, Outcome.CRASHED, where, text, details)
    text = f"Triton's interpreter refuses what compiles for {chip}; check it on a GPU. {text}"
    return Finding(check, Outcome.BLOCKED, where, text, details)


def raised_by_another(error: BaseException, candidate: Candidate) -> str:
    """Who raised it, in words, if the candidate did not: the reference, or a distribution of
    inputs. Nothing is known of the candidate then."""
    own = candidate.provider.call is candidate.op["eager"].call
    by = raised_by(error)
    return "" if own and by == "the reference" else by


def place(error: BaseException) -> str:
    """``FILE:LINE: `` of the author's code that raised; empty where none of it was running.

    An error that another one caused names the place of its cause.
    """
    for one in reversed(list(_chain(error))):
        for code, line, module in reversed(list(_frames(one.__traceback__))):
            top = module.partition(".")[0]
            ours = module == _HARNESS or module.startswith(f"{_HARNESS}.")
            if not (ours or top in _OTHERS or code.startswith("<")):
                return f"{code}:{line}: "
    return ""


def _source(error: BaseException) -> str:
    """The author's line that raised."""
    file, _, line = place(error)[:-2].rpartition(":")
    return linecache.getline(file, int(line)).strip() if file else ""


def place_in(details: str, file: str) -> str:
    """``FILE:LINE: `` of the innermost line of a file in the traceback of a process that ended."""
    fatal = "(most recent call first)" in details
    lines = re.findall(rf'^ *File "{re.escape(file)}", line (\d+)', details, re.MULTILINE)
    return f"{file}:{lines[0 if fatal else -1]}: " if lines else ""


def in_backward(error: BaseException) -> bool:
    """Whether it was raised in the backward pass of a call of `evaluate`."""
    walked = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is backward_pass.__code__ for frame, _ in walked)


def refuses(error: BaseException) -> bool:
    """Whether it is what a call raises that does not take its arguments: an error of these types,
    or a RuntimeError that the author's own ``raise`` made, and not torch or a device; or Triton's,
    of a block with more elements than any may have."""
    if isinstance(error, _REFUSALS) or _too_large(error):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or type(error) is not RuntimeError or not place(error):
        return False
    frame = last.tb_frame
    ours = place(error).startswith(f"{frame.f_code.co_filename}:")
    return ours and frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    for frame, line in traceback.walk_tb(trace):
        yield frame.f_code.co_filename, line, str(frame.f_globals.get("__name__", ""))


def _refused_by_interpreter(error: Exception) -> bool:
    """Whether an interpreted kernel raised what need not be raised where it is compiled: neither an
    assertion, nor that a block is too large."""
    chain = list(_chain(error))
    own = _too_large(error) or any(isinstance(one, AssertionError) for one in chain)
    return not own and any(type(one).__name__ == _REFUSAL for one in chain)


def _too_large(error: BaseException) -> bool:
    return any(isinstance(one, ValueError) and _TOO_LARGE in str(one) for one in _chain(error))


def _compiles_for(candidate: Candidate, case: OpCase | None) -> str | None:
    """A chip that all kernels of a case, else of the smallest, compile for; None without one."""
    case = case or candidate.smallest()
    chip = next((name for name in CHIPS if not lacking(name)), None)
    try:
        if chip is None:
            return None
        op, provider = candidate.op, candidate.provider
        for launch in launches_of(op, provider, case.case, case.dtype, chip=chip):
            compile_launch(launch, chip)
    except Exception:  # then the crash is the kernel's own
        return None
    return chip
