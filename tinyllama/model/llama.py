"""One Tiny LLaMA for every tier: the tier says which provider computes each op.

Shape suffixes: B batch, T time, N = B x T, D width, V vocabulary (see tinyllama.ops).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinyllama.harness.kernels.layout import stacked
from tinyllama.harness.kernels.precision import compute_dtype
from tinyllama.model.config import ModelConfig
from tinyllama.model.tiers import Tier, resolve
from tinyllama.ops.block import PARTS, compose
from tinyllama.ops.rope import rope_tables
from tinyllama.ops.stack.configs import pays

ALIGNMENT = 64  # elements; the first of adjacent parameters is aligned for any kernel


class Block(nn.Module):
    """The parameters of one transformer block, named as the op ``block`` names its inputs."""

    def __init__(self, config: ModelConfig, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        d, f = config.hidden_dim, config.ffn_dim
        q, r = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.eps = config.norm_eps
        self.compute = forward
        self.attention_norm = nn.Parameter(torch.ones(d))
        self.w_q = nn.Parameter(torch.empty(q, d))
        self.w_k = nn.Parameter(torch.empty(r, d))
        self.w_v = nn.Parameter(torch.empty(r, d))
        self.w_o = nn.Parameter(torch.empty(d, q))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.w_gate = nn.Parameter(torch.empty(f, d))
        self.w_up = nn.Parameter(torch.empty(f, d))
        self.w_down = nn.Parameter(torch.empty(d, f))

    def forward(
        self, x_BTD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
    ) -> torch.Tensor:
        return self.compute(
            x_BTD,
            cos_TC,
            sin_TC,
            self.attention_norm,
            self.w_q,
            self.w_k,
            self.w_v,
            self.w_o,
            self.mlp_norm,
            self.w_gate,
            self.w_up,
            self.w_down,
            eps=self.eps,
        )


class Stacked(torch.autograd.Function):
    """Parameters of equal shape, one of each layer, as one tensor with a leading axis: a view of
    their buffer. The gradients of the parameters are views of its gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return stacked(parameters)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad.unbind(0)


class TinyLlama(nn.Module):
    """Token embedding, pre-norm blocks, final norm, and the embedding again as projection.

    Parameters have one layout in every tier (views of one buffer), so any tier loads any tier's
    weights. They are float32 (float64 for a reference: ``TinyLlama(...).double()``).

    config: the shape. tier: a name or a `Tier`. seed: of the initial weights, which are
    drawn on the CPU, so that a seed gives the same model on every device; None leaves them
    uninitialised, for a caller that copies weights. With ``recompute`` set, only the inputs of
    blocks are saved, and each block runs again in the backward pass. With
    ``in_one`` unset the blocks run one by one in tiers that have them as one op, too.
    """

    def __init__(
        self, config: ModelConfig, tier: str | Tier = "v1", *, seed: int | None = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.tier = resolve(tier)
        table = self.tier.providers()
        self.rows: Callable[..., torch.Tensor] = table["embedding"]
        self.norm: Callable[..., torch.Tensor] = table["rms_norm"]
        # No target is ignored, so none is counted.
        self.loss_of: Callable[..., torch.Tensor] = partial(
            table["linear_cross_entropy"], ignore_index=None
        )
        self.stack = table.get("stack")
        block = table.get("block") or compose({name: table[name] for name in PARTS})
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_dim))
        self.layers = nn.ModuleList(Block(config, block) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_dim))
        self.recompute = False
        self.in_one = True
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        if self.stack is not None:
            self._count_together()
        self._adjoin()
        if seed is not None:
            self.initialise(seed)

    def _apply(self, fn: Any, recurse: bool = True) -> "TinyLlama":
        super()._apply(fn, recurse)
        self._adjoin()
        return self

    def _count_together(self) -> None:
        """Give all parameters one version counter: `RoundedWeights` then asks one of them whether
        any was changed. Autograd refuses a change of any parameter between a forward and its
        backward pass; a stack reads all of its parameters there anyway."""
        counter = self.embedding.detach()
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                counted = nn.Parameter(counter)
                counted.data = parameter.data  # its counter stays
                setattr(module, name, counted)

    @torch.no_grad()
    def _adjoin(self) -> None:
        """Store all parameters in one buffer, the matrices of a block side by side, so that a
        provider can read several of them as one without a copy."""
        matrices = [p for layer in self.layers for p in layer.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if not any(p is m for m in matrices)]
        per_layer = len(matrices) // len(self.layers)
        groups = [matrices[i : i + per_layer] for i in range(0, len(matrices), per_layer)]
        starts, size = [], 0
        for group in [*groups, *([p] for p in rest)]:
            for parameter in group:
                starts.append((parameter, size))
                size += parameter.numel()
            size = -(-size // ALIGNMENT) * ALIGNMENT
        buffer = self.embedding.new_empty(size)
        for parameter, start in starts:
            place = buffer[start : start + parameter.numel()].view(parameter.shape)
            place.copy_(parameter)
            parameter.data = place

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights of standard deviation ``init_std``; gains are 1; there are no biases."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator) * self.config.init_std
                parameter.copy_(drawn)
            else:
                parameter.fill_(1.0)

    def rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary tables (T C) on the model's device, made once for each length."""
        key = (length, self.embedding.device, self.embedding.dtype)
        if key not in self._tables:
            dtype = torch.promote_types(self.embedding.dtype, torch.float32)
            with torch.inference_mode(False):  # autograd can save no tensor that is made in it
                cos, sin = rope_tables(length, self.config.head_dim, self.config.rope_theta, dtype)
                self._tables[key] = (cos.to(key[1]), sin.to(key[1]))
        return self._tables[key]

    def stacks(self, x_ND: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the blocks run as one op for rows like these, with products in a dtype: if that
        is faster, or if a plan other than the default was requested."""
        if self.stack is None:
            return False
        return self.tier.table["stack"] != "fused" or pays(x_ND, dtype)

    def hidden(
        self, tokens_BT: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The normalised output of the last block (B T D)."""
        x_ND = self.rows(self.embedding, tokens_BT.flatten())
        x_BTD = x_ND.unflatten(0, tokens_BT.shape)
        recompute = self.recompute and torch.is_grad_enabled()
        in_one = self.in_one and not recompute and self.stacks(x_BTD, compute_dtype(x_BTD))
        if self.stack is not None and in_one:
            alike = zip(*(layer.parameters() for layer in self.layers), strict=True)
            weights = [Stacked.apply(*parameters) for parameters in alike]
            x_BTD = self.stack(x_BTD, *tables, *weights, eps=self.config.norm_eps)
            return self.norm(x_BTD, self.final_norm, eps=self.config.norm_eps)
        for layer in self.layers:
            if recompute:
                x_BTD = checkpoint(
                    layer, x_BTD, *tables, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTD = layer(x_BTD, *tables)
        return self.norm(x_BTD, self.final_norm, eps=self.config.norm_eps)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """tokens (B T), int64 below V -> logits (B T V)."""
        tables = self.rope(tokens_BT.shape[1])
        return F.linear(self.hidden(tokens_BT, tables), self.embedding)

    def loss(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next token, a float32 scalar.

        tokens, targets: (B T), int64 below V; targets are the tokens one position later.
        """
        return self.loss_with(tokens_BT, targets_BT, self.rope(tokens_BT.shape[1]))

    def loss_with(
        self,
        tokens_BT: torch.Tensor,
        targets_BT: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """`loss` with the rotary tables given: the part that a compiler or a graph sees."""
        h_ND = self.hidden(tokens_BT, tables).flatten(0, 1)
        return self.loss_of(h_ND, self.embedding, targets_BT.flatten())
