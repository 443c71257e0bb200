"""Contenders in processes of their own, asked alternately: what one of them breaks, others keep."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tinyllama.harness.machine.worker import Worker, WorkerError
from tinyllama.harness.measure.rounds import interleaved


class Contest:
    """What is asked of contenders by name; one that fails is asked nothing more.

    key: of each contender's object in its process. workers: the processes of those that did not
    fail. failed: why the others did. cannot: why some were not started.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.workers: dict[str, Worker] = {}
        self.cannot: dict[str, str] = {}
        self.failed: dict[str, WorkerError] = {}

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """The answer of a contender. Raises WorkerError."""
        return self.workers[name].call(self.key, method, *arguments)

    @contextlib.contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Note the failure of a contender, and end its process: others need its memory."""
        try:
            yield
        except WorkerError as error:
            self.drop(name, error)

    def drop(self, name: str, error: WorkerError) -> None:
        self.failed.setdefault(name, error)
        if worker := self.workers.pop(name, None):
            worker.close()

    def ask_all(self, method: str, *arguments: Any, at_once: int = 1) -> dict[str, Any]:
        """The answers of all that do not fail, in the order of their names."""
        answers: dict[str, Any] = {}

        def ask(name: str) -> None:
            with self.failing(name):
                answers[name] = self.ask(name, method, *arguments)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(ask, names := list(self.workers)))
        return {name: answers[name] for name in names if name in answers}

    def rounds(
        self, method: str, count: int, arguments: Mapping[str, tuple[Any, ...]] | None = None
    ) -> dict[str, list[Any]]:
        """The answers in interleaved rounds of all that fail in none. arguments: of the method, by
        contender, if it has any; those that are named come in this order."""
        named = arguments or dict.fromkeys(self.workers, ())

        def turn(name: str) -> Any:
            if name in self.workers:
                with self.failing(name):
                    return self.ask(name, method, *named[name])
            return None

        answers = interleaved({name: partial(turn, name) for name in named}, count)
        return {name: series for name, series in answers.items() if name in self.workers}
