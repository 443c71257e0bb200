"""A provider of an op, ready to be timed: fresh inputs, both clocks, outputs checked.

The results of the first call and of every timed one are compared with the reference's in float64 on
the same inputs (`right_results`). A wrong call gives no time.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from tinyllama.harness.check.cases import SHORT, OpCase
from tinyllama.harness.check.evaluate import (
    Inputs,
    Leaves,
    evaluate,
    make_inputs,
    mutated_results,
)
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.registry import Registry, discover, load_file
from tinyllama.harness.machine.device import cannot, current, synchronize
from tinyllama.harness.measure.cache import flush_of
from tinyllama.harness.measure.clock import Clock, Reading, queue_of
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.right_results import Compared, WrongResultError, require_right
from tinyllama.harness.measure.rounds import interleaved, ratio
from tinyllama.harness.records.entries import Ratio

FORWARD, BOTH = "forward", "forward+backward"
DTYPE_OF = {short: dtype for dtype, short in SHORT.items()}  # a base may lack precision's
IN_A_ROW = 20  # calls whose host time is read together
QUEUED_KERNELS = 512  # of a row; the queue of a GPU holds about 1,024 launches
KEPT_SHARE = 1 / 16  # of the device's memory, which other processes that are timed share


@dataclass(frozen=True)
class Timed:
    """What is timed, by names that mean the same in every process.

    provider: a name, or "compile" for the reference under torch.compile.
    case: an index of ``Op.timed``. layout: of the inputs.
    """

    op: str
    provider: str
    case: int
    dtype: str
    layout: str = "contiguous"

    @classmethod
    def of(cls, case: OpCase) -> "Timed":
        index = case.op.timed.index(case.case)
        return cls(case.op.name, case.provider.name, index, SHORT[case.dtype])

    def case_of(self, op: Op, provider: Provider) -> OpCase:
        """The case in a process whose op and provider are these."""
        return OpCase(op, provider, op.timed[self.case], DTYPE_OF[self.dtype])


def passes_of(op: Op) -> tuple[str, ...]:
    """The passes of an op that are timed; the gate uses the last one."""
    return (FORWARD, BOTH) if op.differentiable else (FORWARD,)


def provider_of(op: Op, name: str) -> Provider:
    """A provider by name; "compile" is the reference, which `OpContender` compiles."""
    if name != "compile":
        return op[name]
    return replace(op["eager"], name=name, requires=("compile",), derived=None, waits=False)


def timed_dtype(op: Op, default: str) -> str:
    """The dtype in which an op is timed, if the other ops are timed in the default one."""
    covered = [SHORT[dtype] for dtype in op.dtypes]
    return default if default in covered else covered[0]


def untimed(provider: Provider, device: torch.device) -> str | None:
    """Why a provider cannot be timed on a device; None if it can."""
    reason = next(filter(None, (cannot(need, device) for need in provider.requires)), None)
    if reason is None and device.type == "cpu":
        if provider.name == "compile":
            return "compiled ops are timed on a GPU; on a CPU compiling takes minutes"
        if "triton" in provider.requires:
            return "on a CPU its kernels are interpreted, and no time counts"
    if device.type != "cpu" and provider.counts_on_host:
        return "it reads its step count on the host: device time cannot be isolated"
    return reason


def loaded(
    package: str,
    files: tuple[str, ...],
    load: Callable[[str, Registry], ModuleType] = load_file,
    *,
    plugins: bool = True,
) -> tuple[Registry, dict[str, str]]:
    """The ops of a package and of files, and the file of each module that these became; kept, since
    a process can register them once only. plugins: with the ops of installed ones."""
    key = package, files
    if key not in _LOADED:
        registry = discover(package, plugins=plugins)
        _LOADED[key] = registry, {load(file, registry).__name__: file for file in files}
    return _LOADED[key]


_LOADED: dict[tuple[str, tuple[str, ...]], tuple[Registry, dict[str, str]]] = {}


def ops_of(package: str, files: tuple[str, ...]) -> Registry:
    """The ops of a package and of files."""
    return loaded(package, files)[0]


def declared_by(registry: Registry, modules: Collection[str]) -> dict[str, list[Provider]]:
    """What some modules declare, by op: all providers of their own ops, and the providers that
    they register on other ops."""
    by_op = {
        op.name: [
            provider
            for provider in op.providers.values()
            if op.module in modules or provider.module in modules
        ]
        for op in registry.values()
    }
    return {name: providers for name, providers in by_op.items() if providers}


class OpContender:
    """A provider on one timed case.

    package: has the ops. files: have more ops and providers. Products of float32 are in IEEE
    precision.
    """

    def __init__(self, timed: Timed, device: str, package: str, files: Sequence[str] = ()) -> None:
        op = ops_of(package, tuple(files))[timed.op]
        provider = self._provider(op, timed.provider)
        self.op: Op = provider.offered(op)
        self.device = current(device)
        self.case = timed.case_of(self.op, provider)
        self.clock = Clock(queue_of(self.device))
        self.row_clock = Clock(self.clock.queue, IN_A_ROW * self.clock.spin_seconds)
        self.kernels: int | None = None  # of the last pass, once `facts` has counted them
        self.flush = flush_of(self.device)
        self.round = 0
        self.declared_layout = self.layout = timed.layout
        self.inputs: Inputs
        self.args: Leaves = {}
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.gradients: Sequence[torch.Tensor | None] = ()
        self.emptied = False  # the allocator has no free memory left for a call

    @staticmethod
    def _provider(op: Op, name: str) -> Provider:
        provider = provider_of(op, name)
        if name != "compile":
            return provider
        torch.compiler.reset()
        return replace(provider, call=torch.compile(provider.call, dynamic=False))

    @property
    def passes(self) -> tuple[str, ...]:
        return passes_of(self.op)

    def cannot(self) -> str | None:
        """Why this provider does not cover the case; None when it does."""
        return self.case.unsupported()

    def run_once(self) -> None:
        """Compile everything that a call needs."""
        self._prepare(self.passes[-1])
        self._run()
        self._forget()

    def _forget(self) -> None:
        """Drop inputs and results of the last call, and free their memory for other processes."""
        self.outputs, self.gradients, self.args = (), (), {}
        self.inputs = Inputs({}, {}, {})
        synchronize(self.device)
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def check_first(self) -> None:
        """Check a call that is not timed, and what it does beside its results (`evaluate`). Raises
        WrongResultError, and ContractError."""
        self._judge_first()
        self._forget()  # here, where nothing holds the results in float64 any more

    def _judge_first(self) -> None:
        inputs, provider = self._fresh(), self.case.provider
        results = evaluate(
            self.op, provider.call, inputs, provider.overwrites, dtypes=provider.output_dtypes
        )
        self._require_right(results, inputs, "")

    def warm_up(self, seconds: float) -> None:
        """Repeat the call for so many seconds, until clocks and compiler caches settle."""
        start = self.clock.queue.now()
        while self.clock.queue.now() - start < seconds:
            self._prepare(self.passes[-1])
            self._run()
            synchronize(self.device)

    def turn(self) -> dict[str, Reading]:
        """A reading of each pass on fresh inputs and cold caches, its results checked.

        Raises WrongResultError, or NotQueuedError when the call waits for the device.
        """
        return {name: self._read(name) for name in self.passes}

    def _read(self, name: str) -> Reading:
        self._fill(name)
        if self.case.provider.waits:
            reading = self._busy_reading(name)
        else:
            reading = self.clock.read(self._run, before=lambda: self._prepare(name))
        self._check()
        self._shrink()
        return reading

    def _fill(self, name: str, layout: str = "") -> None:
        """After `_shrink`, make a call that is not timed, because it allocates memory again."""
        if self.emptied:
            self._prepare(name, layout)
            self._run()
            self.emptied = False

    def _shrink(self) -> None:
        """Free the memory of a check if it is much: in float64 it is several times the call's."""
        if self.device.type == "cpu":
            return
        _, total = torch.cuda.mem_get_info(self.device)
        if torch.cuda.memory_reserved(self.device) > KEPT_SHARE * total:
            self._forget()
            self.emptied = True

    def _busy_reading(self, name: str) -> Reading:
        """The reading of a call that waits for the device: the seconds in which the device worked.
        Gaps in which the device waited for the host do not count, so the call takes longer."""
        host = 0.0

        def call() -> None:
            nonlocal host
            start = self.clock.queue.now()
            self._run()
            host = self.clock.queue.now() - start

        self._prepare(name)
        return Reading(launches(call, self.device).busy_seconds, host, queued=False)

    def facts(self) -> dict[str, Any]:
        """Of each pass: peak memory beyond the inputs, and the number of kernels."""
        facts: dict[str, Any] = {}
        for name in self.passes:
            self._prepare(name)
            peak = self._peak()
            self._prepare(name)
            kernels = launches(self._run, self.device).kernels
            facts[name] = {"peak_bytes": peak, "kernels": kernels}
            self.kernels = kernels
        return facts

    def in_a_row(self) -> float | None:
        """Host seconds of a call of the last pass as a training step has them, where calls follow
        each other: the mean of `IN_A_ROW` calls, each on inputs of its own. A single call also
        wakes the thread of torch's backward pass, and finds its code in no cache of the processor.
        The results of the last call are checked.

        None if the inputs of so many calls would take more than `KEPT_SHARE` of a GPU's memory, or
        more than `QUEUED_KERNELS` would be launched. Raises WrongResultError, or NotQueuedError
        when a call waits for the device and its provider does not declare that.
        """
        if (self.kernels or 0) * IN_A_ROW > QUEUED_KERNELS or not self._holds(IN_A_ROW):
            return None
        calls: list[tuple[Inputs, Leaves]] = []

        def prepare() -> None:
            calls.clear()
            for _ in range(IN_A_ROW):
                self._give(self.passes[-1])
                calls.append((self.inputs, self.args))

        def run() -> None:
            for self.inputs, self.args in calls:
                self._run()

        if self.case.provider.waits:
            prepare()
            self.clock.queue.synchronize()  # else the first call waits for its inputs, too
            start = self.clock.queue.now()
            run()
            host = self.clock.queue.now() - start
        else:
            host = self.row_clock.read(run, before=prepare).host
        self._check()
        self._forget()
        return host / IN_A_ROW

    def _holds(self, sets: int) -> bool:
        """Whether so many sets of inputs take little of the device's memory."""
        if self.device.type == "cpu":
            return True
        self._give(self.passes[-1])
        tensors = (*self.args.values(), *self.inputs.upstream.values())
        bytes_each = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        _, total = torch.cuda.mem_get_info(self.device)
        return sets * bytes_each <= KEPT_SHARE * total

    def layouts(self, names: Sequence[str], rounds: int) -> dict[str, Ratio]:
        """For each layout, how many times longer the last pass takes than on contiguous inputs."""

        def turn(layout: str) -> Callable[[], float]:
            def seconds() -> float:
                self._fill(self.passes[-1], layout)
                prepare = functools.partial(self._prepare, self.passes[-1], layout)
                reading = self.clock.read(self._run, before=prepare)
                self._check()
                self._shrink()
                return reading.device

            return seconds

        for name in names:  # compiles the code of each layout
            turn(name)()
        seconds = interleaved({name: turn(name) for name in ("contiguous", *names)}, rounds)
        return {name: ratio(seconds[name], seconds["contiguous"]) for name in names}

    # -- one call ---------------------------------------------------------------------------

    def _fresh(self, layout: str = "") -> Inputs:
        """The inputs of the next round, in a layout or (empty) in the usual one."""
        self.round += 1
        self.layout = layout or self.declared_layout
        return self._drawn()

    def _drawn(self) -> Inputs:
        """The inputs of this round: equal every time they are drawn."""
        inputs = make_inputs(
            self.op,
            self.case.case,
            self.case.dtype,
            self.device,
            seed=self.round,
            layout=self.layout,
            drawn_on=self.device,
        )
        return replace(inputs, fresh=[])  # an in-place op is timed by single calls

    def _prepare(self, name: str, layout: str = "") -> None:
        """Fresh inputs and cold caches."""
        self._give(name, layout)
        self.flush()

    def _give(self, name: str, layout: str = "") -> None:
        """Fresh inputs."""
        self.inputs = self._fresh(layout)
        self.args = dict(self.inputs.args)
        for leaf in self.op.differentiable:
            self.args[leaf] = self.args[leaf].detach().requires_grad_(True)
        self.backward = name == BOTH

    def _run(self) -> None:
        outputs = self.case.provider.call(*self.args.values(), **self.inputs.params)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.gradients = ()
        if self.backward:
            upstream = self.inputs.upstream.values()
            pairs = zip(self.outputs, upstream, strict=True)
            with_gradient = [pair for pair in pairs if pair[1] is not None]
            self.gradients = torch.autograd.grad(
                [output for output, _ in with_gradient],
                [self.args[leaf] for leaf in self.op.differentiable],
                [gradient for _, gradient in with_gradient],
                allow_unused=True,
            )

    def _check(self) -> None:
        """Compare the results of the call just made with float64 on the same inputs.

        The inputs are drawn anew, as the call may have written into its own.
        """
        inputs = self._drawn()
        if not (self.op.mutated or self.backward):
            inputs = replace(inputs, wanted=())
        self._require_right(self._collected(), inputs, "a timed call: ")

    def _require_right(
        self, results: dict[str, torch.Tensor], inputs: Inputs, what: str
    ) -> Compared:
        try:
            return require_right(self.case, results, inputs)
        except WrongResultError as error:
            raise WrongResultError(f"{self.case}: {what}{error}") from error

    def _collected(self) -> dict[str, torch.Tensor]:
        """Results by name. A tensor of a subclass is none: it could be computed when it is read."""
        if self.op.mutated:
            return mutated_results(self.op, self.args)
        results = dict(zip(self.op.outputs, self.outputs, strict=True))
        for leaf, gradient in zip(self.op.differentiable, self.gradients, strict=False):
            if gradient is None:
                raise WrongResultError(f"{self.case}: no gradient of {leaf}")
            results[f"grad {leaf}"] = gradient
        for name, value in results.items():
            if type(value) is not torch.Tensor:
                raise WrongResultError(
                    f"{self.case}: {name} is a {type(value).__name__}, not a torch.Tensor"
                )
        return {name: value.detach() for name, value in results.items()}

    def _peak(self) -> int | None:
        """The peak of allocated bytes during a call, beyond those before it; None on a CPU."""
        if self.device.type == "cpu":
            return None
        self.outputs, self.gradients = (), ()  # freed during the call, they would lower its peak
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before
