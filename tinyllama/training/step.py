"""One training step, and the ways to run it: eager, compiled, captured.

The step is three phases (forward, backward, update) on static input buffers; the first two
are repeated for each micro-batch. Captured, they are one device graph, and a replay costs one
launch. What may change between replays is on the device: the batch, the learning rate, the
step count, and whether the loss was finite (if it was not, the update changes nothing; where
gradients are clipped, their norm must be finite too).

Of several ranks each runs its part of the batch. Gradients, loss and norm are those of the whole
batch (`tinyllama.training.reduction`), so all ranks make the same update, or none does.
"""

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tinyllama.harness.kernels.addresses import TABLES
from tinyllama.harness.kernels.streams import Side
from tinyllama.harness.machine.device import cannot, synchronize
from tinyllama.harness.measure.clock import Waited, queue_of, wall_seconds
from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW, EarlyUpdate, RoundedWeights, TransposedWeights
from tinyllama.model.tiers import StepPlan
from tinyllama.ops.stack import receiving
from tinyllama.training.compiled import LossOf, compiled
from tinyllama.training.plans import AUTOCAST, runnable
from tinyllama.training.ranks import ALONE, Ranks
from tinyllama.training.reduction import reduction_of

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
    ) -> None:
        self.model = model
        self.config = config
        self.ranks = ranks
        self.device = model.embedding.device
        self.plan, self.left_out = runnable(model, config, plan, ranks)
        loss_of: LossOf = model.loss_with
        if self.plan.compile:
            loss_of = compiled(model, ranks)
            if ranks.count > 1:
                self.left_out["one compiled graph"] = "blocks are reduced one by one"
        self._reduction, left_out = reduction_of(model, config, self.plan, ranks, loss_of)
        self.left_out.update(left_out)
        parameters = self._reduction.parameters
        self.optimizer = AdamW(parameters, config, model.tier.table["adamw"])
        dtype, mine = AUTOCAST.get(config.precision), ranks.part(config.samples_per_step)
        weights: RoundedWeights | TransposedWeights | None
        weights = RoundedWeights.of(model, self.optimizer, dtype)
        if weights is None and ranks.count == 1 and self.plan.memory == "fast":
            rows = config.samples_per_step // config.accumulate * config.seq_len
            weights = TransposedWeights.of(model, self.optimizer, rows, dtype)
        self.rounded = weights
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self._shape = torch.Size((mine.stop - mine.start, config.seq_len))
        self._windows = torch.Size((mine.stop - mine.start, config.seq_len + 1))
        self._batch = torch.zeros((2, *self._shape), dtype=torch.int64, device=self.device)
        self.tokens, self.targets = (half.chunk(config.accumulate) for half in self._batch)
        self.loss = torch.zeros((), device=self.device)
        self._one = torch.ones((), device=self.device)  # the gradient of the loss
        self._share = self._one * self._reduction.share
        self.norm: torch.Tensor | None = None
        self.stop = torch.zeros((), device=self.device)
        self.stopping = torch.zeros((), device=self.device)
        self._reduces = True
        self.graphs: list[torch.cuda.CUDAGraph] = []
        small = self.plan.memory == "small"
        model.recompute = small and model.tier.table.get("block") != "small"
        self._early_update = EarlyUpdate(self.optimizer, update_groups(model)) if small else None
        self._side = Side(self.device)
        self._counted: torch.cuda.Event | None = None  # of an overlapped step, on its side branch
        index = {id(p): i for i, p in enumerate(model.parameters())}
        self._index = {
            (layer, name): index[id(parameter)]
            for layer, block in enumerate(model.layers)
            for name, parameter in block.named_parameters()
        }
        # Where no scaler is read, the launch that counts a step also judges its loss.
        table = model.tier.table
        in_one = "stack" in table and table["adamw"] == "triton"
        self._counts_and_judges = in_one and config.precision != "fp16"
        # An optimizer on the host waits for one number of the device: its copy, and an event.
        self._host_waits = self.optimizer.found_inf.device.type != self.device.type
        self._copied = torch.zeros((), pin_memory=self._host_waits)

    def __call__(
        self, tokens: torch.Tensor, targets_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Train on one batch (B T) and return its loss, before the update.

        B is `TrainConfig.samples_per_step`: the micro-batches one after the other. Without targets,
        ``tokens`` are windows (B T + 1), of which each token but the first is a target: one copy.
        """
        self._load(tokens, targets_BT)
        if self.rounded is not None:
            self.rounded.refresh()
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._run()
        return self.loss

    def probe(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, *, compiled: bool = True
    ) -> torch.Tensor:
        """Forward and backward of one batch (B T), uncaptured and without the update.

        For hooks and observers, which a captured step would not call. With ``compiled`` False
        nothing is compiled, blocks run one by one, and memory mode ``small`` recomputes nothing.
        Returns the loss and changes nothing: the gradients of the last step are restored, since a
        captured step writes into the same tensors again.
        """
        if self.rounded is not None:
            self.rounded.refresh()
        recompute, self._reduces = self.model.recompute, False
        self._load(tokens_BT, targets_BT)
        if not compiled:
            self._reduction.plain = True
            self.model.recompute = self.model.in_one = False
        with self._same_results():
            try:
                for part in range(self.config.accumulate):
                    self._forward(part)
                    self._backward(update=False)
                return self.loss
            finally:
                self._reduction.plain, self.model.recompute = False, recompute
                self.model.in_one = self._reduces = True

    def prepare(self, *, warm_up: int = 3, capture: bool = True) -> None:
        """Warm up, compile and capture; model and optimizer are the same afterwards."""
        with self.preserved() if warm_up else contextlib.nullcontext():
            if self.rounded is not None:
                self.rounded.refresh()
            if self.plan.capture and warm_up:
                warm_up = max(warm_up, self._reduction.warm_up)
            for _ in range(warm_up):
                self._run()
            synchronize(self.device)
        if self.plan.capture and capture:
            self.graphs = capture_graphs([phase for _, phase in self._phases()])

    def split(self, samples: int = 3, queue: Waited | None = None) -> dict[str, float]:
        """Median seconds of each phase, run one by one; model and optimizer do not change.

        In memory mode ``small`` the backward pass also updates, and the optimizer's phase only
        counts the step. queue: the one that is waited for, and whose clock is read; None: the
        device's.
        """
        names, phases = zip(*self._phases(), strict=True)
        queue = queue or queue_of(self.device)
        with self._same_results(), self.preserved():
            if self.rounded is not None:
                self.rounded.refresh()
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
        """A phase and what it began beside it, which a graph of its own must end with."""
        phase()
        self._side.join()
        self._counted = None

    @contextlib.contextmanager
    def _same_results(self) -> Iterator[None]:
        """Restore the tensors that are the parameters' ``grad``, the loss and the norm, because a
        captured step writes into them."""
        loss, norm = self.loss, self.norm
        gradients = [parameter.grad for parameter in self.optimizer.parameters]
        try:
            yield
        finally:
            self.loss, self.norm = loss, norm
            for parameter, gradient in zip(self.optimizer.parameters, gradients, strict=True):
                parameter.grad = gradient

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

    def _load(self, tokens: torch.Tensor, targets_BT: torch.Tensor | None) -> None:
        """Copy a batch into the buffers of its micro-batches, without waiting."""
        if targets_BT is None:
            if tokens.shape != self._windows:
                raise ValueError(
                    f"windows of shape {tuple(tokens.shape)}: this step takes "
                    f"{tuple(self._windows)}, or tokens and targets {tuple(self._shape)}"
                )
            rows, columns = tokens.stride()
            both = tokens.as_strided(self._batch.shape, (columns, rows, columns))
            self._batch.copy_(both, non_blocking=True)
            return
        if not tokens.shape == targets_BT.shape == self._shape:
            wrong = tokens if tokens.shape != self._shape else targets_BT
            raise ValueError(
                f"a batch of shape {tuple(wrong.shape)}: this step takes {tuple(self._shape)}"
            )
        for half, given_BT in zip(self._batch, (tokens, targets_BT), strict=True):
            half.copy_(given_BT, non_blocking=True)

    # -- the phases ---------------------------------------------------------------------------

    def _phases(self) -> list[tuple[str, Callable[[], None]]]:
        """What a step runs, in order: a micro-batch's activations are used before the next."""
        phases: list[tuple[str, Callable[[], None]]] = []
        for part in range(self.config.accumulate):
            phases += [("forward", partial(self._forward, part)), ("backward", self._backward)]
        return [*phases, ("optimizer", self._update)]

    def _run(self) -> None:
        for _, phase in self._phases():
            phase()

    def _forward(self, part: int) -> None:
        last = part == self.config.accumulate - 1
        if part == 0:  # its memory is free for activations
            self.optimizer.zero_grad(set_to_none=True)
            self._reduction.clear()
        self._reduction.expect(self._reduces and last)
        dtype = AUTOCAST.get(self.config.precision)
        tables = self.model.rope(self.config.seq_len)
        # A captured graph must cast the weights again in each replay: no cached casts.
        autocast = torch.autocast(
            self.device.type, dtype, enabled=dtype is not None, cache_enabled=not self.plan.capture
        )
        with autocast, self.rounded.offered() if self.rounded else contextlib.nullcontext():
            loss = self._reduction.loss(self.tokens[part], self.targets[part], tables)
        if self.config.accumulate > 1:
            loss = loss / self.config.accumulate
        self._graph_loss = loss
        self.loss = loss.detach() if part == 0 else self.loss + loss.detach()
        if last:
            if self._reduces and self.ranks.count > 1:
                both = torch.stack([self.loss, self.stop])
                self.loss, self.stopping = self.ranks.mean(both).unbind()
            self._judge(self.loss)

    def _backward(self, update: bool = True) -> None:
        """update: in memory mode ``small``, whether to update parameters as gradients arrive."""
        releasing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if update and self.plan.overlap:
            self._count()
            releasing = receiving(self._receive)
        if self._early_update is not None:
            if update:
                self._guard()
            releasing = self._early_update.during(update=update)
        # In this thread, the backward pass uses the BLAS workspace of the forward pass.
        one_thread = self._early_update is not None
        with releasing, torch.autograd.set_multithreading_enabled(not one_thread):
            upstream = self._share if self._reduces else self._one
            self.scaler.scale(self._graph_loss).backward(upstream)
        del self._graph_loss

    def _count(self) -> None:
        """Judge the loss and count the step on the side branch: no gradient waits for that."""
        with self._side.branch(keep=self._judged):
            self.optimizer.begin(self._judged)
        self._counted = self._side.mark()

    def _receive(
        self, layer: int, make: Callable[[], None], gradients: dict[str, torch.Tensor]
    ) -> None:
        """Compute the gradients of a block, and update it on the side branch during the rest of the
        backward pass. After block 0 no product is left that needs the processors, so its gradients
        are computed on the side branch too."""
        mine = {self._index[layer, name]: grad for name, grad in gradients.items()}
        if layer:
            make()
        with self._side.branch(keep=None if layer else make):
            if not layer:
                make()
            self._reduction.reduce(mine)
            self.optimizer.update_with(mine, beside=layer > 0)

    def _update(self) -> None:
        if self._reduction.early and not self.plan.overlap:
            self.optimizer.begin(self._judged)
        if self.plan.overlap:
            self._side.wait(self._counted)
        for gradients in self._reduction.arrive():
            self.optimizer.update_with(gradients, beside=False)
        self._reduction.finish()
        if self.plan.overlap or self._reduction.early:
            self.optimizer.update_rest()
            self._side.join()
            return
        if self._early_update is not None:
            self._early_update.finish()
            return
        if self.config.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.norm = self._reduction.clip(self.config.max_grad_norm)
            # A norm that is not finite would zero every finite gradient.
            self._judge(self.loss + self.norm)
        if self._counts_and_judges:
            self.optimizer.begin(self._judged)
            self.optimizer.update_rest()
            return
        self._guard()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _judge(self, number: torch.Tensor) -> None:
        """Set the number that the guard checks. For an optimizer on the host it is copied
        immediately, so that the host waits for this copy and not for work that is queued later."""
        self._judged = number
        if self._host_waits:
            self._judged = self._copied
            self._copied.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def _guard(self) -> None:
        """Make the optimizer change nothing when the judged number is not finite."""
        if self._host_waits:
            self._arrival.synchronize()
        self.optimizer.found_inf.copy_(self._judged - self._judged != 0)


def update_groups(model: TinyLlama) -> list[list[torch.nn.Parameter]]:
    """Groups of parameters that memory mode ``small`` updates together: a layer; any other one."""
    layers = [list(layer.parameters()) for layer in model.layers]
    inside = {id(parameter) for layer in layers for parameter in layer}
    return [*layers, *([p] for p in model.parameters() if id(p) not in inside)]


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
