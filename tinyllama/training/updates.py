"""How a step updates its parameters: at the end, beside the backward pass, or as gradients arrive.

An update changes nothing where the number that is judged (the loss; where gradients are clipped,
plus their norm) is not finite. That is decided on the device, so that a captured step decides it in
every replay.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from tinyllama.harness.kernels.layout import as_one, joined
from tinyllama.harness.kernels.streams import Side
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.optim import AdamW
from tinyllama.model.tiers import StepPlan
from tinyllama.ops.stack import receiving
from tinyllama.training.shards import local, sharded


class Update:
    """One update after the backward pass.

    ``norm``: of all gradients before they are clipped, a scalar on the device; None if they are not
    clipped. ``scaler``: of the loss; it does something in fp16 only.
    """

    def __init__(self, model: TinyLlama, config: TrainConfig, optimizer: AdamW) -> None:
        device = model.embedding.device
        self.optimizer = optimizer
        self.parameters = list(model.parameters())
        self.sharded = sharded(model)
        self.limit = config.max_grad_norm
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.norm: torch.Tensor | None = None
        # Where no scaler is read, the launch that counts a step also judges its loss.
        table = model.tier.table
        in_one_launch = "stack" in table and table["adamw"] == "triton"
        self._counts_and_judges = in_one_launch and config.precision != "fp16"
        # An optimizer on the host waits for one number of the device: its copy, and an event.
        self._host_waits = optimizer.found_inf.device.type != device.type
        self._copied = torch.zeros((), pin_memory=self._host_waits)

    def judge(self, number: torch.Tensor) -> None:
        """Set the number that must be finite. For an optimizer on the host it is copied
        immediately, so that the host waits for this copy and not for work that is queued later."""
        self._judged = number
        if self._host_waits:
            self._judged = self._copied
            self._copied.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    @contextlib.contextmanager
    def beside_backward(self, update: bool) -> Iterator[None]:
        """A context for a backward pass. update: whether parameters may be updated in it."""
        yield

    def finish(self, loss: torch.Tensor) -> None:
        """Update what is left after the last backward pass, and count the step."""
        if self.sharded:
            for mine, shard in zip(self.optimizer.parameters, self.parameters, strict=True):
                mine.grad = None if shard.grad is None else local(shard.grad)
        if self.limit is not None:
            self.scaler.unscale_(self.optimizer)
            norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters, self.limit)
            self.norm = norm.full_tensor() if self.sharded else norm
            # A norm that is not finite would zero every finite gradient.
            self.judge(loss + self.norm)
        if self._counts_and_judges:
            self.optimizer.begin(self._judged)
            self.optimizer.update_rest()
            return
        self._wait()
        self.optimizer.found_inf.copy_(self._judged - self._judged != 0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def join(self) -> None:
        """Wait for what runs beside a phase: a graph of that phase alone must end with it."""

    def _wait(self) -> None:
        """Let an optimizer on the host wait for the judged number."""
        if self._host_waits:
            self._arrival.synchronize()


class UpdateBesideBackward(Update):
    """A block is updated on a side branch while the backward pass computes those below it.

    sums: whether gradients are to be summed over ranks first, those of a block on that branch.
    """

    def __init__(self, model: TinyLlama, config: TrainConfig, optimizer: AdamW, sums: bool) -> None:
        super().__init__(model, config, optimizer)
        self._sums = sums
        self._rounded = config.reduce_in == "bf16"
        self._side = Side(model.embedding.device)
        self._counted: torch.cuda.Event | None = None  # on the side branch
        self._received: set[int] = set()
        index = {id(p): i for i, p in enumerate(self.parameters)}
        self._index = {
            (layer, name): index[id(parameter)]
            for layer, block in enumerate(model.layers)
            for name, parameter in block.named_parameters()
        }

    @contextlib.contextmanager
    def beside_backward(self, update: bool) -> Iterator[None]:
        if not update:
            yield
            return
        with self._side.branch(keep=self._judged):  # no gradient waits for the count
            self.optimizer.begin(self._judged)
        self._counted = self._side.mark()
        self._received.clear()
        with receiving(self._receive):
            yield

    def _receive(
        self, layer: int, make: Callable[[], None], gradients: dict[str, torch.Tensor]
    ) -> None:
        """Compute the gradients of a block, and update it on the side branch during the rest of the
        backward pass. After block 0 no product is left that needs the processors, so its gradients
        are computed on the side branch too."""
        by_index = {self._index[layer, name]: grad for name, grad in gradients.items()}
        self._received.update(by_index)
        if layer:
            make()
        with self._side.branch(keep=None if layer else make):
            if not layer:
                make()
            if self._sums:
                self._sum([by_index[i] for i in sorted(by_index)])
            self.optimizer.update_with(by_index, beside=layer > 0)

    def finish(self, loss: torch.Tensor) -> None:
        self._side.wait(self._counted)
        if self._sums:
            others = [p.grad for i, p in enumerate(self.parameters) if i not in self._received]
            gradients = [gradient for gradient in others if gradient is not None]
            for gradient in gradients:
                if gradient.dim() > 1:
                    self._sum([gradient])
            self._sum([gradient for gradient in gradients if gradient.dim() == 1])
        self.optimizer.update_rest()
        self._side.join()

    def _sum(self, gradients: Sequence[torch.Tensor]) -> None:
        sum_over_ranks(gradients, self._rounded)

    def join(self) -> None:
        self._side.join()
        self._counted = None


class UpdateAsGradientsArrive(Update):
    """Memory mode small: a group of parameters (a layer; any other parameter) is updated once the
    last of its gradients is final, and these are freed.

    So only the gradients of one group exist at a time, and those that the backward pass still
    sums. Nothing reads a parameter after its gradient is final, because whatever reads it in the
    backward pass contributes to its gradient. Autograd is told of the updates by `finish` only:
    parameters that count their versions together would seem changed to the part of the backward
    pass that is left.
    """

    def __init__(self, model: TinyLlama, config: TrainConfig, optimizer: AdamW) -> None:
        super().__init__(model, config, optimizer)
        self._running = self._updates = False
        self._waiting: set[int] = set()
        index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        layers = [list(layer.parameters()) for layer in model.layers]
        inside = {id(parameter) for layer in layers for parameter in layer}
        for group in [*layers, *([p] for p in self.parameters if id(p) not in inside)]:
            arrived = partial(self._arrived, [index[id(parameter)] for parameter in group])
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(arrived)

    @contextlib.contextmanager
    def beside_backward(self, update: bool) -> Iterator[None]:
        if update:
            self._wait()
            self.optimizer.begin(self._judged)
        self._running, self._updates = True, update
        self._waiting = set(range(len(self.parameters)))
        try:
            # In this thread, the backward pass uses the BLAS workspace of the forward pass.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._running = False

    def _arrived(self, indices: Sequence[int], _: torch.Tensor) -> None:
        gradients = {
            i: gradient for i in indices if (gradient := self.parameters[i].grad) is not None
        }
        if not self._running or len(gradients) < len(indices):
            return
        parameters = [self.parameters[i] for i in indices]
        if self._updates:
            with _unsafe_preserve_version_counter(tuple(parameters)):
                self.optimizer.update_with(gradients)
        for parameter in parameters:
            parameter.grad = None
        self._waiting.difference_update(indices)

    def finish(self, loss: torch.Tensor) -> None:
        """Count the step. Raises RuntimeError when a gradient never came."""
        self.optimizer.refuse_missing(len(self._waiting))
        self.optimizer.end()
        if not self.optimizer.copies and not self.optimizer.transposes:  # written at once
            for parameter in self.parameters:
                increment_version(parameter)


def update_of(
    plan: StepPlan, model: TinyLlama, config: TrainConfig, optimizer: AdamW, sums: bool
) -> Update:
    """The update that a plan asks for. sums: over ranks, by the update itself."""
    if plan.memory == "small":
        return UpdateAsGradientsArrive(model, config, optimizer)
    if plan.overlap:
        return UpdateBesideBackward(model, config, optimizer, sums)
    return Update(model, config, optimizer)


def sum_over_ranks(tensors: Sequence[torch.Tensor], rounded: bool = False) -> None:
    """Sum each tensor over the ranks, in place; adjacent or small tensors are summed together.

    rounded: to bfloat16 before they are sent.
    """
    if not tensors:
        return
    adjacent = as_one(*tensors)
    if adjacent is not None:
        sent = adjacent.bfloat16() if rounded else adjacent
        dist.all_reduce(sent)
        if rounded:
            adjacent.copy_(sent)
        return
    copy = joined(tensors).bfloat16() if rounded else joined(tensors)
    dist.all_reduce(copy)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, summed in zip(tensors, copy.split(sizes), strict=True):
        tensor.copy_(summed.view(tensor.shape))
