"""One side of a comparison, in a process of its own interpreter and tree.

It lists its benchmarks, and times and verifies them when the judge asks.
"""

import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import tinyllama
from tinyllama.harness.gate.benchmarks import (
    Benchmark,
    Registered,
    declared,
    strays,
    usual_slowdowns,
)
from tinyllama.harness.gate.declarations import declarations
from tinyllama.harness.gate.kernel_fingerprint import fingerprint
from tinyllama.harness.gate.timed_call import TimedCall
from tinyllama.harness.gate.unproven import Untimed, interpreted_kernel
from tinyllama.harness.gate.verification import Proof
from tinyllama.harness.machine.device import current, device_name
from tinyllama.harness.machine.worker import PRELOADED, caches_in
from tinyllama.harness.records.results import versions


class Side:
    """One side of the comparison, in its worker, whose current folder is its tree.

    slowdowns: by metric, the smallest slowdown that must not be called SAME, of what states none.
    """

    def __init__(
        self, device: str, registered: Registered, slowdowns: Mapping[str, float] | None = None
    ) -> None:
        self.device, self.registered = current(device), registered
        self.slowdowns = dict(slowdowns or {})
        self.package, self.files = registered.package, registered.paths()
        self.processors = os.sched_getaffinity(0)
        self.subjects: dict[str, Any] = {}
        self.kernels: dict[str, str] = {}
        began = perf_counter()
        registered.loaded()
        self.import_seconds = PRELOADED.get(self.package, 0.0) + perf_counter() - began

    def identity(self) -> dict[str, Any]:
        """Which code this is, by what, on what; and the seconds that its import took."""
        return {
            "root": self._root(),
            "python": f"{platform.python_version()} {sys.prefix}",
            "versions": versions(),
            "device": device_name(self.device),
            "import_seconds": self.import_seconds,
        }

    def _root(self) -> str:
        """The folder of the code; a file of it that is from elsewhere, where there is one."""
        if not self.registered.own:
            return str(Path(tinyllama.__file__).resolve().parent.parent)
        root = Path.cwd().resolve()
        return next(iter(strays(root)), str(root))

    def benchmarks(self) -> list[Benchmark]:
        return self._listed

    @cached_property
    def _listed(self) -> list[Benchmark]:
        factory, defaults = self.registered.factory, usual_slowdowns(self.device, self.slowdowns)
        further = _imported(factory)(self.device) if factory else []
        return [
            *declared(self.device, self.registered, self.slowdowns),
            *(replace(step, slowdowns=step.slowdowns or defaults) for step in further),
        ]

    def declarations(self) -> dict[str, str]:
        """By ``op: part``, digests of what the ops declare that decides on their providers."""
        return declarations(op for op, _ in self.registered.ops(self.device))

    def pin(self, processor: int | None) -> None:
        """Pin all threads to one processor, or (None) to those of the start again."""
        pin_threads(self.processors if processor is None else {processor})

    def use_caches(self, folder: str) -> None:
        """Compile into this folder from now on."""
        os.environ.update(caches_in(Path(folder)))

    def warm_up_blas(self) -> None:
        """Make the first products of this process, whose allocations (BLAS's workspace) stay: they
        must not count as kept by a benchmark."""
        if self.device.type != "cpu":
            for dtype in (torch.float32, torch.float16):
                ones = torch.ones(16, 16, dtype=dtype, device=self.device)
                torch.nn.functional.linear(ones, ones, ones[0])
                torch.nn.functional.linear(ones, ones)

    def begin(self, name: str, metrics: Sequence[str]) -> float:
        """Prepare a benchmark; returns the seconds until its first call ended, compiling included.
        metrics: those of its times; none: only its results are verified.

        The name is looked up here: the other side may have it at another place of its timed cases.
        """
        benchmark = next((listed for listed in self._listed if listed.name == name), None)
        if benchmark is None:
            raise ValueError(f"there is no benchmark {name!r}")
        start = perf_counter()
        timed, device = benchmark.timed, str(self.device)
        subject: Any
        if not metrics:
            subject = Untimed(timed, device, self.package, self.files)
        elif benchmark.factory:
            subject = _imported(benchmark.factory)(timed, device)
            subject.run_once()
        else:
            subject = TimedCall(timed, device, self.package, self.files, metrics)
            self.kernels[name] = interpreted_kernel(subject.run_once, self.device)
        seconds = perf_counter() - start
        self.subjects[name] = subject
        return seconds

    def interpreted(self, name: str) -> str:
        """The kernel that is interpreted here when a benchmark begins, at which its first call was
        ended; empty if none is."""
        return self.kernels.get(name, "")

    def verify(self, name: str, seed: int) -> Any:
        """Hold a benchmark's results on the values of a seed to float64; returns the proofs."""
        self._give_back()
        proofs = self.subjects[name].verify(seed)
        self._give_back()
        return proofs

    def reference(self, name: str, seed: int) -> dict[str, Proof]:
        """What the reference of an op's benchmark gives on the values of a seed."""
        proofs: dict[str, Proof] = self.subjects[name].reference(seed)
        self._give_back()
        return proofs

    def make_ready(self, name: str, proofs: Any, warm_up: float) -> None:
        """Warm up for some seconds. proofs: what `verify` returned of a subject that is no op's,
        which takes the verified run as its standard; else None."""
        subject = self.subjects[name]
        if proofs is not None:
            subject.expect(proofs)
        self._give_back()
        subject.warm_up(warm_up)
        self._give_back()  # other pairs are timed first

    def turn(self, name: str, seed: int, call_number: int | None = None) -> dict[str, float]:
        """Seconds of a call, by reading. seed: of its input values, which no process has seen;
        call_number: the call that keeps its results. A subject that is no op's has values of its
        own."""
        readings: dict[str, float] = self.subjects[name].gated_turn(seed, call_number)
        return readings

    def row(self, name: str, seed: int) -> dict[str, float]:
        """The readings that `turn` does not give of a case whose device time it reads."""
        readings: dict[str, float] = self.subjects[name].gated_row(seed)
        return readings

    def proofs(self, name: str) -> dict[str, Proof]:
        """Hold the results that the last turn kept to float64."""
        proofs: dict[str, Proof] = self.subjects[name].proofs()
        self._give_back()
        return proofs

    def ready(self, name: str) -> None:
        self.subjects[name].ready()

    def paced(self, name: str, calls: int) -> None:
        """Make some calls in a row, of which the caller takes the time."""
        self.subjects[name].paced(calls)

    def compiled(self, name: str) -> list[str]:
        """A digest of each launch of a kernel; none on a CPU."""
        return fingerprint(self.subjects[name].launched())

    def inputs(self, name: str) -> int:
        """A digest of the inputs."""
        return self.subjects[name].input_digest()

    def counted(self, name: str) -> dict[str, int]:
        """The exact metrics: peak bytes, kept bytes, kernels, copies, synchronisations."""
        return self.subjects[name].counted()

    def profiles(self, name: str, times: int) -> list[dict[str, tuple[int, float]]]:
        """Of some calls each: by kernel, how often it ran, and its seconds in all."""
        return [self.subjects[name].profile() for _ in range(times)]

    def end(self, name: str) -> None:
        self.subjects.pop(name, None)
        self._give_back()

    def _give_back(self) -> None:
        """Give back the memory that nothing here holds: others compare with float64, too."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()


def pin_threads(processors: Collection[int]) -> None:
    """Pin every thread of this process to some processors."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), processors)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
