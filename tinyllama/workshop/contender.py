"""A stage in its worker: the step that is measured, and what a participant is shown of it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinyllama.bench.curves import TEXT
from tinyllama.bench.steps import UNTIMED, StepContender
from tinyllama.harness.check.finding import Unsupported
from tinyllama.harness.measure.clock import Queue, wall_seconds
from tinyllama.harness.measure.launches import launches
from tinyllama.training.data import TextBytes
from tinyllama.training.diagnose import RECEIVED, Diagnosis, diagnose, gradients
from tinyllama.workshop.checks import CHECKS
from tinyllama.workshop.stages import STAGES, step_of

TEXT_STEPS = 60


class Unwaited:
    """A clock as stage 3 has it: it reads the host and does not wait for the device."""

    def __init__(self, queue: Queue) -> None:
        self.now = queue.now

    def synchronize(self) -> None:
        """Nothing, which is the fault."""


@dataclass(frozen=True)
class Observations:
    """What is seen of a stage beside its speed.

    phases: seconds, by the stage's own clock. kernels: launches of a step, on a CPU its operators,
    by name: the number, and seconds in all. lost: parameters without a gradient. verdicts: of the
    stage as it is, and of the fixed one, the outcome of its check (``failed``, ``passed`` or
    ``unsupported``) and a message. diagnosis: the output and gradient of each op, where the weights
    are wrong. losses: on text, where nothing learns, of three models.
    """

    phases: Mapping[str, float]
    kernels: Mapping[str, tuple[int, float]]
    lost: Sequence[str]
    verdicts: Mapping[str, tuple[str, str]]
    diagnosis: Diagnosis | None
    losses: Mapping[str, Sequence[float]]


class StageStep(StepContender):
    """A stage by number; ``fixed``: without its fault."""

    def __init__(self, number: int, fixed: bool = False, **where: Any) -> None:
        super().__init__(**where)
        self.number, self.where = number, where
        self.stage = STAGES[number].fixed if fixed else STAGES[number]
        self.parts = self.stage.parts
        self.training = step_of(self.parts, self.shape, self.config, self.device)
        self.parameters = dict(self.training.model.named_parameters())
        self.step = self.training
        first = self.batches[0]
        self.first_loss = float(self.training.probe(first[:, :-1], first[:, 1:]))
        self.training.prepare(warm_up=self.warm_ups)
        self.started()

    def reported(self, calls: int) -> float:
        """Median seconds of a step by the stage's own clock."""
        if self.parts.waits:
            return self.turn(calls)
        for _ in range(UNTIMED):
            self.next()
        queue = Unwaited(self.queue)
        seconds = statistics.median(wall_seconds(self.next, queue) for _ in range(calls))
        self.queue.synchronize()  # else the next stage is timed beside what is still to run
        return seconds

    def phases(self) -> dict[str, float]:
        """Seconds of each phase, by the stage's own clock."""
        return self.training.split(queue=None if self.parts.waits else Unwaited(self.queue))

    def observations(self) -> Observations:
        """To be read after the stage was timed: the fixed stage is made in the same process."""
        tokens, targets = self.batches[0][:, :-1], self.batches[0][:, 1:]
        phases, kernels = self.phases(), launches(self.next, self.device).by_name
        diagnosis = None
        if not self.parts.initialised:
            as_drawn = step_of(self.parts, self.shape, self.config, self.device)
            diagnosis = diagnose(as_drawn, tokens, targets, 1)
        losses = {} if self.parts.differentiable else self.text_losses(TEXT_STEPS)
        verdicts = {"as it is": self.check(self.stage.check)}
        if self.stage.fault is not None:
            fixed = StageStep(self.number, fixed=True, **self.where)
            verdicts["fixed"] = fixed.check(self.stage.check)
        return Observations(phases, kernels, self.lost(), verdicts, diagnosis, losses)

    def check(self, name: str) -> tuple[str, str]:
        """The outcome of a check and a message."""
        try:
            problem = CHECKS[name](self)
        except Unsupported as reason:
            return "unsupported", str(reason)
        return ("failed", problem) if problem else ("passed", "")

    def lost(self) -> list[str]:
        """The parameters that get no gradient."""
        batch = self.batches[0]
        arrived = gradients(self.training, batch[:, :-1], batch[:, 1:])
        return [name for name, what in arrived.items() if what != RECEIVED]

    def text_losses(self, steps: int) -> dict[str, list[float]]:
        """The loss on real text of this stage, of the model whose embedding alone is updated, and
        of the whole model."""
        batches = TextBytes(TEXT, self.shape.vocab_size, self.config)
        differentiable = replace(self.parts, differentiable=True)
        losses = {}
        for name, parts, only in (
            ("this stage", self.parts, ()),
            ("embedding alone", differentiable, ("embedding",)),
            ("every parameter", differentiable, ()),
        ):
            step = step_of(parts, self.shape, self.config, self.device, only)
            step.prepare()
            losses[name] = [float(step(*batches.batch(index))) for index in range(steps)]
        return losses
