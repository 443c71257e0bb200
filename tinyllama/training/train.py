"""Training a Tiny LLaMA in a tier: the loop, its checks, and its result.

    from tinyllama.model.config import PRESETS, TrainConfig
    from tinyllama.training.train import train
    result = train(PRESETS["tiny"], TrainConfig(num_steps=20), "v2")

Nothing is printed here. A resumed run takes ``num_steps`` more steps and continues the curve
of the run that it resumes: on the CPU bit for bit, on the same tier and machine.
"""

import contextlib
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import tinyllama
from tinyllama.harness.machine.device import device_name, memory_bytes, usable_device
from tinyllama.harness.machine.files import NotWrittenError, check_writable
from tinyllama.harness.machine.interrupts import held_interrupts
from tinyllama.harness.measure.clock import wall_seconds
from tinyllama.harness.measure.memory import forget_peak
from tinyllama.harness.records.results import versions
from tinyllama.model.config import ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import StepPlan, Tier, resolve
from tinyllama.ops.stack.single import WATCHDOG
from tinyllama.training.checkpoint import Checkpoint, save, saved_bytes
from tinyllama.training.data import Batch, Batches, RandomTokens
from tinyllama.training.diagnose import RECEIVED, diagnose, gradients
from tinyllama.training.memory import Memory
from tinyllama.training.ranks import ALONE, Ranks, queue_of_rank
from tinyllama.training.result import FAILED, INTERRUPTED, Result
from tinyllama.training.shards import shard
from tinyllama.training.step import TrainStep, products


@dataclass(frozen=True)
class StepRecord:
    """One step that is done: its number (from 1, over all resumed runs), its loss before the
    update, and the seconds it took."""

    number: int
    loss: float
    seconds: float


class NotSavedError(NotWrittenError):
    """The checkpoint of a run could not be written. result: of the run."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


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
    save_every: int | None = None,
    diagnosed: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
    ranks: Ranks = ALONE,
    in_shards: bool = False,
) -> Result:
    """Train for ``config.num_steps`` steps (beyond those of ``resume``).

    device: None takes the GPU if there is one. batches: None takes random tokens.
    plan: how steps are run; None takes the tier's default minus what cannot run here.
    save_to: where a checkpoint is written, unless the run fails; save_every: the number of steps
    after which it is also written. diagnosed: every op is, before the first and the last step, and
    in a step that fails.
    on_step: called after each step. A KeyboardInterrupt, in it or at any other time, ends the
    run after the step in progress.
    ranks: the processes, connected by `tinyllama.training.ranks.joined`, that call this together;
    the batch of ``config`` is that of all. in_shards: split the parameters over them (FSDP2).

    Raises UsageError (most often ConfigError), before the first step, for whatever cannot be
    done; NotSavedError, which has the result, when the checkpoint cannot be written.
    """
    tier, device = resolve(tier), usable_device(device)
    if reason := tier.cannot_run(device):
        raise ConfigError(f"tier {tier.name} cannot run on {device.type}: {reason}")
    _check_fits(model_config, config, device, ranks, in_shards)
    if ranks.first:
        check_writable(save_to, "--save", saved_bytes(model_config))
    with (
        torch.cuda.device(device) if device.type != "cpu" else contextlib.nullcontext(),
        products(config.precision, device),
    ):
        model = TinyLlama(model_config, tier, seed=config.seed)
        if in_shards:
            shard(model, config, device, ranks)
        else:
            model.to(device)
        step = TrainStep(model, config, plan, ranks)
        if resume is not None:
            resume.restore(step)
        batches = batches or RandomTokens(model_config.vocab_size, config)
        result = Result(
            model=model_config,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            train=config,
            tier=tier.name,
            plan=str(step.plan),
            left_out=step.left_out,
            ranks=ranks.count,
            in_shards=in_shards,
            batches=batches.describe(),
            start=resume.steps if resume else 0,
            device=device_name(device),
            versions={"tinyllama": tinyllama.__version__, **versions()},
        )
        run = _Run(step, batches, result, diagnosed, on_step, save_to, save_every)
        try:
            run.go()
            result.memory = Memory.of(step)
            if result.status != FAILED:
                with held_interrupts():
                    run.save()
        except NotWrittenError as error:
            result.memory = Memory.of(step)
            raise NotSavedError(str(error), result) from error
        return result


def _check_fits(
    model: ModelConfig, config: TrainConfig, device: torch.device, ranks: Ranks, in_shards: bool
) -> None:
    """Raise ConfigError for a run that must exhaust the memory: it holds at least the parameters
    with both moments, the tokens, and the embedding's output."""
    tokens = config.samples_per_step * config.seq_len // ranks.count
    width = 4 * config.batch_size * config.seq_len * model.hidden_dim // ranks.count
    state = 12 * model.parameters // (ranks.count if in_shards else 1)
    least, there = state + 16 * tokens + width, memory_bytes(device)
    if least > there:
        raise ConfigError(
            f"the run takes {least / 2**30:,.0f} GiB or more, and {device_name(device)} has "
            f"{there / 2**30:,.0f} GiB: use a smaller model or batch"
        )


@dataclass
class _Run:
    """A run in progress. What is known so far is in the result, even if it ends early."""

    step: TrainStep
    batches: Batches
    result: Result
    diagnosed: bool
    on_step: Callable[[StepRecord], None] | None
    save_to: Path | None
    save_every: int | None

    def __post_init__(self) -> None:
        self.queue = queue_of_rank(self.step.device, self.step.ranks)

    @property
    def done(self) -> int:
        """Steps done, over all resumed runs: the position in the data."""
        return self.result.start + len(self.result.losses)

    def go(self) -> None:
        """Run until the end, a failure, Ctrl-C or SIGTERM."""
        several, steps = self.step.ranks.count > 1, self.step.config.num_steps
        try:
            # Several ranks end after the same step, whichever of them got the signal.
            with contextlib.ExitStack() as stack:
                signals = stack.enter_context(held_interrupts()) if several else []
                self._prepare()
                for number in range(1, steps + 1):
                    if self.result.status == FAILED:
                        break
                    if signals:
                        self.step.stop.fill_(1.0)
                    self._one_step(number)
                    if several and self.step.stopping.item():
                        mine = signal.Signals(signals[0]).name if signals else ""
                        raise KeyboardInterrupt(mine or "a signal to another rank")
        except KeyboardInterrupt as interrupt:
            self.result.status = INTERRUPTED
            self.result.reason = (
                f"{str(interrupt) or 'Ctrl-C'} after {len(self.result.losses)} of {steps} steps"
            )
        if self.result.status != FAILED:
            self._fail_at_closed_barrier()

    def save(self) -> None:
        """Write a checkpoint of what is done so far, if there is a place for it."""
        if self.save_to is not None:
            interrupted = self.result.status == INTERRUPTED
            description = self.batches.describe()
            save(self.save_to, self.step, self.done, description, interrupted=interrupted)

    def _prepare(self) -> None:
        """Check the gradients, then compile, time the phases, warm up and capture."""
        batch = self.batches.batch(self.result.start, self.step.ranks)
        arrived = gradients(self.step, *batch)
        self.result.gradients = {name: what == RECEIVED for name, what in arrived.items()}
        self.result.lost = {name: what for name, what in arrived.items() if what != RECEIVED}
        if absent := list(arrived.values()).count("absent"):
            self._fail(
                f"no gradient arrives at {absent} of {len(arrived)} parameters, "
                "and the optimizer updates all of them or none"
            )
            return
        self.result.phase_seconds = self.step.split()
        forget_peak(self.step.device)
        self.step.prepare()

    def _one_step(self, number: int) -> None:
        batch = self.batches.batch(self.done, self.step.ranks)
        if self.diagnosed and number in (1, self.step.config.num_steps):
            self.result.diagnoses.append(diagnose(self.step, *batch, self.done + 1))
        with held_interrupts():
            seconds = wall_seconds(lambda: self.step(*batch), self.queue)
            loss = self.step.loss.item()
            norm = None if self.step.norm is None else self.step.norm.item()
            wrong = self._not_finite(loss, norm)
            if wrong is None:
                self.result.losses.append(loss)
                self.result.step_seconds.append(seconds)
                if norm is not None:
                    self.result.gradient_norms.append(norm if math.isfinite(norm) else None)
                saves = self.save_every and number % self.save_every == 0
                if saves and not self._fail_at_closed_barrier():
                    self.save()
        if wrong is not None:
            self._explain(wrong, batch)
        elif self.on_step is not None:
            self.on_step(StepRecord(self.done, loss, seconds))

    def _not_finite(self, loss: float, norm: float | None) -> str | None:
        """Which number is not finite. In fp16 the scaler finds its scale by gradients that
        overflow, and skips these steps; in other precisions such a norm stops the training."""
        if not math.isfinite(loss):
            return f"the loss of step {self.done + 1} is {loss}"
        if norm is None or math.isfinite(norm) or self.step.scaler.is_enabled():
            return None
        return f"the gradients' norm of step {self.done + 1} is {norm}"

    def _explain(self, wrong: str, batch: Batch) -> None:
        """Find where the numbers of a step went wrong; the step changed no parameter."""
        if self._fail_at_closed_barrier(f"{wrong}: "):
            return
        diagnosis = diagnose(self.step, *batch, self.done + 1)
        if self.diagnosed and diagnosis not in self.result.diagnoses:
            self.result.diagnoses.append(diagnosis)
        where = None
        if output := diagnosis.first_nonfinite:
            where = f"the first op whose output is not finite is {output.name}"
        elif gradient := diagnosis.last_nonfinite_gradient:
            where = f"the last op whose output's gradient is not finite is {gradient.name}"
        fallback = "run uncompiled, every op's output is finite: switch parts of the tier off"
        self._fail(f"{wrong}: {self._of_any_rank(where, ' on rank {}') or fallback}")

    def _fail_at_closed_barrier(self, wrong: str = "") -> bool:
        """Fail where a grid's barrier did not open on any rank; -> whether. One of a backward pass
        spoils no loss but that of the next step: so ask before parameters are saved, and at the
        end."""
        fault = self._of_any_rank(WATCHDOG.fault(self.step.device), " (rank {})")
        if fault:
            self._fail(wrong + fault)
        return bool(fault)

    def _of_any_rank(self, mine: str | None, place: str) -> str | None:
        """The first fault that a rank has; of several ranks with its place."""
        for rank, fault in enumerate(self.step.ranks.gathered(mine)):
            if fault:
                return fault + (place.format(rank) if self.step.ranks.count > 1 else "")
        return None

    def _fail(self, reason: str) -> None:
        self.result.status, self.result.reason = FAILED, reason
