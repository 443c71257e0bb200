"""A process for each contender: what one of them breaks, the others keep.

A failed graph capture or an illegal access poisons a process's device for good; compiled
code, allocator pools and peaks of memory belong to a process too. So each contender lives in
a worker of its own, holds its objects there, and works only while it is asked to:

    with Worker("v1") as worker:
        worker.make("step", "package.steps:Step", tier="v1")
        seconds = worker.call("step", "turn")

What crosses is JSON (`tinyllama.harness.machine.wire`), so that a worker cannot make its caller run
anything. An answer repeats the random token of its request, so that none can be sent ahead.

Compiler caches of a worker start empty (``own_caches``): the time to compile is a measurement.
"""

import contextlib
import ctypes
import importlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from tinyllama.harness.machine.errors import RunFailedError
from tinyllama.harness.machine.wire import decode, encode

GRACE = 5.0  # seconds that a process whose caller is gone may go on
TIMEOUT = 900.0  # seconds for one request; a search over compiled configurations takes minutes
LONGEST_ANSWER = 2**28  # bytes
TOKEN = 16  # bytes, with which a request begins, and its answer
_SPEAKING = ("-u", "-X", "faulthandler")  # its output is all that a process that died leaves
_CHECKED = {"PYTHONOPTIMIZE": ""}  # what is asserted there is what holds a result to be right
# Variables for glibc: how much it returned differed between processes.
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the largest that it takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
TRITON_CACHE = "TRITON_CACHE_DIR"
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", TRITON_CACHE)


class WorkerError(RunFailedError):
    """What went wrong in a worker, in one line.

    details: its traceback or last output. types: the qualified names of the class of what was
    raised there, and of its bases; none where the process itself failed.
    """

    def __init__(self, message: str, details: str = "", types: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details, self.types = details, tuple(types)

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether the worker raised an error of that class."""
        return _qualified(kind) in self.types


class Worker:
    """A Python process that makes objects and calls their methods on request.

    name: for messages. python: the interpreter; cwd: where its modules are found. preload:
    modules it imports while nobody waits. stoppable: it has a process group of its own, which
    `stop` stops until it is asked again, and which ends with this process whatever ends that.
    own_caches: compilers find nothing of what was compiled before, so that compiling is measured.
    A worker whose process ended raises WorkerError from then on.
    """

    def __init__(
        self,
        name: str,
        *,
        python: str = sys.executable,
        cwd: Path | None = None,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stoppable: bool = False,
        own_caches: bool = True,
    ) -> None:
        if _ENDED.is_set():
            raise WorkerError(f"{name} is not started: all processes are to end")
        self.name, self._stoppable, self._stopped = name, stoppable, False
        self._folder = Path(tempfile.mkdtemp(prefix="worker-"))
        ours, theirs = socket.socketpair()
        caches = caches_in(self._folder) if own_caches else {}
        path = os.pathsep.join(filter(None, ["." if cwd is None else str(cwd), *_python_path()]))
        command = [python, *_SPEAKING, "-m", "tinyllama.harness.machine.worker"]
        command += [str(theirs.fileno()), str(os.getpid() if stoppable else 0), *preload]
        variables = {**os.environ, **_CHECKED, **caches, "PYTHONPATH": path, **(env or {})}
        try:
            with theirs, open(self._folder / "output", "wb") as output:
                self._process = _STARTER.submit(
                    _popen,
                    os.sched_getaffinity(0),
                    command,
                    pass_fds=[theirs.fileno()],
                    cwd=cwd,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=stoppable,
                ).result()
        except OSError as error:
            ours.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise WorkerError(f"{name} cannot be started: {error}") from error
        self._connection = Connection(ours.detach())
        _RUNNING.add(self)
        if _ENDED.is_set():  # meanwhile
            self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop all threads and children of the process until it is asked again."""
        assert self._stoppable, "start it as stoppable"
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        """Let a stopped process go on."""
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def _signal(self, number: int) -> None:
        if self.alive:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def make(self, key: str, factory: str, *, timeout: float = TIMEOUT, **arguments: Any) -> None:
        """Make an object by ``module:name`` and keep it under a key."""
        self._request("make", key, factory, arguments, timeout=timeout)

    def call(self, key: str, method: str, *args: Any, timeout: float = TIMEOUT) -> Any:
        """The result of a method of a kept object. Raises WorkerError with what it raised."""
        return self._request("call", key, method, args, timeout=timeout)

    def drop(self, key: str) -> None:
        """Forget an object, and give back the device's memory that nothing else holds."""
        self._request("drop", key)

    def hang_up(self) -> None:
        """Let the process end, without waiting for it; only `close` may follow."""
        self.resume()  # a stopped process would not notice
        with contextlib.suppress(OSError):
            self._connection.close()

    def kill(self) -> None:
        """Have the process end now, whatever it does, with its children where it has a group of
        its own; only `close` may follow."""
        if self._stoppable:  # a child that is stopped would stay so
            self._signal(signal.SIGKILL)
        else:
            self._process.kill()

    def close(self) -> None:
        """End the process; its folder goes with it."""
        self.hang_up()
        self._ended()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, *request: Any, timeout: float = TIMEOUT) -> Any:
        token = secrets.token_bytes(TOKEN)  # else code in the process could answer ahead
        self.resume()
        try:
            self._connection.send_bytes(token + encode(request))
            if not self._connection.poll(timeout):
                self.kill()
                raise WorkerError(
                    f"{self.name} did not answer {request[0]} in {timeout:.0f} s", self._tail()
                )
            answer = self._connection.recv_bytes(LONGEST_ANSWER)
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"the process of {self.name} ended with status {self._ended()}", self._tail()
            ) from error
        try:
            if answer[:TOKEN] != token:
                raise ValueError("it is to no question")
            kind, value, details, types = decode(answer[TOKEN:])
        except (TypeError, ValueError) as error:
            raise WorkerError(f"the answer of {self.name} cannot be read: {error}") from error
        if kind == "error":
            raise WorkerError(str(value), str(details), [str(name) for name in types])
        return value

    def _ended(self) -> int:
        """The exit status of a process that nothing is asked of any more; killed if need be."""
        try:
            return self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _tail(self, characters: int = 4000) -> str:
        output = self._folder / "output"  # gone when the worker was closed
        return output.read_text(errors="replace")[-characters:] if output.exists() else ""


def caches_in(folder: Path) -> dict[str, str]:
    """Variables of the environment that put the caches of all compilers into a folder."""
    return {cache: str(folder / cache.lower()) for cache in _CACHES}


def _popen(processors: Collection[int], *args: Any, **options: Any) -> subprocess.Popen[bytes]:
    """A process that may run where the thread that asks for it may, not the one that starts it."""
    os.sched_setaffinity(0, processors)
    return subprocess.Popen(*args, **options)


def _starter() -> None:
    """Make the thread that starts all processes. Linux ends a process that asked to end with its
    parent (`end_with`) when the *thread* that started it ends."""
    global _STARTER
    _STARTER = ThreadPoolExecutor(1, "starts workers")


_STARTER: ThreadPoolExecutor
_starter()
os.register_at_fork(after_in_child=_starter)  # threads are not forked
_RUNNING: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_ENDED = threading.Event()


def end_all(ended: bool = True) -> None:
    """Kill the processes of all workers, and start no more; after ``end_all(False)`` they start
    again."""
    if not ended:
        return _ENDED.clear()
    _ENDED.set()
    for worker in list(_RUNNING):
        worker.kill()
    return None


def all_ended() -> bool:
    """Whether `end_all` ended the workers: what they did not answer is nobody's error."""
    return _ENDED.is_set()


def close_all(workers: Iterable[Worker]) -> None:
    """Close workers: all hang up before any is waited for."""
    several = list(workers)
    for worker in several:
        worker.hang_up()
    for worker in several:
        worker.close()


@contextlib.contextmanager
def workers() -> Iterator[dict[str, Worker]]:
    """A place for workers by name; all of them are closed at the end."""
    started: dict[str, Worker] = {}
    try:
        yield started
    finally:
        close_all(started.values())


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _python_path() -> list[str]:
    return [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


PRELOADED: dict[str, float] = {}  # in a worker: the seconds that each of these imports took


def serve(connection: Connection) -> None:
    """Answer requests until the other side hangs up. An error is an answer, not an end."""
    objects: dict[str, Any] = {}
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        token, request_body = request[:TOKEN], request[TOKEN:]
        try:
            answer = encode(["ok", _answer(objects, *decode(request_body, importing=True)), "", []])
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            message = f"{type(error).__name__}: {first[0] if first else 'no message'}"
            types = [_qualified(kind) for kind in type(error).__mro__]
            answer = encode(["error", message, traceback.format_exc(), types])
        connection.send_bytes(token + answer)


def _answer(objects: dict[str, Any], kind: str, key: str, *rest: Any) -> Any:
    if kind == "make":
        factory, arguments = rest
        module, _, name = factory.partition(":")
        objects[key] = getattr(importlib.import_module(module), name)(**arguments)
        return None
    if kind == "call":
        method, args = rest
        return getattr(objects[key], method)(*args)
    objects.pop(key, None)
    _give_back_memory()
    return None


def _give_back_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _end_when_left(descriptor: int) -> None:
    """End this process when the other side has hung up, whatever it computes: what a killed caller
    leaves would keep the device busy."""
    left = select.poll()
    left.register(descriptor, 0)  # hang-ups alone
    left.poll()
    time.sleep(GRACE)  # what is idle ends by itself
    os._exit(1)


def end_with(parent: int) -> None:
    """Have Linux kill this process when the one that started it ends, even where it is stopped."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def main(descriptor: str, parent: str, *preload: str) -> None:
    """Serve the connection of that descriptor; a module that fails to load fails when used.
    parent: the process with which this one ends; 0: it ends when the connection does."""
    if int(parent):
        end_with(int(parent))
    connection = Connection(int(descriptor))
    threading.Thread(target=_end_when_left, args=[int(descriptor)], daemon=True).start()
    for module in preload:
        began = perf_counter()
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
        PRELOADED[module] = perf_counter() - began
    serve(connection)


if __name__ == "__main__":
    # This file, by the name that others import.
    importlib.import_module("tinyllama.harness.machine.worker").main(*sys.argv[1:])
