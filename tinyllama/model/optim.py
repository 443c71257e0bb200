"""AdamW as an optimizer: the state, and a call of the op's provider."""

import contextlib
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from tinyllama.harness.kernels.layout import as_one, placed_alike
from tinyllama.harness.kernels.parameter_memory import Offered, kept_transposed, rounded
from tinyllama.model.config import TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.ops import OPS
from tinyllama.ops.adamw import State, count, update, update_matrices
from tinyllama.ops.block.passes import WEIGHTS
from tinyllama.ops.stack.configs import turns


class Transposes(NamedTuple):
    """Parameters, by their indices in the order of their memory, which are matrices of some shapes
    (rows, columns) one behind the other, and the memory for the transposes of these, flat."""

    indices: list[int]
    shapes: list[tuple[int, int]]
    memory: torch.Tensor


class AdamW(torch.optim.Optimizer):
    """One parameter group; states are allocated at the start; the op ``adamw`` updates.

    provider: which implementation updates. ``lr`` is a tensor on the device, so that a captured
    step sees a new learning rate; a number for a provider that counts on the host.
    ``found_inf`` is a scalar of 0 or 1: with 1, `step` changes nothing. ``copies``: where the
    provider "triton" writes each updated parameter, rounded; None: nowhere. ``transposes``: groups
    of parameters that it updates together, and writes the transposes of.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], config: TrainConfig, provider: str = "eager"
    ) -> None:
        super().__init__(list(parameters), {"lr": config.learning_rate})
        chosen = OPS["adamw"][provider]
        self.update = chosen.call
        self._counts_apart = provider == "triton"
        self.copies: list[torch.Tensor] | None = None
        self.transposes: list[Transposes] = []
        self.settings = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        self.parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        on_host = chosen.counts_on_host
        device = torch.device("cpu") if on_host else self.parameters[0].device
        self.exp_avg = placed_alike(self.parameters)
        self.exp_avg_sq = placed_alike(self.parameters)
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.lr: float | torch.Tensor = config.learning_rate
        if not on_host:
            self.lr = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter in place. Raises RuntimeError when one has no gradient, since
        it would silently not learn."""
        self._apply(self._gradients(()), self.steps)

    @torch.no_grad()
    def begin(self, judged: torch.Tensor) -> None:
        """Begin a step whose updates come in parts, by `update_with` and `update_rest`; if the
        judged number is not finite, they change nothing."""
        self._done: set[int] = set()
        self._factors: torch.Tensor | None = None
        if self._counts_apart:
            rates = {name: value for name, value in self.settings.items() if name != "eps"}
            self._factors = count(self.steps, self.found_inf, self.lr, **rates, judged=judged)
        else:
            self.found_inf.copy_(judged - judged != 0)

    @torch.no_grad()
    def update_with(self, gradients: Mapping[int, torch.Tensor], beside: bool = False) -> None:
        """Update some parameters, by their index, with these gradients, after `begin`. beside:
        use few programs, to leave room for kernels that run at the same time."""
        self._done.update(gradients)
        steps = self.steps.clone() if self._factors is None else self.steps  # an op counts in place
        order = sorted(gradients)  # that of the buffer, if they are adjacent
        self._apply({i: gradients[i] for i in order}, steps, self._factors, beside)

    @torch.no_grad()
    def update_rest(self) -> None:
        """Update what `update_with` left since `begin`, and count the step. Raises RuntimeError as
        `step` does."""
        rest = self._gradients(self._done)
        if rest:
            self.update_with(rest)
        self.end()

    @torch.no_grad()
    def end(self) -> None:
        """Count a step all of whose parts are done, unless ``found_inf`` prevented its updates."""
        if self._factors is None:
            self.steps.add_(1 - self.found_inf)

    def refuse_missing(self, missing: int) -> None:
        """Raise RuntimeError when gradients are missing."""
        if missing:
            raise RuntimeError(
                f"{missing} of {len(self.parameters)} parameters have no gradient: "
                "backward stops somewhere"
            )

    def _gradients(self, done: Container[int]) -> dict[int, torch.Tensor]:
        """The gradients, by index, of the parameters that are not done."""
        self.refuse_missing(sum(p.grad is None for p in self.parameters))
        return {i: p.grad for i, p in enumerate(self.parameters) if i not in done}  # type: ignore[misc]

    def _apply(
        self,
        gradients: Mapping[int, torch.Tensor],
        steps: torch.Tensor,
        factors: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        def state_of(indices: Iterable[int]) -> State:
            states = (self.parameters, self.exp_avg, self.exp_avg_sq)
            parameters, exp_avg, exp_avg_sq = ([tensors[i] for i in indices] for tensors in states)
            grads = [gradients[i] for i in indices]
            return State(parameters, grads, exp_avg, exp_avg_sq, steps, self.found_inf)

        settings: dict[str, Any] = {"lr": self.lr, **self.settings}
        indices = list(gradients)
        if self.transposes:
            rates = {name: settings[name] for name in ("beta1", "beta2")}
            decay = {"lr": self.lr, "weight_decay": settings["weight_decay"]}
            if factors is None:
                factors = count(steps, self.found_inf, **decay, **rates)
            for group in self.transposes:
                if group.indices[0] in gradients:
                    written = (state_of(group.indices), group.shapes, group.memory, factors)
                    update_matrices(*written, **rates, eps=settings["eps"], few_programs=beside)
                    indices = [i for i in indices if i not in group.indices]
            if not indices:
                return
        state = state_of(indices)
        if self.copies is None and factors is None:
            self.update(*state, **settings)
            return
        low = None if self.copies is None else [self.copies[i] for i in indices]
        update(state, **settings, low=low, factors=factors, few_programs=beside)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; a captured step follows."""
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name, for a checkpoint."""
        named = {f"exp_avg.{i}": t for i, t in enumerate(self.exp_avg)}
        named.update({f"exp_avg_sq.{i}": t for i, t in enumerate(self.exp_avg_sq)})
        return {**named, "steps": self.steps}


class EarlyUpdate:
    """Updates a group of parameters once the last of its gradients is final, and frees these.

    So only the gradients of one group exist at a time, and those that the backward pass still
    sums. Nothing reads a parameter after its gradient is final, because whatever reads it in the
    backward pass contributes to its gradient. `AdamW.begin` comes before the backward pass.
    Autograd is told of the updates by `finish` only: parameters that count their versions together
    would seem changed to the part of the backward pass that is left.

    groups: each parameter of the optimizer is in one of them.
    """

    def __init__(self, optimizer: AdamW, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._running = self._updates = False
        self._waiting: set[int] = set()
        index = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
        for group in groups:
            arrived = partial(self._arrived, [index[id(parameter)] for parameter in group])
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(arrived)

    @contextlib.contextmanager
    def during(self, *, update: bool) -> Iterator[None]:
        """Run a backward pass in this context; without ``update`` gradients are only freed."""
        self._running, self._updates = True, update
        self._waiting = set(range(len(self._optimizer.parameters)))
        try:
            yield
        finally:
            self._running = False

    def finish(self) -> None:
        """Count the step. Raises RuntimeError when a gradient never came."""
        self._optimizer.refuse_missing(len(self._waiting))
        self._optimizer.end()
        if not self._optimizer.copies and not self._optimizer.transposes:  # written at once
            for parameter in self._optimizer.parameters:
                increment_version(parameter)

    def _arrived(self, indices: Sequence[int], _: torch.Tensor) -> None:
        parameters = [self._optimizer.parameters[i] for i in indices]
        gradients = {
            i: p.grad for i, p in zip(indices, parameters, strict=True) if p.grad is not None
        }
        if not self._running or len(gradients) < len(indices):
            return
        if self._updates:
            with _unsafe_preserve_version_counter(tuple(parameters)):
                self._optimizer.update_with(gradients)
        for parameter in parameters:
            parameter.grad = None
        self._waiting.difference_update(indices)


_VERSION = operator.attrgetter("_version")


def counted_apart(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One of the tensors for each of their version counters, which this increments."""
    left, counted = list(tensors), []
    while left:
        before = list(map(_VERSION, left))
        increment_version(left[0])
        counted.append(left[0])
        left = [t for t, version in zip(left, before, strict=True) if t._version == version]
    return counted


class _WeightCopy:
    """A copy in the layout of a model's parameters. When the optimizer updates a parameter, it also
    writes that parameter's part of the copy.

    If something else changed a parameter, `refresh` writes the whole copy again. It detects a
    change by PyTorch's version counters, so it does not see a write to ``data``.
    """

    _offered: Offered

    def __init__(self, model: TinyLlama, optimizer: AdamW, dtype: torch.dtype) -> None:
        self._counted = counted_apart(optimizer.parameters)
        some = model.embedding.detach()
        size = some.untyped_storage().nbytes() // some.element_size()
        self._master = some.as_strided((size,), (1,), 0)
        self._copy = torch.empty_like(self._master, dtype=dtype)
        self._versions: int | None = None

    def refresh(self) -> None:
        """Write the whole copy again if a parameter was changed since the last call."""
        versions = sum(map(_VERSION, self._counted))  # no version ever decreases
        if versions != self._versions:
            self._write()
            self._versions = versions

    def offered(self) -> contextlib.AbstractContextManager[object]:
        """A context in which products read the copy."""
        return self._offered(self._master, self._copy)

    def _write(self) -> None:
        raise NotImplementedError


class TransposedWeights(_WeightCopy):
    """The transpose of each matrix of a model's blocks, for products of the backward pass that read
    their operands along the inner axis alone (see `tinyllama.ops.stack.kernels`)."""

    _offered = kept_transposed

    def __init__(self, model: TinyLlama, optimizer: AdamW) -> None:
        super().__init__(model, optimizer, model.embedding.dtype)
        index = {id(p): i for i, p in enumerate(optimizer.parameters)}
        for layer in model.layers:
            weights = [getattr(layer, name) for name in WEIGHTS]
            start, columns = weights[0].storage_offset(), weights[0].shape[1]
            q, k, v, out, gate, up, down = (len(w) for w in weights)
            shapes = [(q + k + v, columns), (out, q), (gate + up, columns), (down, gate)]
            end = start + sum(w.numel() for w in weights)
            places = [index[id(w)] for w in weights]
            optimizer.transposes.append(Transposes(places, shapes, self._copy[start:end]))
        self._groups = optimizer.transposes

    def _write(self) -> None:
        for _, shapes, memory in self._groups:
            start = memory.storage_offset()
            for rows, columns in shapes:
                place = slice(start, start + rows * columns)
                matrix = self._master[place].view(rows, columns)
                self._copy[place].view(columns, rows).copy_(matrix.T)
                start = place.stop


class RoundedWeights(_WeightCopy):
    """Copies of a model's parameters in the dtype of its products, so that a step casts no
    weight."""

    _offered = rounded

    def __init__(self, model: TinyLlama, optimizer: AdamW, dtype: torch.dtype) -> None:
        super().__init__(model, optimizer, dtype)
        optimizer.copies = [
            self._copy.as_strided(p.shape, p.stride(), p.storage_offset())
            for p in optimizer.parameters
        ]

    def _write(self) -> None:
        with torch.no_grad():
            self._copy.copy_(self._master)


def weight_copies_of(
    model: TinyLlama, optimizer: AdamW, autocast: torch.dtype | None, rows: int | None
) -> RoundedWeights | TransposedWeights | None:
    """The copies that the products of a step of this model read, in the current precision of
    products; None where it reads none. rows: of its products; None: no transposes are kept."""
    table, dtype = model.tier.table, autocast or model.embedding.dtype
    if model.stack is None or table["adamw"] != "triton":
        return None
    if autocast is not None:
        return RoundedWeights(model, optimizer, autocast)
    if rows is None or table["stack"] == "single":
        return None
    x_ND = model.embedding.detach()[:1].expand(rows, -1)
    adjacent = all(
        as_one(*(getattr(layer, name) for name in WEIGHTS)) is not None for layer in model.layers
    )
    if adjacent and model.stacks(x_ND, dtype) and turns(x_ND, dtype):
        return TransposedWeights(model, optimizer)
    return None
