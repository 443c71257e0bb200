"""A stage in its worker: the step that is measured, what a participant is shown of it, and the
checks that find each stage's fault."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.bench.steps import UNTIMED, StepContender
from tinyllama.harness.check.candidate import Unsupported
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.launch import recorded
from tinyllama.harness.measure.clock import Queue, wall_seconds
from tinyllama.harness.measure.launches import launches
from tinyllama.ops import OPS
from tinyllama.training.data import TextBytes
from tinyllama.training.diagnose import RECEIVED, Diagnosis, diagnose, gradients
from tinyllama.workshop.stages import STAGES, step_of
from tinyllama.workshop.strided import attention

TEXT = Path(__file__).parent  # Python files, since a wheel has no documents
TEXT_STEPS = 60
NEAR = 0.5  # that a first loss, of weights that know nothing, may differ from ln(vocabulary)
TOLERANCE = 0.1  # share of a step's time by which the sum of its phases may differ


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


# -- checks: each returns what is wrong, or None; `Unsupported`: not on this device -------------


def first_loss(stage: StageStep) -> str | None:
    """Before the first update no token is preferred, so the loss is near ln(vocabulary)."""
    expected, loss = math.log(stage.shape.vocab_size), stage.first_loss
    if abs(loss - expected) <= NEAR:
        return None
    return f"the first loss is {loss:.1f}, and ln({stage.shape.vocab_size}) is {expected:.1f}"


def dense_inputs(stage: StageStep) -> str | None:
    """Every tensor that attention's kernel is launched with has a dense last axis. The launch is
    recorded with tensors that have no memory, so no GPU is needed."""
    if not HAS_TRITON:
        raise Unsupported("triton is not installed")
    shape, meta = stage.shape, torch.device("meta")
    size = (stage.config.batch_size, stage.config.seq_len)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    inputs = [torch.empty(*size, count, shape.head_dim, device=meta) for count in heads]
    with recorded("sm_90") as launched:
        attention(*inputs, dense=stage.parts.dense)
    strides = {
        name: tensor.stride(-1)
        for launch in launched
        for name, tensor in launch.arguments.items()
        if isinstance(tensor, torch.Tensor) and tensor.stride(-1) != 1
    }
    if not strides:
        return None
    text = ", ".join(f"{name}'s are {stride} apart" for name, stride in strides.items())
    return f"neighbours along the last axis are not adjacent in memory: {text}"


def phases_add_up(stage: StageStep) -> str | None:
    """The phases as reported sum to the time of a whole step from idle device to idle device."""
    if stage.device.type == "cpu":
        raise Unsupported("needs a GPU: a CPU works while it is called, so no clock can be early")
    return difference(sum(stage.phases().values()), stage.turn(5))


def difference(phases: float, step: float) -> str | None:
    """What is wrong with phases of these seconds in all, in a step of these seconds."""
    if abs(phases - step) <= TOLERANCE * step:
        return None
    return f"the phases are {phases * 1e3:.2f} ms in all, and the step is {step * 1e3:.2f} ms"


def products_by_blas(stage: StageStep) -> str | None:
    """SwiGLU's products go through torch, which has the BLAS library's: torch's counter of
    operations sees at least those of two products. No GPU is needed."""
    if not HAS_TRITON:
        raise Unsupported("triton is not installed")
    shape, config = stage.shape, stage.config
    tokens, width, wide = config.batch_size * config.seq_len, shape.hidden_dim, shape.ffn_dim
    sizes = ((config.batch_size, config.seq_len, width), (wide, width), (wide, width))
    inputs = [torch.empty(size, device="meta") for size in sizes]
    provider = OPS["swiglu"]["triton" if stage.parts.blas else "naive"]
    with recorded("sm_90") as launched, FlopCounterMode(display=False) as counter:
        provider.call(*inputs)
    expected, executed = 4 * tokens * width * wide, counter.get_total_flops()
    if executed >= expected:
        return None
    programs = max(math.prod(launch.grid) for launch in launched)
    return (
        f"torch computed {executed:,} of the products' {expected:,} operations: the others are in "
        f"a kernel of {programs:,} programs"
    )


def right_gradients(stage: StageStep) -> str | None:
    """Every parameter gets the gradient of the float64 reference, as before every timed step."""
    try:
        stage.verify()
    except AssertionError as error:
        return str(error)
    return None


CHECKS: dict[str, Callable[[StageStep], str | None]] = {
    "first loss": first_loss,
    "dense inputs": dense_inputs,
    "phases add up": phases_add_up,
    "products by BLAS": products_by_blas,
    "gradients": right_gradients,
}
