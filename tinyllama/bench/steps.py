"""Training steps as contenders: each lives in a worker, is checked, and then timed.

All contenders of a group start from the same weights and take the same batches in the same order,
so each must learn what the others learn. A step whose gradients differ from the float64 reference's
is not timed.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import current, synchronize
from tinyllama.harness.machine.sensors import NotToldError, sensor
from tinyllama.harness.measure.clock import Queue, queue_of, wall_seconds
from tinyllama.harness.measure.energy import energy
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.memory import (
    Allocations,
    forget_peak,
    live_bytes,
    peak_bytes,
    pool_bytes,
    resident_peak_bytes,
)
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan, Tier, resolve
from tinyllama.training.step import TrainStep, products

BATCHES = 8  # different ones, one after the other
GRADIENT_SLACK = 8.0  # times V1's own error in the same precision; zeros would be 20 times that
UNTIMED = 2  # steps ahead of each turn
SCORES = 2**32  # bytes of one layer's scores in float64 that the reference may hold at once
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Repeated:
    """What is timed by whole calls: a subclass sets device, queue and samples, and has `next`."""

    device: torch.device
    queue: Queue
    samples: int

    def next(self) -> None:
        """One call, which need not be done when this returns."""
        raise NotImplementedError

    def waited(self) -> float:
        """Wall seconds of the next call."""
        return wall_seconds(self.next, self.queue)

    def warm_up(self, seconds: float, least: int = 3) -> float:
        """Repeat for this time, and at least this often; return the seconds of one call."""
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds or calls < least:
            self.next()
            synchronize(self.device)
            calls += 1
        return (time.perf_counter() - start) / calls

    def turn(self, calls: int) -> float:
        """Median wall seconds of some calls, after two that are not timed: the first finds the
        caches as another process left them."""
        for _ in range(UNTIMED):
            self.next()
        return statistics.median(self.waited() for _ in range(calls))

    def used(self, seconds: float) -> dict[str, Any]:
        """Joules of a sample and mean watts as fields of an entry, or why they are not known."""
        gpu = sensor(self.device)
        try:
            if isinstance(gpu, str):
                raise NotToldError(gpu)
            reading = energy(self.next, self.device, gpu, seconds)
        except NotToldError as error:
            return {"unavailable": {"joules_per_sample": str(error)}}
        return {"joules_per_sample": reading.joules / self.samples, "watts": reading.watts}


class StepContender(Repeated):
    """What every step has in common; a subclass sets the attributes and then calls `started`.

    step: a batch of tokens (B, T + 1) -> the loss before the update, on the device.
    parameters: by our names; gradient_of(name) gives the gradient in our layout.
    """

    software = "tinyllama"
    plan = "eager"
    step: Callable[[torch.Tensor], torch.Tensor]
    parameters: Mapping[str, torch.Tensor]

    def __init__(
        self,
        group: str,
        device: str,
        batch_size: int | None = None,
        seq_len: int | None = None,
        warm_ups: int = 3,
    ) -> None:
        """warm_ups: steps ahead of the captured one."""
        self.group = Group.parse(group)
        self.device = current(device)
        self.warm_ups = warm_ups
        shape = self.group.shape
        self.shape = shape.model
        self.config = TrainConfig(
            batch_size=batch_size or shape.batch_size,
            seq_len=seq_len or shape.seq_len,
            precision=self.group.precision,
        )
        self.samples = self.config.batch_size
        torch.set_float32_matmul_precision("high" if self.group.precision == "tf32" else "highest")
        size = (BATCHES, self.config.batch_size, self.config.seq_len + 1)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.shape.vocab_size, size, generator=generator)
        self.batches = drawn.to(self.device)
        self.losses: list[torch.Tensor] = []
        self.graphs: Sequence[torch.cuda.CUDAGraph] = ()
        self.left_out: dict[str, str] = {}
        self.queue = queue_of(self.device)

    def started(self) -> None:
        """To be called when the step is ready: it compiles what is left in the first one."""
        self.next()
        synchronize(self.device)
        self._give_back()

    def next(self) -> None:
        """One step on the next batch; its loss is kept."""
        self._keep(self.step(self._batch()))

    def _batch(self) -> torch.Tensor:
        return self.batches[len(self.losses) % BATCHES]

    def _keep(self, loss: torch.Tensor) -> None:
        """Keep a loss; a captured step writes the next one into the same tensor."""
        self.losses.append(loss.detach().clone())

    def waited(self) -> float:
        """Wall seconds of the next step; neither finding its batch nor keeping its loss counts."""
        batch, losses = self._batch(), list[torch.Tensor]()
        seconds = wall_seconds(lambda: losses.append(self.step(batch)), self.queue)
        self._keep(losses[0])
        return seconds

    def _give_back(self) -> None:
        """Return freed memory that the allocator keeps: others use the device too."""
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def weight_of(self, name: str) -> torch.Tensor:
        """A parameter in our layout."""
        return self.parameters[name].detach()

    def make_gradients(self) -> None:
        """One step, after which `gradient_of` gives its gradients."""
        self.next()

    def gradient_of(self, name: str) -> torch.Tensor | None:
        return self.parameters[name].grad

    # -- a wrong step gets no time -----------------------------------------------------------------

    def verify(self) -> dict[str, int]:
        """Compare the gradient of every parameter in one step with the float64 reference's.

        Raises AssertionError that names the parameters whose gradient is absent or wrong.
        """
        right = self.check_gradients()
        return {"gradients": len(right), "parameters": len(self.parameters)}

    def check_gradients(self, allowed: Mapping[str, float] | None = None) -> dict[str, float]:
        """Do the same, and return the error allowed for each gradient: a multiple of V1's error in
        this precision, or ``allowed``, which another process computed in this way."""
        weights = {name: self.weight_of(name).clone() for name in self.parameters}
        batch = self._batch()
        self.make_gradients()
        exact = self._reference_gradients(weights, batch, torch.float64)
        if allowed is None:
            eager = self._reference_gradients(weights, batch, torch.float32)
            allowed = {
                name: GRADIENT_SLACK * float((eager[name] - oracle).norm())
                for name, oracle in exact.items()
            }
            del eager
        wrong = []
        for name, oracle in exact.items():
            got = self.gradient_of(name)
            assert allowed[name] < 0.5 * oracle.norm(), f"{name}: the check would pass a zero"
            if got is None or not (got.double() - oracle).norm() <= allowed[name]:
                wrong.append(name)
        assert not wrong, (
            f"{len(wrong)} of {len(exact)} parameters get no right gradient: "
            f"{', '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''}"
        )
        del exact, weights
        self._give_back()
        return dict(allowed)

    def _reference_gradients(
        self, weights: Mapping[str, torch.Tensor], batch: torch.Tensor, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """V1's gradients, in float64 or in this precision; computed for a few samples at a time,
        and for the scores of one layer at a time."""
        with self.device:
            model = TinyLlama(self.shape, "v1", seed=None).to(dtype)
        model.recompute = True
        samples, length = batch.shape[0], batch.shape[1] - 1
        part = max(1, SCORES // (8 * self.shape.num_heads * length**2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        cast = AUTOCAST.get(self.group.precision) if dtype is torch.float32 else None
        for some in batch.split(part):
            with torch.autocast(self.device.type, cast, enabled=cast is not None):
                loss = model.loss(some[:, :-1], some[:, 1:])
            (loss * (len(some) / samples)).backward()
        return {
            name: parameter.grad.double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def loss_series(self) -> list[float]:
        """The loss of every step so far; they must all be finite."""
        losses = torch.stack(self.losses)
        assert losses.isfinite().all(), "a loss is not finite"
        return losses.tolist()

    # -- what else a record says of it --------------------------------------------------------

    def launched(self) -> dict[str, int]:
        """Kernels, copies and waits of a step; on a CPU its copies."""
        launched = launches(self.next, self.device)
        if self.device.type == "cpu":
            return {"copies": launched.by_name.get("aten::copy_", (0, 0.0))[0]}
        return launched.counts

    def memory(self) -> dict[str, int]:
        """Bytes after a step and at most during one; see `tinyllama.harness.measure.memory`."""
        if self.device.type == "cpu":
            return {"peak_bytes": resident_peak_bytes()}
        if not self.graphs:  # a captured step's peak is that of its capture
            forget_peak(self.device)
        self.next()
        synchronize(self.device)
        losses = sum(loss.nbytes for loss in self.losses) + self.batches.nbytes
        return {
            "live_bytes": live_bytes(self.device, self.graphs) - losses,
            "peak_bytes": peak_bytes(self.device, self.graphs) - losses,
            "graph_bytes": pool_bytes(self.graphs)[0],
        }

    def facts(self) -> dict[str, Any]:
        return {
            "software": self.software,
            "plan": self.plan,
            "left_out": self.left_out,
        }

    def uncaptured_memory(self) -> dict[str, int]:
        """Bytes of an uncaptured step of a second model; nothing where it is not measured."""
        return {}


class OurStep(StepContender):
    """A step of this project."""

    training: TrainStep

    def run_by(self, training: TrainStep) -> None:
        """Warm a step up, capture it where its plan says so, and run it from then on."""
        training.prepare(warm_up=self.warm_ups, capture=False)
        forget_peak(self.device)
        training.prepare(warm_up=0)
        self.training = self.step = training
        self.graphs = training.graphs
        self.plan, self.left_out = str(training.plan), training.left_out
        self.parameters = dict(training.model.named_parameters())


class TierStep(OurStep):
    """A tier as it runs by default, with parts switched off, little memory, or another plan."""

    def __init__(
        self,
        tier: str,
        without: Sequence[str] = (),
        memory: str = "fast",
        plan: str | None = None,
        **where: Any,
    ) -> None:
        super().__init__(**where)
        chosen: Tier = resolve(tier).without(*without).with_memory(memory).with_plan(plan)
        self.model = TinyLlama(self.shape, chosen).to(self.device)
        self.run_by(TrainStep(self.model, self.config))
        self.started()

    def make_gradients(self) -> None:
        """A step in memory mode ``small`` frees each gradient when it is used. There, hooks collect
        the gradients of the same forward and backward pass without the update."""
        if self.training.plan.memory == "fast":
            self.next()
            return
        self._gradients: dict[str, torch.Tensor] = {}
        hooks = [
            parameter.register_hook(partial(self._see, name))
            for name, parameter in self.parameters.items()
        ]
        batch = self._batch()
        self.training.probe(batch[:, :-1], batch[:, 1:])
        for hook in hooks:
            hook.remove()

    def uncaptured_memory(self) -> dict[str, int]:
        """What a new model of this tier and its step hold after an uncaptured step in float32, and
        at most during it: the published program prints what is allocated after such a step, and
        the pool of a captured one holds activations too. On a GPU bytes are the allocator's, on a
        CPU those of the tensors that operators returned."""
        if self.training.plan.memory != "fast":
            return {}
        device, on_gpu = self.device, self.device.type != "cpu"
        for _ in range(2 if on_gpu else 1):  # in the first step libraries allocate their own memory
            step: TrainStep | None = None
            gc.collect()
            before = live_bytes(device) if on_gpu else 0
            forget_peak(device)
            with products("fp32", device), Allocations() as allocated:
                model = TinyLlama(self.shape, self.model.tier).to(device)
                step = TrainStep(model, self.config, StepPlan())
                step(self.batches[0])
            synchronize(device)
            peak = peak_bytes(device) - before if on_gpu else allocated.peak
            del model
            gc.collect()
            live = live_bytes(device) - before if on_gpu else allocated.live
            assert step.optimizer.steps.item() == 1
        return {"held_bytes": live, "held_peak_bytes": peak}

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        self._gradients[name] = gradient.clone()

    def gradient_of(self, name: str) -> torch.Tensor | None:
        if self.training.plan.memory == "fast":
            return super().gradient_of(name)
        return self._gradients.get(name)
