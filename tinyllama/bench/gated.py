"""Training steps that the gate times beside the ops, so that the code around the ops is gated too.

Each process starts with the weights of one seed and takes the same batches in the same order. It
counts only after the gradients of all parameters in one step were compared with float64. Each timed
step must give the loss of the verified run at that step. In that run, the updates of all parameters
in one step were compared with float64 too.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tinyllama.bench.steps import TierStep
from tinyllama.bench.workloads import Group, not_here
from tinyllama.harness.gate.benchmarks import Benchmark
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE, HOST
from tinyllama.harness.gate.verification import digest
from tinyllama.harness.kernels.launch import Launched, launched
from tinyllama.harness.machine.device import cannot, current, synchronize
from tinyllama.harness.measure.clock import Clock
from tinyllama.harness.measure.launches import launches
from tinyllama.harness.measure.right_results import WrongResultError
from tinyllama.ops import OPS

FACTORY = "tinyllama.bench.gated:StepSubject"
TIMED = (
    ("v4", "small-bf16", ("gpu", "triton")),
    ("v3", "small-bf16", ("gpu", "triton")),
    ("v1", "tiny-fp32", ()),
)
VERIFIED = 512  # steps whose losses are kept; a process takes at most as many
CALLS = 4  # steps, of which the fastest counts as host time
STATES = ("parameter", "exp_avg", "exp_avg_sq")
UPDATE_SLACK = 0.01  # of an update: float32 rounds a weight of 1 by 0.02% of a step of 3e-4
LOSS_SLACK = 0.02  # of a loss: the order of atomic additions changes it over so many steps


@dataclass(frozen=True)
class TimedStep:
    """A tier's step on a workload in a precision, ``small-bf16``."""

    tier: str
    group: str


def benchmarks(device: torch.device) -> list[Benchmark]:
    """The steps that are timed on a device."""
    declared_steps = []
    for tier, group, needs in TIMED:
        here = not_here(Group.parse(group), device) is None
        if here and not any(cannot(need, device) for need in needs):
            name = f"step-{tier}-{group}/forward+backward+update"
            step = TimedStep(tier, group)
            declared_steps.append(Benchmark(name, step, __name__, factory=FACTORY))
    return declared_steps


@dataclass(frozen=True)
class Verified:
    """allowed: the error of each parameter's gradient. losses: one for each step."""

    allowed: dict[str, float]
    losses: list[float]


class StepSubject:
    """A training step as `tinyllama.harness.gate.worker.Side` times it."""

    def __init__(self, timed: TimedStep, device: str) -> None:
        self.device = current(device)
        with launched() as launches:
            self.step = TierStep(timed.tier, group=timed.group, device=device)
        self._launched = launches
        self.clock = Clock(self.step.queue, spin_seconds=1e-3)
        self.losses: list[float] = []

    def run_once(self) -> None:
        synchronize(self.device)

    def verify(self, seed: int) -> Verified:
        """A run whose gradients and updates are right. Its values are those of the first batches,
        whatever the seed. Raises WrongResultError."""
        allowed = self._check_gradients(None)
        self._check_update()
        while len(self.step.losses) < VERIFIED:
            self.step.next()
        return Verified(allowed, self.step.loss_series())

    def expect(self, proofs: Verified) -> None:
        """Compare this run with the verified one. Raises WrongResultError."""
        self.losses = proofs.losses
        self._check_gradients(proofs.allowed)
        for place in range(len(self.step.losses)):
            self._check(place)

    def _check_gradients(self, allowed: dict[str, float] | None) -> dict[str, float]:
        try:
            return self.step.check_gradients(allowed)
        except AssertionError as error:
            raise WrongResultError(str(error)) from error

    def _check_update(self) -> None:
        """Compare one step's update of every parameter, and of the optimizer's state, with AdamW in
        float64 on the gradients of that step. Raises WrongResultError."""
        optimizer, config = self.step.training.optimizer, self.step.config
        lists = (optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq)
        before = [[tensor.detach().double() for tensor in tensors] for tensors in lists]
        exact = [[tensor.clone() for tensor in tensors] for tensors in before]
        steps = optimizer.steps.detach().clone()
        self.step.next()
        gradients = [parameter.grad for parameter in optimizer.parameters]
        if any(gradient is None for gradient in gradients):
            raise WrongResultError("a parameter has no gradient after its step")
        OPS["adamw"]["eager"].call(
            exact[0],
            [gradient.double() for gradient in gradients if gradient is not None],
            *exact[1:],
            steps,
            torch.zeros_like(steps),
            lr=config.learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        if not torch.equal(steps, optimizer.steps):
            raise WrongResultError(f"{float(optimizer.steps):g} steps are counted, not {steps:g}")
        names = {id(value): name for name, value in self.step.parameters.items()}
        for what, now, then, expected in zip(STATES, lists, before, exact, strict=True):
            for place, tensor in enumerate(now):
                moved = expected[place] - then[place]
                error = (tensor.detach().double() - expected[place]).norm()
                if not error <= UPDATE_SLACK * moved.norm():
                    name = names.get(id(optimizer.parameters[place]), str(place))
                    raise WrongResultError(f"the update of {name}: its {what} is not AdamW's")

    def _check(self, place: int) -> None:
        if place >= len(self.losses):
            raise WrongResultError(f"step {place}: the verified run has {len(self.losses)}")
        got, expected = float(self.step.losses[place]), self.losses[place]
        if not (math.isfinite(expected) and abs(got - expected) <= LOSS_SLACK * abs(expected)):
            raise WrongResultError(
                f"step {place}: the loss is {got:.6g}, verified was {expected:.6g}"
            )

    def warm_up(self, seconds: float) -> None:
        """Repeat until the time is over, for at most half of the verified steps."""
        start = perf_counter()
        while perf_counter() - start < seconds and len(self.step.losses) < VERIFIED // 2:
            self.step.next()
            synchronize(self.device)

    def gated_turn(self, seed: int, call_number: int | None = None) -> dict[str, float]:
        """Seconds of a step, by reading, on the next batches. Each loss is held to the verified
        run's. Raises WrongResultError."""
        before = len(self.step.losses)
        seconds = self._turn()
        for place in range(before, len(self.step.losses)):
            self._check(place)
        return seconds

    def _turn(self) -> dict[str, float]:
        synchronize(self.device)
        began = perf_counter()
        took = [self._seconds() for _ in range(1 + CALLS)]
        enqueued = perf_counter() - began
        synchronize(self.device)
        work = (perf_counter() - began) / len(took)
        fastest = min(took[1:])  # the other side has filled the caches before the first
        if self.device.type == "cpu":
            return {DEVICE: fastest, ALL_WORK + DEVICE: work}
        device = self.clock.read(self._call).device
        host = {HOST: fastest, ALL_WORK + HOST: enqueued / len(took)}
        return {DEVICE: device, ALL_WORK + DEVICE: work, **host}

    def _seconds(self) -> float:
        """Seconds of the host in one step."""
        start = perf_counter()
        self._call()
        return perf_counter() - start

    def _call(self) -> None:
        self.step.next()

    def launched(self) -> Sequence[Launched]:
        """The launches of the steps before the captured one; it captures the same."""
        return self._launched

    def counted(self) -> dict[str, int]:
        if self.device.type == "cpu":
            return {}
        peak = self.step.memory()["peak_bytes"]
        return {"peak_bytes": peak, **launches(self._call, self.device).counts}

    def profile(self) -> dict[str, tuple[int, float]]:
        return launches(self._call, self.device).by_name

    def input_digest(self) -> int:
        """A digest of the batches and of the model: another model is another benchmark."""
        shapes = {name: tuple(value.shape) for name, value in self.step.parameters.items()}
        shape, config = self.step.shape, self.step.config
        heads = (shape.num_heads, shape.num_kv_heads, config.precision, config.accumulate)
        what = hashlib.sha256(repr((sorted(shapes.items()), heads)).encode()).digest()
        return digest([self.step.batches]) ^ int.from_bytes(what[:8], "little")
