"""AdamW as an optimizer: the state, and a call of the op's provider."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tinyllama.model.config import TrainConfig
from tinyllama.ops import OPS


class AdamW(torch.optim.Optimizer):
    """One parameter group, states allocated at once, and the op ``adamw`` for the update.

    provider: which implementation updates. ``lr`` is a tensor on the device, so that a captured
    step sees a new learning rate; a number for a provider that counts on the host.
    ``found_inf`` is a scalar of 0 or 1: with 1, `step` changes nothing.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: TrainConfig,
        provider: str = "eager",
    ) -> None:
        super().__init__(list(parameters), {"lr": config.learning_rate})
        update = OPS["adamw"][provider]
        self.update = update.call
        self.settings = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        self.parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        on_host = update.counts_on_host
        device = torch.device("cpu") if on_host else self.parameters[0].device
        self.exp_avg = [torch.zeros_like(p) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.parameters]
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.lr: float | torch.Tensor = config.learning_rate
        if not on_host:
            self.lr = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter in place. Raises RuntimeError when one has no gradient, since
        it would silently not learn."""
        self.refuse_missing(sum(p.grad is None for p in self.parameters))
        self._apply(self.parameters, self.exp_avg, self.exp_avg_sq, self.steps)

    @torch.no_grad()
    def update_part(self, indices: Sequence[int]) -> None:
        """Update some parameters as `step` updates all, without counting the step: `count_step`
        does, when every part is done."""
        states = (self.parameters, self.exp_avg, self.exp_avg_sq)
        parameters, exp_avg, exp_avg_sq = ([tensors[i] for i in indices] for tensors in states)
        self._apply(parameters, exp_avg, exp_avg_sq, self.steps.clone())  # the op counts in place

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step whose parts are done, unless ``found_inf`` prevented its updates."""
        self.steps.add_(1 - self.found_inf)

    def refuse_missing(self, missing: int) -> None:
        """Raise RuntimeError when gradients are missing."""
        if missing:
            raise RuntimeError(
                f"{missing} of {len(self.parameters)} parameters have no gradient: "
                "backward stops somewhere"
            )

    def _apply(
        self,
        parameters: list[torch.Tensor],
        exp_avg: list[torch.Tensor],
        exp_avg_sq: list[torch.Tensor],
        steps: torch.Tensor,
    ) -> None:
        self.update(
            parameters,
            [p.grad for p in parameters],
            exp_avg,
            exp_avg_sq,
            steps,
            self.found_inf,
            lr=self.lr,
            **self.settings,
        )

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; a captured step follows."""
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the state before the first step, in the same memory."""
        for tensor in (*self.exp_avg, *self.exp_avg_sq, self.steps, self.found_inf):
            tensor.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name, for a checkpoint."""
        named = {f"exp_avg.{i}": t for i, t in enumerate(self.exp_avg)}
        named.update({f"exp_avg_sq.{i}": t for i, t in enumerate(self.exp_avg_sq)})
        return {**named, "steps": self.steps}


class EarlyUpdate:
    """Updates a group of parameters once the last of its gradients is final, and frees these.

    So at one time there are the gradients of one group, and those that backward still sums.
    Nothing reads a parameter after its gradient is final: whatever reads it in the backward
    pass contributes to it. ``found_inf`` must be set before the backward pass.

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
        self._optimizer.count_step()

    def _arrived(self, indices: Sequence[int], _: torch.Tensor) -> None:
        parameters = [self._optimizer.parameters[i] for i in indices]
        if not self._running or any(parameter.grad is None for parameter in parameters):
            return
        if self._updates:
            self._optimizer.update_part(indices)
        for parameter in parameters:
            parameter.grad = None
        self._waiting.difference_update(indices)
