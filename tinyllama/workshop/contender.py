"""A stage in its worker: the step that is measured, and what a participant is shown of it."""

import statistics
from dataclasses import replace
from typing import Any

from tinyllama.bench.curves import TEXT
from tinyllama.bench.steps import UNTIMED, StepContender
from tinyllama.harness.measure.clock import Queue, wall_seconds
from tinyllama.harness.measure.launches import launches
from tinyllama.training.data import TextBytes
from tinyllama.training.diagnose import RECEIVED, Diagnosis, diagnose, gradients
from tinyllama.workshop.stages import STAGES, Parts, step_of


class Unwaited:
    """A clock as stage 3 has it: it reads the host and does not wait for the device."""

    def __init__(self, queue: Queue) -> None:
        self.now = queue.now

    def synchronize(self) -> None:
        """Nothing, which is the fault."""


class StageStep(StepContender):
    """A stage by number; ``fixed``: without its fault."""

    def __init__(self, number: int, fixed: bool = False, **where: Any) -> None:
        super().__init__(**where)
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

    def lost(self) -> list[str]:
        """The parameters that get no gradient."""
        batch = self.batches[0]
        arrived = gradients(self.training, batch[:, :-1], batch[:, 1:])
        return [name for name, what in arrived.items() if what != RECEIVED]

    def diagnosed(self) -> Diagnosis:
        """Output and gradient of each op, on the weights as they are drawn."""
        step = step_of(self.parts, self.shape, self.config, self.device)
        return diagnose(step, self.batches[0][:, :-1], self.batches[0][:, 1:], 1)

    def kernels(self) -> dict[str, tuple[int, float]]:
        """Launches of a step, on a CPU its operators, by name: the number, and seconds in all."""
        return launches(self.next, self.device).by_name

    def text_losses(self, steps: int) -> dict[str, list[float]]:
        """The loss on real text of this stage, of the model whose embedding alone is updated, and
        of the whole model."""
        batches = TextBytes(TEXT, self.shape.vocab_size, self.config)
        differentiable = replace(self.parts, differentiable=True)
        runs: dict[str, tuple[Parts, tuple[str, ...]]] = {
            "this stage": (self.parts, ()),
            "embedding alone": (differentiable, ("embedding",)),
            "every parameter": (differentiable, ()),
        }
        losses = {}
        for name, (parts, only) in runs.items():
            step = step_of(parts, self.shape, self.config, self.device, only)
            step.prepare()
            losses[name] = [float(step(*batches.batch(index))) for index in range(steps)]
        return losses
