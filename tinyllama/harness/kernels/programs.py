"""Programs of an interpreted launch in another order than 0, 1, 2, and interleaved.

    with ordered("reversed") as launched: ...    # names of the kernels that were launched

A GPU runs the programs of a launch in any order, many at a time, and the stores of a block become
visible to other programs at a barrier or at the end. Triton's interpreter runs one program after
the other. Here each program has a thread, of which one at a time has its turn:

* "reversed" and "shuffled": a program runs to its end, unless it waits for another one;
* "interleaved": the turn goes on before each store, so that others read what it is about to change,
  and after each atomic. A program that stored a block and made an atomic without a barrier between
  them is suspended, its store unseen, while others get on: threads that have not met at a barrier
  may still be writing when one of them releases a lock.
"""

import contextlib
import contextvars
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tinyllama.harness.kernels.launch_cache import among

Program = tuple[int, int, int]
Write = Callable[[], None]

TOGETHER = 64  # programs that run at a time, and how many more if all of them wait
PATIENCE = 20  # scalar loads and atomics without a store after which a program is taken to wait
ROUNDS = 4  # of turns without a store after which all are taken to wait
ENDLESS = 20_000  # the same accesses, of all programs of a launch


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
    """Ends a program's thread when its launch has failed."""


class _Order(NamedTuple):
    """One of `NAMES`, the seed of what is shuffled, and the names of kernels that ran so."""

    name: str
    seed: int
    launched: set[str]

    def arranged(self, programs: list[Program]) -> list[Program]:
        if self.name == "reversed":
            return programs[::-1]
        if self.name == "shuffled":
            return random.Random(self.seed).sample(programs, len(programs))
        return programs


NAMES = ("reversed", "shuffled", "interleaved")
_ORDERS: list[_Order] = []
_LAUNCHES: "list[_Launch]" = []


@contextlib.contextmanager
def ordered(name: str, seed: int = 0) -> Iterator[set[str]]:
    """Meanwhile, programs of interpreted launches run in this order, one of `NAMES`; the names of
    the kernels that were launched."""
    with among(_ORDERS, _Order(name, seed, set())) as order:
        yield order.launched


def run(call: Callable[[], Any], kernel: str, grid: tuple[int, ...], builder: Any) -> None:
    """Call for each program of a launch, in the order that `ordered` asks for.

    builder: the interpreter's, which holds the current program.
    """
    x, y, z = (*grid, 1, 1)[:3]
    builder.set_grid_dim(x, y, z)
    programs = itertools.product(range(x), range(y), range(z))
    if _ORDERS:
        _ORDERS[-1].launched.add(kernel)
        return _Launch(call, _ORDERS[-1], builder).run(list(programs))
    for program in programs:
        builder.grid_idx = program
        call()
    return None


# -- what the interpreter tells of the program that runs -----------------------------------------


def stored(write: Write, elements: int) -> None:
    """Store now, or when the store becomes visible."""
    if _LAUNCHES:
        _LAUNCHES[-1].stored(write, elements)
    else:
        write()


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
        _LAUNCHES[-1].atomic_done(elements)


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

    def flush(self) -> None:
        """Make its stores visible."""
        for write in self.pending:
            write()
        self.pending.clear()

    def stop(self) -> None:
        self.stopped = True
        while not self.ended:
            self.resume()
        self._thread.join()


class _Launch:
    """A launch whose programs run in an order."""

    def __init__(self, call: Callable[[], Any], order: _Order, builder: Any) -> None:
        self._call, self._order, self._builder = call, order, builder
        self._running: _Thread
        self._suspended: list[_Thread] = []  # the last one was suspended last
        self._idle = 0  # accesses since any store
        self._progress = 0  # stores, and programs that ended

    def run(self, programs: list[Program]) -> None:
        waiting = self._order.arranged(programs)
        threads: list[_Thread] = []
        together, idle_rounds = TOGETHER, 0
        _LAUNCHES.append(self)
        try:
            while waiting or threads:
                while waiting and len(threads) < together:
                    threads.append(_Thread(waiting.pop(0), self._call))
                before = self._progress
                for thread in [thread for thread in threads if thread not in self._suspended]:
                    self._resume(thread)
                idle_rounds = 0 if self._progress > before else idle_rounds + 1
                if idle_rounds > ROUNDS or len(self._suspended) == len(threads):
                    idle_rounds, together = 0, together + TOGETHER
                    if self._suspended:  # what the last one read is what others stored unseen
                        self._resume(self._suspended.pop())
                threads = [thread for thread in threads if not thread.ended]
        finally:
            for thread in threads:
                thread.stop()
            _LAUNCHES.pop()

    def _resume(self, thread: _Thread) -> None:
        self._builder.grid_idx = thread.program
        self._running = thread
        thread.resume()
        if thread.ended:
            thread.flush()
            self._advance()
        if thread.error is not None:
            raise thread.error

    # -- from inside of a program's thread -------------------------------------------------------

    def stored(self, write: Write, elements: int) -> None:
        thread = self._running
        self._advance()
        if self._order.name != "interleaved":
            thread.accesses = 0
            write()
            return
        thread.give_back()
        if elements > 1:
            thread.pending.append(write)
        else:  # one thread of the program stores it, the one that makes scalar atomics
            write()

    def loaded(self, elements: int) -> None:
        self.flush()
        if elements == 1:
            self._wait()

    def atomic_done(self, elements: int) -> None:
        if elements == 1:
            self._wait()
        if self._order.name == "interleaved":
            thread = self._running
            if thread.pending:
                self._suspended.append(thread)
            thread.give_back()
            thread.flush()

    def flush(self) -> None:
        """Make the stores of the current program visible."""
        self._running.flush()

    def _wait(self) -> None:
        """An access of one element, which a program that waits for another one repeats."""
        thread = self._running
        thread.accesses += 1
        self._idle += 1
        if self._idle > ENDLESS:
            raise EndlessError(f"programs wait for each other: {ENDLESS:,} accesses and no store")
        if thread.accesses > PATIENCE:
            thread.give_back()

    def _advance(self) -> None:
        self._idle = 0
        self._progress += 1
