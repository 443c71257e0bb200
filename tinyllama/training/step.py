"""One training step, and the ways to run it: eager, compiled, captured.

The step is three phases (forward, backward, update) on static input buffers; the first two
are repeated for each micro-batch. Captured, they are one device graph, and a replay costs one
launch. What may change between replays is on the device: the batch, the learning rate, the
step count, and whether the loss was finite.

plans    which ways a step can run here
loss     the loss: compiled, and with gradients reduced over ranks
updates  when parameters are updated, and how an update is left out
"""

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tinyllama.harness.kernels.addresses import TABLES
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.harness.measure.clock import Waited, queue_of, wall_seconds
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW, weight_copies_of
from tinyllama.model.tiers import StepPlan
from tinyllama.training.loss import StepLoss
from tinyllama.training.plans import AUTOCAST, runnable
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.shards import local
from tinyllama.training.updates import update_of

PHASES = ("forward", "backward", "optimizer")


@contextlib.contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of float32 matrix products: tf32 if that is the one, else IEEE.

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
        with warnings.catch_warnings():  # the compiler recommends tf32
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class TrainStep:
    """A step of a model: ``loss = step(tokens, targets)``, a scalar on the device.

    Its gradients are the parameters' ``grad``, except in memory mode ``small``, which frees each as
    soon as it was used: there, only a parameter's ``register_hook`` sees it. ``norm`` is the norm
    of all gradients before they are clipped, a scalar on the device; None if they are not clipped.

    plan: None takes the tier's default for the device, minus what cannot run there; the
    reasons are in ``left_out``. Raises ConfigError for a given plan that cannot run.
    ranks: config and loss are those of all ranks together; this rank takes its part of a batch.
    learning: the parameters that are updated; None: all.
    ``stop``: a scalar on the device, to be set to 1 where this rank must end; ``stopping`` is above
    0 after a step in which any rank had set it.
    Use it inside `products(precision)`, and call `prepare` first.
    """

    def __init__(
        self,
        model: TinyLlama,
        config: TrainConfig,
        plan: StepPlan | None = None,
        ranks: Ranks = ALONE,
        learning: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.device = model.embedding.device

        # how it runs
        self.plan, self.left_out = runnable(model, config, plan, ranks)
        small = self.plan.memory == "small"
        model.recompute = small and model.tier.table.get("block") != "small"
        self._autocast = AUTOCAST.get(config.precision)
        self._loss_of = StepLoss(model, config, self.plan, ranks)
        self.left_out.update(self._loss_of.left_out)
        parameters = map(local, model.parameters()) if learning is None else learning
        self.optimizer = AdamW(parameters, config, model.tier.table["adamw"])
        sums = self._loss_of.sums
        self.update = update_of(self.plan, model, config, self.optimizer, sums)
        self.scaler = self.update.scaler
        rows = config.batch_size * config.seq_len
        transposes = ranks.count == 1 and self.plan.memory == "fast"
        self.weight_copies = weight_copies_of(
            model, self.optimizer, self._autocast, rows if transposes else None
        )
        self.graphs: list[torch.cuda.CUDAGraph] = []

        # what a replay reads and writes
        part = ranks.part(config.samples_per_step)
        samples = part.stop - part.start
        self._shape = torch.Size((samples, config.seq_len))
        self._windows = torch.Size((samples, config.seq_len + 1))
        self._batch = torch.zeros((2, *self._shape), dtype=torch.int64, device=self.device)
        self.tokens, self.targets = (half.chunk(config.accumulate) for half in self._batch)
        self.loss = torch.zeros((), device=self.device)
        self._unit = torch.ones((), device=self.device)  # the gradient of the loss
        self._share = self._unit / ranks.count if sums else self._unit
        self._reduces, self._uncompiled = True, False
        self.stop = torch.zeros((), device=self.device)
        self.stopping = torch.zeros((), device=self.device)

    @property
    def norm(self) -> torch.Tensor | None:
        return self.update.norm

    def __call__(
        self, tokens: torch.Tensor, targets_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Train on one batch (B T) and return its loss, before the update.

        B is `TrainConfig.samples_per_step`: the micro-batches one after the other. Without targets,
        ``tokens`` are windows (B T + 1), of which each token but the first is a target: one copy.
        """
        self._load(tokens, targets_BT)
        self._refresh()
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._run()
        return self.loss

    # -- one step, in order ---------------------------------------------------------------------

    def _load(self, tokens: torch.Tensor, targets_BT: torch.Tensor | None) -> None:
        """Copy a batch into the buffers of its micro-batches, without waiting."""
        if targets_BT is None:
            if tokens.shape != self._windows:
                raise ValueError(
                    f"windows of shape {tuple(tokens.shape)}: this step takes "
                    f"{tuple(self._windows)}, or tokens and targets {tuple(self._shape)}"
                )
            rows, columns = tokens.stride()
            halves = tokens.as_strided(self._batch.shape, (columns, rows, columns))
            self._batch.copy_(halves, non_blocking=True)
            return
        if not tokens.shape == targets_BT.shape == self._shape:
            wrong = tokens if tokens.shape != self._shape else targets_BT
            raise ValueError(
                f"a batch of shape {tuple(wrong.shape)}: this step takes {tuple(self._shape)}"
            )
        for half, source in zip(self._batch, (tokens, targets_BT), strict=True):
            half.copy_(source, non_blocking=True)

    def _refresh(self) -> None:
        """Write the copies of the weights again, if something else changed these."""
        if self.weight_copies is not None:
            self.weight_copies.refresh()

    def _phases(self) -> list[tuple[str, Callable[[], None]]]:
        """What a step runs, in order: a micro-batch's activations are used before the next."""
        phases: list[tuple[str, Callable[[], None]]] = []
        for part in range(self.config.accumulate):
            phases += [("forward", partial(self._forward, part)), ("backward", self._backward)]
        return [*phases, ("optimizer", lambda: self.update.finish(self.loss))]

    def _run(self) -> None:
        for _, phase in self._phases():
            phase()

    def _forward(self, part: int) -> None:
        last = part == self.config.accumulate - 1
        if part == 0:  # its memory is free for activations
            self.optimizer.zero_grad(set_to_none=True)
            if self.update.sharded:  # the optimizer has the gradients of this rank's shards
                self.model.zero_grad(set_to_none=True)
        tables = self.model.rope(self.config.seq_len)
        # A captured graph must cast the weights again in each replay: no cached casts.
        autocast = torch.autocast(
            self.device.type,
            self._autocast,
            enabled=self._autocast is not None,
            cache_enabled=not self.plan.capture,
        )
        copies = self.weight_copies.offered() if self.weight_copies else contextlib.nullcontext()
        with autocast, copies:
            batch = self.tokens[part], self.targets[part], tables
            loss = self._loss_of(*batch, uncompiled=self._uncompiled, reduce=self._reduces and last)
        if self.config.accumulate > 1:
            loss = loss / self.config.accumulate
        self._graph_loss = loss
        self.loss = loss.detach() if part == 0 else self.loss + loss.detach()
        if not last:
            return
        if self._reduces and self.ranks.count > 1:
            means = self.ranks.mean(torch.stack([self.loss, self.stop]))
            self.loss, self.stopping = means.unbind()
        self.update.judge(self.loss)

    def _backward(self, update: bool = True) -> None:
        with self.update.beside_backward(update):
            upstream = self._share if self._reduces else self._unit
            self.scaler.scale(self._graph_loss).backward(upstream)
        del self._graph_loss

    # -- before the first step: warm-up and capture ---------------------------------------------

    def prepare(self, *, warm_up: int = 3, capture: bool = True) -> None:
        """Warm up, compile and capture; model and optimizer are the same afterwards."""
        with self.preserved() if warm_up else contextlib.nullcontext():
            self._refresh()
            if self.plan.capture and warm_up:
                warm_up = max(warm_up, self._loss_of.warm_up)
            for _ in range(warm_up):
                self._run()
            synchronize(self.device)
        if self.plan.capture and capture:
            self.graphs = capture_graphs([phase for _, phase in self._phases()])

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore parameters, optimizer and scaler bit for bit at the end.

        The copies are in host memory, so that the device's peak stays that of a step.
        """
        tensors = [*self.optimizer.parameters, *self.optimizer.tensors().values()]
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

    # -- a batch or its phases alone, after which nothing has changed ---------------------------

    def probe(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, *, compiled: bool = True
    ) -> torch.Tensor:
        """Forward and backward of one batch (B T), uncaptured and without the update.

        For hooks and observers, which a captured step would not call. With ``compiled`` False
        nothing is compiled, blocks run one by one, and memory mode ``small`` recomputes nothing.
        Returns the loss and changes nothing: the gradients of the last step are restored, since a
        captured step writes into the same tensors again.
        """
        self._refresh()
        recompute, self._reduces = self.model.recompute, False
        self._load(tokens_BT, targets_BT)
        if not compiled:
            self._uncompiled = True
            self.model.recompute = self.model.in_one = False
        with self._same_results():
            try:
                for part in range(self.config.accumulate):
                    self._forward(part)
                    self._backward(update=False)
                return self.loss
            finally:
                self._uncompiled, self.model.recompute = False, recompute
                self.model.in_one = self._reduces = True

    def split(self, samples: int = 3, queue: Waited | None = None) -> dict[str, float]:
        """Median seconds of each phase, run one by one; model and optimizer do not change.

        In memory mode ``small`` the backward pass also updates, and the optimizer's phase only
        counts the step. queue: the one that is waited for, and whose clock is read; None: the
        device's.
        """
        names, phases = zip(*self._phases(), strict=True)
        queue = queue or queue_of(self.device)
        with self._same_results(), self.preserved():
            self._refresh()
            # What several ranks begin beside one phase ends in the next: one graph, or none.
            capture = self.plan.capture and self.ranks.count == 1
            self._run()
            if capture:
                phases = tuple(partial(self._joined, phase) for phase in phases)
                phases = tuple(graph.replay for graph in capture_graphs(*([p] for p in phases)))
            times = {name: [0.0] * samples for name in PHASES}
            for sample in range(samples):
                for name, phase in zip(names, phases, strict=True):
                    times[name][sample] += wall_seconds(phase, queue)
        return {name: statistics.median(seconds) for name, seconds in times.items()}

    def _joined(self, phase: Callable[[], None]) -> None:
        """Run a phase and what it began beside it, which a graph of its own must end with."""
        phase()
        self.update.join()

    @contextlib.contextmanager
    def _same_results(self) -> Iterator[None]:
        """Restore the tensors that are the parameters' ``grad``, the loss and the norm, because a
        captured step writes into them."""
        loss, norm = self.loss, self.norm
        gradients = [parameter.grad for parameter in self.optimizer.parameters]
        try:
            yield
        finally:
            self.loss, self.update.norm = loss, norm
            for parameter, gradient in zip(self.optimizer.parameters, gradients, strict=True):
                parameter.grad = gradient


def capture_graphs(*graphs: Sequence[Callable[[], object]]) -> list[torch.cuda.CUDAGraph]:
    """Capture lists of functions as device graphs that share one memory pool."""
    captured: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()
    with TABLES.filled_once():
        for functions in graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for function in functions:
                    function()
            captured.append(graph)
    return captured
