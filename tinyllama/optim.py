"""AdamW as an optimizer: the state, and a call of the op's provider."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tinyllama.config import TrainConfig
from tinyllama.ops import OPS

ON_HOST = ("default",)  # providers that read their step count on the host, as torch's does


class AdamW(torch.optim.Optimizer):
    """One parameter group, states made at once, and the op ``adamw`` for the update.

    provider: which implementation updates. ``lr`` is a tensor on the device, except for the
    provider that works on the host, so that a captured step sees a new learning rate.
    ``found_inf`` is a scalar of 0 or 1: with 1, `step` changes nothing.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: TrainConfig,
        provider: str = "eager",
    ) -> None:
        super().__init__(list(parameters), {"lr": config.learning_rate})
        self.update = OPS["adamw"][provider].call
        self.settings = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        self.parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        on_host = provider in ON_HOST
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
        """Update every parameter in place. Raises RuntimeError when one has no gradient: a
        parameter that does not learn must not pass for one that does."""
        grads = [p.grad for p in self.parameters]
        missing = sum(grad is None for grad in grads)
        if missing:
            raise RuntimeError(
                f"{missing} of {len(grads)} parameters have no gradient: backward stops somewhere"
            )
        self.update(
            self.parameters,
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            self.steps,
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
