"""Training a Tiny LLaMA in a tier: the loop, what it watches, and what it leaves behind.

    from tinyllama.model.config import PRESETS, TrainConfig
    from tinyllama.training.train import train
    result = train(PRESETS["tiny"], TrainConfig(num_steps=20), "v2")

Nothing is printed here. A resumed run takes ``num_steps`` more steps and continues the curve
of the run that it resumes: on the CPU bit for bit, on the same tier and machine.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import tinyllama
from tinyllama.harness.machine.device import device_name, usable_device
from tinyllama.harness.machine.files import check_writable
from tinyllama.harness.measure.clock import queue_of, wall_seconds
from tinyllama.harness.records.results import versions
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan, Tier, resolve
from tinyllama.training.checkpoint import Checkpoint, save
from tinyllama.training.data import Batch, Batches, RandomTokens
from tinyllama.training.diagnose import RECEIVED, Diagnosis, diagnose, gradients
from tinyllama.training.memory import MemoryMeter
from tinyllama.training.result import COMPLETED, FAILED, INTERRUPTED, Result
from tinyllama.training.step import TrainStep, products


@dataclass(frozen=True)
class StepRecord:
    """One step that is done: its number (from 1, over all resumed runs), its loss before the
    update, the seconds it took, and the bytes that are live after it."""

    number: int
    loss: float
    seconds: float
    live_bytes: int


def train(
    model_config: ModelConfig,
    config: TrainConfig,
    tier: str | Tier = "v1",
    *,
    device: str | torch.device | None = None,
    batches: Batches | None = None,
    plan: StepPlan | None = None,
    resume: Checkpoint | None = None,
    save_to: Path | None = None,
    diagnose_at: Collection[int] = (),
    on_step: Callable[[StepRecord], None] | None = None,
) -> Result:
    """Train for ``config.num_steps`` steps (beyond those of ``resume``) and say how it went.

    device: None takes the GPU if there is one. batches: None takes random tokens.
    plan: how steps are run; None takes the tier's default minus what cannot run here.
    save_to: a checkpoint is written there, unless the run failed. diagnose_at: numbers of
    steps, counted from 1 in this run, before which every op is looked into; with any, so is
    the step that fails.
    on_step: called after each step; a KeyboardInterrupt in it, or at any other time, ends
    the run after the step in progress. torch's random state is left as it was found.

    Raises ConfigError, before the first step, for whatever cannot be done.
    """
    tier = resolve(tier)
    device = usable_device(device)
    reason = tier.cannot_run(device)
    if reason:
        raise ConfigError(f"tier {tier.name} cannot run on {device.type}: {reason}")
    if save_to is not None:
        check_writable(save_to, "--save")
    on_gpu = device.type != "cpu"
    with (
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
        torch.random.fork_rng([device] if on_gpu else []),
        products(config.precision, device),
    ):
        model = TinyLlama(model_config, tier, seed=config.seed).to(device)
        step = TrainStep(model, config, plan)
        if resume is not None:
            resume.restore(step)
        batches = batches or RandomTokens(model_config.vocab_size, config)
        run = _Run(step, batches, resume, frozenset(diagnose_at), on_step)
        run.go()
        if save_to is not None and run.status != FAILED:
            interrupted = run.status == INTERRUPTED
            save(save_to, step, run.done, batches.describe(), interrupted=interrupted)
        return run.result()


class _Run:
    """A run in progress: what has been seen so far is there even when it ends early."""

    def __init__(
        self,
        step: TrainStep,
        batches: Batches,
        resume: Checkpoint | None,
        diagnose_at: frozenset[int],
        on_step: Callable[[StepRecord], None] | None,
    ) -> None:
        self.step = step
        self.batches = batches
        self.resume = resume
        self.start = resume.steps if resume else 0
        self.diagnose_at = diagnose_at
        self.on_step = on_step
        self.meter = MemoryMeter(step)
        self.status = COMPLETED
        self.reason: str | None = None
        self.losses: list[float] = []
        self.gradient_norms: list[float | None] = []
        self.step_seconds: list[float] = []
        self.phase_seconds: dict[str, float] = {}
        self.verdicts: dict[str, str] = {}
        self.diagnoses: list[Diagnosis] = []

    @property
    def done(self) -> int:
        """Steps done, over all resumed runs: the place in the data."""
        return self.start + len(self.losses)

    def go(self) -> None:
        """Run until the end, a failure or Ctrl-C."""
        try:
            self._prepare()
            for number in range(1, self.step.config.num_steps + 1):
                if self.status == FAILED:
                    break
                self._one_step(number)
        except KeyboardInterrupt:
            self.status = INTERRUPTED
            self.reason = f"Ctrl-C after {len(self.losses)} of {self.step.config.num_steps} steps"

    def _prepare(self) -> None:
        """Look at the gradients, then compile, time the phases, warm up and capture."""
        self.verdicts = gradients(self.step, *self.batches.batch(self.start))
        absent = [name for name, verdict in self.verdicts.items() if verdict == "absent"]
        if absent:
            self._fail(
                f"no gradient arrives at {len(absent)} of {len(self.verdicts)} parameters, "
                "and the optimizer does not update in part"
            )
            return
        self.phase_seconds = self.step.split()
        self.meter.start()
        self.step.prepare()
        if self.resume is not None:
            self.resume.restore_random(self.step.device)
        else:
            _seed(self.step.config.seed, self.step.device)

    def _one_step(self, number: int) -> None:
        batch = self.batches.batch(self.done)
        if number in self.diagnose_at:
            with self.meter.paused():
                self.diagnoses.append(diagnose(self.step, *batch, self.done + 1))
        with _held_interrupt():
            seconds = wall_seconds(lambda: self.step(*batch), queue_of(self.step.device))
            loss, norm = self._numbers()
            wrong = self._wrong(loss, norm)
            if wrong is None:
                self.losses.append(loss)
                self.step_seconds.append(seconds)
                if norm is not None:
                    self.gradient_norms.append(norm if math.isfinite(norm) else None)
        if wrong is not None:
            self._explain(wrong, batch, number)
        elif self.on_step is not None:
            self.on_step(StepRecord(self.done, loss, seconds, self.meter.live()))

    def _numbers(self) -> tuple[float, float | None]:
        """The loss of the step that was taken, and the norm of its gradients if it clips."""
        norm = self.step.norm
        return self.step.loss.item(), None if norm is None else norm.item()

    def _wrong(self, loss: float, norm: float | None) -> str | None:
        """What is not finite. In fp16 the scaler finds its scale by gradients that are not,
        and skips these steps; elsewhere such a norm would stop all gradients."""
        if not math.isfinite(loss):
            return f"the loss of step {self.done + 1} is {loss}"
        if norm is None or math.isfinite(norm) or self.step.scaler.is_enabled():
            return None
        return f"the gradients' norm of step {self.done + 1} is {norm}"

    def _explain(self, wrong: str, batch: Batch, number: int) -> None:
        """Find where the numbers of a step went wrong; it has changed no parameter."""
        diagnosis = diagnose(self.step, *batch, self.done + 1)
        if self.diagnose_at and number not in self.diagnose_at:
            self.diagnoses.append(diagnosis)
        if output := diagnosis.first_nonfinite:
            where = f"the first op whose output is not finite is {output.name}"
        elif gradient := diagnosis.last_nonfinite_gradient:
            where = f"the last op whose output's gradient is not finite is {gradient.name}"
        else:
            where = "run uncompiled, every op's output is finite: leave parts of the tier out"
        self._fail(f"{wrong}: {where}")

    def _fail(self, reason: str) -> None:
        self.status, self.reason = FAILED, reason

    def result(self) -> Result:
        model = self.step.model
        return Result(
            status=self.status,
            reason=self.reason,
            model=model.config,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            train=self.step.config,
            tier=model.tier.name,
            plan=str(self.step.plan),
            left_out=self.step.left_out,
            batches=self.batches.describe(),
            start=self.start,
            losses=tuple(self.losses),
            gradient_norms=tuple(self.gradient_norms),
            step_seconds=tuple(self.step_seconds),
            phase_seconds=self.phase_seconds,
            memory=self.meter.read(),
            gradients={name: verdict == RECEIVED for name, verdict in self.verdicts.items()},
            lost={n: verdict for n, verdict in self.verdicts.items() if verdict != RECEIVED},
            diagnoses=tuple(self.diagnoses),
            device=device_name(self.step.device),
            versions={"tinyllama": tinyllama.__version__, **versions()},
        )


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of this device, and of no other."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def _held_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the step is done: an update must not stop half way.

    Signals reach the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
