"""Programs of an interpreted launch in another order than 0, 1, 2, and interleaved.

    with ordered(Order("reversed")) as launched: ...    # names of the kernels that were launched

A GPU runs the programs of a launch in any order, many at a time, and the stores of a block become
visible to other programs at a barrier or at the end. Triton's interpreter runs one program after
the other. Here each program has a thread, of which one at a time has its turn:

* "reversed" and "shuffled": a program runs to its end, unless it waits for another one;
* "interleaved": the turn goes on before each store, so that others read what it is about to change,
  and after each atomic. A program that stored a block and made an atomic without a barrier between
  them is held back, its store unseen, while others get on: threads that have not met at a barrier
  may still be writing when one of them releases a lock.
"""

import contextlib
import contextvars
import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tinyllama.harness.kernels.launch_cache import among

Program = tuple[int, int, int]
Write = Callable[[], None]

TOGETHER = 64  # programs that run at a time, and how many more if all of them wait
PATIENCE = 20  # scalar loads and atomics without a store after which a program is taken to wait
ROUNDS = 4  # of turns without a store after which all are taken to wait
ENDLESS = 20_000  # the same, of all programs of a launch


class FirstAndLastPrograms:
    """Of each launch, the first and the last programs along the longest axis of its grid are run,
    with all places along the others; the rest is left out.

    most: programs along such an axis.
    """

    def __init__(self, each: int) -> None:
        self.each, self.most = each, 0


_ENDS: list[FirstAndLastPrograms] = []


def ends(each: int) -> "contextlib.AbstractContextManager[FirstAndLastPrograms]":
    """Meanwhile, only so many programs at each end of a launch are run."""
    return among(_ENDS, FirstAndLastPrograms(each))


class GridError(ValueError):
    """A launch that a GPU refuses: the second or third axis of its grid is too long."""

    MOST = 65_535  # CUDA programming guide, "Maximum y- or z-dimension of a grid"; also with HIP


def fitting(grid: tuple[int, ...], kernel: str) -> None:
    """Raises GridError for a grid that a GPU refuses."""
    for axis, size in zip(("second", "third"), grid[1:], strict=False):
        if size > GridError.MOST:
            raise GridError(
                f"{kernel}: a grid of {size:,} programs along the {axis} axis, where a GPU takes "
                f"{GridError.MOST:,}: put the long axis first"
            )


class EndlessError(AssertionError):
    """Programs that wait for each other, or for one that never stores what they wait for."""


class _StoppedError(BaseException):
    """FirstAndLastPrograms a thread whose launch has failed."""


@dataclass(frozen=True)
class Order:
    """name: one of `NAMES`. kernel: only launches of this one (``file.function``) are ordered so,
    if given."""

    name: str
    kernel: str | None = None
    seed: int = 0

    def arranged(self, programs: list[Program]) -> list[Program]:
        if self.name == "reversed":
            return programs[::-1]
        if self.name == "shuffled":
            return random.Random(self.seed).sample(programs, len(programs))
        return programs


NAMES = ("reversed", "shuffled", "interleaved")
_ORDERS: list[tuple[Order, dict[str, str]]] = []
_LAUNCHES: "list[_Launch]" = []


@contextlib.contextmanager
def ordered(order: Order) -> Iterator[dict[str, str]]:
    """Meanwhile, programs of interpreted launches run in this order; the names of their kernels,
    with file and line."""
    with among(_ORDERS, (order, dict[str, str]())) as (_, launched):
        yield launched


def launched(kernel: str, function: Callable[..., Any]) -> None:
    """A kernel is about to be launched."""
    if _ORDERS:
        code = function.__code__
        _ORDERS[-1][1][kernel] = f"{code.co_filename}:{code.co_firstlineno}"


def scheduled(
    function: Callable[..., Any], kernel: str, builder: Any, grid: tuple[int, ...]
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """What the interpreter is to call for each program of a grid, and of which grid: a kernel's
    function itself, or what runs all programs in order once it was called for the last one, or what
    runs those at the ends of a grid when it is called for a smaller one.

    builder: the interpreter's, which holds the current program.
    """
    if _ENDS:
        ends = _AtEnds(function, builder, grid, _ENDS[-1])
        return ends, ends.called_for
    if not _ORDERS or _ORDERS[-1][0].kernel not in (None, kernel):
        return function, grid
    return _Launch(function, _ORDERS[-1][0], builder), grid


def stored(write: Write, elements: int) -> None:
    """Store now, or when the store becomes visible."""
    if not _LAUNCHES:
        return write()
    return _LAUNCHES[-1].stored(write, elements)


def loaded(elements: int) -> None:
    """A load is about to be made."""
    if _LAUNCHES:
        _LAUNCHES[-1].loaded(elements)


def barrier() -> None:
    """All threads of the program have come here."""
    if _LAUNCHES:
        _LAUNCHES[-1].flush()


def atomic_done(elements: int) -> None:
    """An atomic was made."""
    if _LAUNCHES:
        _LAUNCHES[-1].atomic(elements)


class _Thread:
    """A program that runs while it has its turn."""

    def __init__(self, program: Program, run: Callable[[], Any]) -> None:
        self.program = program
        self.pending: list[Write] = []  # stores that others do not see yet
        self.accesses = 0  # since its last store or turn
        self.error: BaseException | None = None
        self.ended = self.stopped = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main, run), daemon=True)
        self._thread.start()

    def _main(self, run: Callable[[], Any]) -> None:
        self._turn.acquire()
        try:
            if not self.stopped:
                run()
        except _StoppedError:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def resume(self) -> None:
        """Give it the turn, until it gives it back or ends."""
        self._turn.release()
        self._back.acquire()

    def give_back(self) -> None:
        """From inside: let others go on first."""
        self.accesses = 0
        self._back.release()
        self._turn.acquire()
        if self.stopped:
            raise _StoppedError

    def stop(self) -> None:
        self.stopped = True
        while not self.ended:
            self.resume()
        self._thread.join()


class _Called:
    """A kernel's function for the interpreter's loop over the programs of a grid."""

    def __init__(self, function: Callable[..., Any], builder: Any) -> None:
        self._function, self._builder = function, builder
        # What the interpreter reads of a function.
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__signature__ = inspect.signature(function)
        self.__annotations__ = function.__annotations__


class _AtEnds(_Called):
    """One of which the programs at the ends of a grid's longest axis alone are run.

    called_for: a grid of as many programs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        builder: Any,
        grid: tuple[int, ...],
        ends: FirstAndLastPrograms,
    ) -> None:
        super().__init__(function, builder)
        self._grid, self._each = (*grid, *[1] * (3 - len(grid))), ends.each
        programs, axis = max((size, -axis) for axis, size in enumerate(self._grid))
        self._axis, self._left_out = -axis, max(0, programs - 2 * ends.each)
        ends.most = max(ends.most, programs)
        self.called_for = self._moved(self._grid, -self._left_out)

    def _moved(self, places: tuple[int, ...], by: int) -> tuple[int, ...]:
        axis = self._axis
        return (*places[:axis], places[axis] + by, *places[axis + 1 :])

    def __call__(self, **arguments: Any) -> None:
        place = self._builder.grid_idx
        self._builder.grid_dim = self._grid
        if place[self._axis] >= self._each:
            self._builder.grid_idx = self._moved(place, self._left_out)
        self._function(**arguments)


class _Launch(_Called):
    """One whose programs run in an order."""

    def __init__(self, function: Callable[..., Any], order: Order, builder: Any) -> None:
        super().__init__(function, builder)
        self._order = order
        self._programs: list[Program] = []
        self._current: _Thread | None = None
        self._held: list[_Thread] = []  # the last one was held back last
        self._idle = 0  # accesses since any store
        self._progress = 0  # stores, and programs that ended

    def __call__(self, **arguments: Any) -> None:
        self._programs.append(tuple(self._builder.grid_idx))
        if len(self._programs) == math.prod(self._builder.grid_dim):
            with among(_LAUNCHES, self):
                self._run(arguments)

    def _run(self, arguments: dict[str, Any]) -> None:
        waiting = self._order.arranged(self._programs)
        threads: list[_Thread] = []
        together, idle_rounds = TOGETHER, 0
        try:
            while waiting or threads:
                while waiting and len(threads) < together:
                    program = waiting.pop(0)
                    threads.append(_Thread(program, lambda: self._function(**arguments)))
                before = self._progress
                for thread in [thread for thread in threads if thread not in self._held]:
                    self._resume(thread)
                idle_rounds = 0 if self._progress > before else idle_rounds + 1
                if idle_rounds > ROUNDS or len(self._held) == len(threads):
                    idle_rounds, together = 0, together + TOGETHER
                    if self._held:  # what the last one read is what others stored unseen
                        self._resume(self._held.pop())
                threads = [thread for thread in threads if not thread.ended]
        finally:
            for thread in threads:
                thread.stop()

    def _resume(self, thread: _Thread) -> None:
        self._builder.grid_idx = thread.program
        self._current = thread
        thread.resume()
        if thread.ended:
            self.flush()
            self._advance()
        if thread.error is not None:
            raise thread.error

    # -- from inside of a program's thread ----------------------------------------------------

    def stored(self, write: Write, elements: int) -> None:
        thread = self._own()
        self._advance()
        if self._order.name != "interleaved":
            thread.accesses = 0
            return write()
        thread.give_back()
        if elements > 1:
            thread.pending.append(write)
        else:  # one thread of the program stores it, the one that makes scalar atomics
            write()
        return None

    def loaded(self, elements: int) -> None:
        self.flush()
        if elements == 1:
            self._waits()

    def atomic(self, elements: int) -> None:
        if elements == 1:
            self._waits()
        if self._order.name == "interleaved":
            thread = self._own()
            if thread.pending:
                self._held.append(thread)
            thread.give_back()
            self.flush()

    def flush(self) -> None:
        """Make the stores of the current program visible."""
        thread = self._own()
        for write in thread.pending:
            write()
        thread.pending.clear()

    def _waits(self) -> None:
        thread = self._own()
        thread.accesses += 1
        self._idle += 1
        if self._idle > ENDLESS:
            raise EndlessError(f"programs wait for each other: {ENDLESS:,} accesses and no store")
        if thread.accesses > PATIENCE:
            thread.give_back()

    def _advance(self) -> None:
        self._idle = 0
        self._progress += 1

    def _own(self) -> _Thread:
        assert self._current is not None
        return self._current
