"""One training step, and the ways to run it: as it is, compiled, captured.

The step is three phases (forward, backward, update) on static input buffers. Captured, all
three are one device graph, and a replay costs one launch. What may change between replays
lives on the device: the batch, the learning rate, the step count, and whether the loss was
finite (if it was not, the update leaves everything as it was).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Callable, Iterator

import torch

from tinyllama.config import ConfigError, TrainConfig
from tinyllama.harness.clock import queue_of, wall_seconds
from tinyllama.harness.device import cannot, synchronize
from tinyllama.model import TinyLlama
from tinyllama.optim import ON_HOST, AdamW
from tinyllama.tiers import StepPlan

PHASES = ("forward", "backward", "optimizer")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of float32 matrix products: IEEE, or tf32 where asked for.

    Raises ConfigError when the device does not have the precision.
    """
    reason = cannot(precision, device)
    if reason:
        raise ConfigError(
            f"precision {precision} is not there on {device.type}: {reason}; use fp32 or bf16"
        )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with warnings.catch_warnings():  # the compiler advises tf32 where IEEE was asked for
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class TrainStep:
    """A step of a model: ``loss = step(tokens, targets)``, a scalar on the device.

    plan: None takes the tier's default for the device, minus what cannot run there; the
    reasons are in ``left_out``. A plan that is given must run, or ConfigError is raised.
    Use it inside `products(precision)`; `prepare` must come first.
    """

    def __init__(
        self,
        model: TinyLlama,
        config: TrainConfig,
        plan: StepPlan | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = model.embedding.device
        self.left_out: dict[str, str] = {}
        self.plan = self._runnable(plan)
        self.optimizer = AdamW(model.parameters(), config, model.tier.table["adamw"])
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.tokens = torch.zeros(
            config.batch_size, config.seq_len, dtype=torch.int64, device=self.device
        )
        self.targets = torch.zeros_like(self.tokens)
        self.loss = torch.zeros((), device=self.device)
        self._loss_of: Callable[..., torch.Tensor] = model.loss_with
        if self.plan.compile:
            self._loss_of = torch.compile(model.loss_with, dynamic=False, fullgraph=True)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._early = torch.zeros((), pin_memory=self.device.type != "cpu")

    def _runnable(self, plan: StepPlan | None) -> StepPlan:
        wanted = plan or self.model.tier.plan(self.device.type)
        possible = {}
        for way in ("compile", "capture"):
            reason = cannot(way, self.device)
            if way == "capture":
                reason = reason or self._frozen_by_capture()
            possible[way] = getattr(wanted, way) and reason is None
            if getattr(wanted, way) and reason:
                if plan is not None:
                    raise ConfigError(f"{way} cannot run on {self.device.type}: {reason}")
                self.left_out[way] = reason
        return StepPlan(**possible)

    def _frozen_by_capture(self) -> str | None:
        """What a graph of this step would freeze; None when it may be captured."""
        if self.config.precision == "fp16":
            return "the fp16 gradient scaler reads the device in every step"
        if self.model.tier.table["adamw"] in ON_HOST:
            return "the optimizer of this tier counts its steps on the host"
        return None

    def __call__(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Train on one batch (B T) and return its loss, before the update."""
        self.tokens.copy_(tokens_BT, non_blocking=True)
        self.targets.copy_(targets_BT, non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._run()
        return self.loss

    def probe(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, *, compiled: bool = True
    ) -> torch.Tensor:
        """Forward and backward of one batch (B T), uncaptured and without the update.

        For hooks and observers, which a captured step would not call; ``compiled`` False
        leaves the compiler out too. Returns the loss and changes nothing: the gradients of
        the last step are put back, since a captured step owns theirs.
        """
        loss, loss_of = self.loss, self._loss_of
        gradients = [parameter.grad for parameter in self.optimizer.parameters]
        self.tokens.copy_(tokens_BT)
        self.targets.copy_(targets_BT)
        if not compiled:
            self._loss_of = self.model.loss_with
        try:
            self._forward()
            self._backward()
            return self.loss
        finally:
            self.loss, self._loss_of = loss, loss_of
            for parameter, gradient in zip(self.optimizer.parameters, gradients, strict=True):
                parameter.grad = gradient

    def prepare(self, *, warm_up: int = 3, capture: bool = True) -> None:
        """Warm up, compile and capture, and leave model and optimizer as they were."""
        with self.preserved():
            for _ in range(warm_up):
                self._run()
            synchronize(self.device)
        if self.plan.capture and capture:
            self.graphs = capture_graphs([self._forward, self._backward, self._update])

    def split(self, samples: int = 3) -> dict[str, float]:
        """Median seconds of each phase, run one by one; model and optimizer are kept."""
        phases: list[Callable[[], None]] = [self._forward, self._backward, self._update]
        queue = queue_of(self.device)
        with self.preserved():
            self._run()
            if self.plan.capture:
                phases = [graph.replay for graph in capture_graphs(*([p] for p in phases))]
            times: dict[str, list[float]] = {name: [] for name in PHASES}
            for _ in range(samples):
                for name, phase in zip(PHASES, phases, strict=True):
                    times[name].append(wall_seconds(phase, queue))
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore parameters, optimizer and scaler bit for bit at the end.

        The copies are kept in host memory, so that the device's peak stays that of a step.
        """
        tensors = [*self.model.parameters(), *self.optimizer.tensors().values()]
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        scaler = self.scaler.state_dict()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            self.optimizer.found_inf.zero_()
            if scaler:
                self.scaler.load_state_dict(scaler)
            self.optimizer.zero_grad(set_to_none=True)

    # -- the phases ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._forward()
        self._backward()
        self._update()

    def _forward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # before activations need the memory
        dtype = _AUTOCAST.get(self.config.precision)
        tables = self.model.rope(self.config.seq_len)
        # A captured graph must cast the weights anew in each replay: no cached casts.
        with torch.autocast(
            self.device.type, dtype, enabled=dtype is not None, cache_enabled=not self.plan.capture
        ):
            self._graph_loss = self._loss_of(self.tokens, self.targets, tables)
        self.loss = self._graph_loss.detach()
        if not self.plan.capture and self.device.type != "cpu":
            self._early.copy_(self.loss, non_blocking=True)
            self._seen = torch.cuda.Event()
            self._seen.record()

    def _backward(self) -> None:
        self.scaler.scale(self._graph_loss).backward()
        del self._graph_loss

    def _update(self) -> None:
        self._guard()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _guard(self) -> None:
        """Tell the optimizer to change nothing when the loss is not finite."""
        found = self.optimizer.found_inf
        if found.device.type == "cpu":
            # The loss was copied out after the forward pass; the device is still busy with
            # the backward pass, so waiting for that copy idles nothing.
            if self.device.type == "cpu":
                self._early.copy_(self.loss)
            else:
                self._seen.synchronize()
            found.fill_(0.0 if math.isfinite(self._early.item()) else 1.0)
        else:
            found.copy_(self.loss - self.loss != 0)


def capture_graphs(*graphs: list[Callable[[], None]]) -> list[torch.cuda.CUDAGraph]:
    """Capture lists of functions as device graphs that share one memory pool."""
    captured: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()
    for functions in graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for function in functions:
                function()
        captured.append(graph)
    return captured
