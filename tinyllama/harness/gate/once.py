"""Triton's compilations in the processes of a gate: a side compiles each kernel once.

All pairs compile into one folder for each side. Who needs what another process compiles now waits
for it. The candidate takes what the base compiled from equal source, since that is the same code.
The base takes nothing from the candidate, and compiles such a kernel again.

Seconds of a compilation are noted, and count for each benchmark that needs it: add
`OnlyOnce.more` to a call's measured seconds to get its time from cold caches.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyllama.harness.machine.worker import TRITON_CACHE

LET_FIRST = 0.02  # seconds in which the base may begin to compile what both sides need


class OnlyOnce:
    """What is compiled in this process. own: the folder of this side. base: the base's, for a
    candidate that runs the same Triton."""

    def __init__(self, own: Path, base: Path | None = None) -> None:
        self.own, self.base = own, base
        self.more = 0.0  # seconds
        (own / "seconds").mkdir(parents=True, exist_ok=True)
        os.environ[TRITON_CACHE] = str(own)

    def install(self) -> None:
        """Replace Triton's functions that compile a kernel, and what launches it."""
        import triton.backends
        import triton.compiler

        _replace(triton.compiler, "compile", self._of(_kernel))
        for backend in triton.backends.backends.values():
            module = sys.modules[backend.driver.__module__]
            if hasattr(module, "compile_module_from_src"):
                _replace(module, "compile_module_from_src", self._of(_module))

    def _of(self, named: Callable[..., str]) -> Callable[[Any], Any]:
        def wrapped(compile: Callable[..., Any]) -> Callable[..., Any]:
            def once(*args: Any, **options: Any) -> Any:
                return self.compiled(named(*args, **options), lambda: compile(*args, **options))

            return once

        return wrapped

    def compiled(self, name: str, compile: Callable[[], Any]) -> Any:
        """The result of ``compile``, with Triton's cache in the folder where it may be. name:
        equal for what is compiled to the same."""
        began = time.perf_counter()
        key = hashlib.sha256(name.encode()).hexdigest()
        if (took := self._of_base(key)) is not None:
            assert self.base is not None
            with _cache_in(self.base):
                found = compile()
        else:
            found, took = self._here(key, compile)
        self.more += took - (time.perf_counter() - began)
        return found

    def _here(self, key: str, compile: Callable[[], Any]) -> tuple[Any, float]:
        with open(self.own / "seconds" / key, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (known := file.read()):
                began = time.perf_counter()
                found, took = compile(), time.perf_counter() - began
                file.write(repr(took))
                return found, took
        return compile(), float(known)

    def _of_base(self, key: str) -> float | None:
        """The seconds in which the base compiled it; None if it did not."""
        if self.base is None:
            return None
        path = self.base / "seconds" / key
        if not path.is_file():
            time.sleep(LET_FIRST)
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                known = file.read()
        except FileNotFoundError:
            return None
        return float(known) if known else None


def _kernel(src: Any, target: Any = None, options: Any = None, *more: Any, **rest: Any) -> str:
    if not hasattr(src, "hash"):
        return f"{src} {target} {options}"
    given = sorted((options or {}).items())
    return f"{src.hash()} {target} {given}"


def _module(src: str, name: str = "", *more: Any, **rest: Any) -> str:
    return f"{name} {src}"


def _replace(module: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    setattr(module, name, wrapped(getattr(module, name)))


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    before = os.environ[TRITON_CACHE]
    os.environ[TRITON_CACHE] = str(folder)
    try:
        yield
    finally:
        os.environ[TRITON_CACHE] = before


def installed(own: Path, base: Path | None = None) -> OnlyOnce | None:
    """`OnlyOnce` in this process; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    found = OnlyOnce(own, base)
    found.install()
    return found
