"""One side of a comparison, in a worker of its own interpreter and tree.

It lists its benchmarks and times them in turns.
"""

import contextlib
import importlib
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tinyllama
from tinyllama.harness.gate.benchmarks import (
    Benchmark,
    Own,
    declared,
    left_out,
    strays,
    usual_slowdowns,
)
from tinyllama.harness.gate.compiled import fingerprint, resources
from tinyllama.harness.gate.judged import declarations
from tinyllama.harness.gate.once import installed
from tinyllama.harness.gate.subject import Subject
from tinyllama.harness.machine.device import current, device_name
from tinyllama.harness.machine.worker import TRITON_CACHE, caches_in
from tinyllama.harness.measure.op_contender import (
    loaded,
)
from tinyllama.harness.measure.rounds import FEWEST_ROUNDS
from tinyllama.harness.records.entries import Ratio
from tinyllama.harness.records.results import versions


class Side:
    """One side of the comparison, in its worker.

    package: of the ops. more: ``module:name`` of a function that gives a device's benchmarks beside
    those of ops. slowed: benchmark -> share of its device time that is added to each call as real
    work, to see the gate find it; never used in a comparison. usual: by metric, the smallest
    slowdown that must not be called SAME, of what states none. own: only these ops of the tree in
    the current folder are benchmarks; the harness is an installed one. kernels, base_kernels: the
    folders of `OnlyOnce` on a GPU; empty: there is none.
    """

    def __init__(
        self,
        device: str,
        package: str,
        files: Sequence[str] = (),
        slowed: Mapping[str, float] | None = None,
        more: str = "",
        usual: Mapping[str, float] | None = None,
        own: Own | None = None,
        kernels: str = "",
        base_kernels: str = "",
    ) -> None:
        self.device, self.once = current(device), None
        if kernels and self.device.type != "cpu":
            self.once = installed(Path(kernels), Path(base_kernels) if base_kernels else None)
        self.package, self.own = package, own
        self.files = own.found(Path.cwd()) if own else tuple(files)
        self.slowed, self.more, self.usual = dict(slowed or {}), more, dict(usual or {})
        self.processors = os.sched_getaffinity(0)
        self.subjects: dict[str, Any] = {}
        self.most: dict[str, int] = {}

    def identity(self) -> dict[str, Any]:
        """Which code this is, by what, on what."""
        return {
            "root": self._root(),
            "python": f"{platform.python_version()} {sys.prefix}",
            "versions": versions(),
            "device": device_name(self.device),
        }

    def _root(self) -> str:
        """The folder of the code; a file of it that is from elsewhere, where there is one."""
        if self.own is None:
            return str(Path(tinyllama.__file__).resolve().parent.parent)
        loaded(self.package, self.files)
        root = Path.cwd().resolve()
        return next(iter(strays(root)), str(root))

    def benchmarks(self) -> list[Benchmark]:
        found = declared(self.device, self.package, self.files, self.usual, self.own)
        further = _imported(self.more)(self.device) if self.more else []
        usual = usual_slowdowns(self.device, self.usual)
        return [*found, *(replace(one, slowdowns=one.slowdowns or usual) for one in further)]

    def declarations(self) -> dict[str, str]:
        """By ``op: part``, digests of what the ops declare that decides on their providers."""
        registry, named = loaded(self.package, self.files)
        names = self.own.providers(registry, named) if self.own else registry
        return declarations(registry[name] for name in names)

    def left_out(self) -> dict[str, int]:
        """By reason, how many providers are not timed here."""
        return dict(left_out(self.device, self.package, self.files, self.own))

    def pin(self, processor: int | None) -> None:
        """Pin all threads to one processor, or (None) to those of the start again."""
        pin_threads(self.processors if processor is None else {processor})

    def use_caches(self, folder: str) -> None:
        """Compile into this folder from now on; but for Triton's kernels, which all pairs share."""
        os.environ.update(caches_in(Path(folder)))
        if self.once is not None:
            os.environ[TRITON_CACHE] = str(self.once.own)

    def warm_up_blas(self) -> None:
        """Make the first products of this process, whose allocations (BLAS's workspace) stay: they
        must not count as kept by a benchmark."""
        if self.device.type != "cpu":
            for dtype in (torch.float32, torch.float16):
                ones = torch.ones(16, 16, dtype=dtype, device=self.device)
                torch.nn.functional.linear(ones, ones, ones[0])
                torch.nn.functional.linear(ones, ones)

    def begin(self, name: str) -> float:
        """Prepare a benchmark; returns the seconds until its first call ended, compiling included,
        also of kernels that another process compiled.

        The name is looked up here: the other side may have it at another place of its timed cases.
        """
        found = next((one for one in self.benchmarks() if one.name == name), None)
        if found is None:
            raise ValueError(f"there is no benchmark {name!r}")
        start, before = time.perf_counter(), self._compiled_elsewhere()
        if found.factory:
            subject = _imported(found.factory)(found.timed, str(self.device))
        else:
            metrics = tuple(found.slowdowns)
            subject = Subject(found.timed, str(self.device), self.package, self.files, metrics)
        subject.run_once()
        seconds = time.perf_counter() - start + self._compiled_elsewhere() - before
        self.subjects[name] = subject
        if name in self.slowed:
            subject.slow_down(self.slowed[name])
        return seconds

    def _compiled_elsewhere(self) -> float:
        return 0.0 if self.once is None else self.once.more

    def verify(self, name: str) -> Any:
        """Hold a benchmark's results to float64; returns what later calls are held to."""
        self._give_back()
        before = self._reserved()
        if self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
        proofs = self.subjects[name].verify()
        self.most[name] = self._reserved(most=True) - before
        self._give_back()
        return proofs

    def most_bytes(self, name: str) -> int:
        """The most bytes of the device that `verify` took of a benchmark; 0 on a CPU."""
        return self.most.get(name, 0)

    def _reserved(self, *, most: bool = False) -> int:
        if self.device.type == "cpu":
            return 0
        read = torch.cuda.max_memory_reserved if most else torch.cuda.memory_reserved
        return read(self.device)

    def _give_back(self) -> None:
        """Give back the memory that nothing here holds: others compare with float64, too."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def expect(self, name: str, proofs: Any, warm_up: float) -> None:
        """Hold it to what was verified, then warm up for some seconds."""
        subject = self.subjects[name]
        subject.expect(proofs)
        self._give_back()
        subject.warm_up(warm_up)
        if isinstance(subject, Subject):
            subject.rehearse()

    def turn(self, name: str, seed: int) -> dict[str, float]:
        """Seconds of a call by metric. seed: of its input values, which no process has seen. A
        subject other than an op's has values of its own."""
        subject = self.subjects[name]
        return subject.gated_turn(seed) if isinstance(subject, Subject) else subject.gated_turn()

    def notes(self, name: str, seeds: Sequence[int]) -> list[list[int]]:
        """Digests of the results of calls in turns; none if the provider is not deterministic."""
        return [self.subjects[name].notes(seed) for seed in seeds]

    def hold(self, name: str, seed: int, call: int, exact: bool) -> None:
        """Compare a call of an earlier turn with eager's results or float64's; see
        `Subject.hold`."""
        self.subjects[name].hold(seed, call, exact)
        self._give_back()

    def ready(self, name: str) -> None:
        self.subjects[name].ready()

    def paced(self, name: str, calls: int) -> float:
        """Seconds of some calls in a row, of which the caller takes the time too."""
        seconds: float = self.subjects[name].paced(calls)
        return seconds

    def compile_layouts(self, name: str, names: Sequence[str]) -> None:
        """Compile what calls in these layouts need, before `layouts` times them."""
        self.subjects[name].compile_layouts(names)

    def layouts(self, name: str, names: Sequence[str]) -> dict[str, Ratio]:
        """How many times as long a call takes in these layouts as on contiguous inputs. What it
        gives must be expected."""
        found: dict[str, Ratio] = self.subjects[name].layouts(names, FEWEST_ROUNDS)
        return found

    def compiled(self, name: str) -> list[str]:
        """A digest of each launch of a kernel; none on a CPU."""
        return fingerprint(self.subjects[name].launched())

    def inputs(self, name: str) -> int:
        """A digest of the inputs of all seeds."""
        return self.subjects[name].input_digest()

    def counted(self, name: str) -> dict[str, int]:
        """The exact metrics: peak bytes, kept bytes, kernels, copies, synchronisations."""
        return self.subjects[name].counted()

    def profiles(self, name: str, times: int) -> list[dict[str, Any]]:
        """Seconds of each kernel, call by call, and the resources of Triton's."""
        subject = self.subjects[name]
        taken = resources(subject.launched())
        return [{"kernels": subject.profile(), "resources": taken} for _ in range(times)]

    def end(self, name: str) -> None:
        self.subjects.pop(name, None)
        self._give_back()


def pin_threads(processors: Collection[int]) -> None:
    """Pin every thread of this process to some processors."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), processors)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
