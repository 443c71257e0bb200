"""Hugging Face's Llama with our norm, SwiGLU and loss, as a user would put them in.

Not compiled, and everything else is theirs: it shows what a call of our ops costs somebody else's
model.
"""

from typing import Any

import torch
from torch import nn

from tinyllama.ops.linear_cross_entropy import linear_cross_entropy
from tinyllama.ops.rms_norm import rms_norm
from tinyllama.ops.silu_mul import silu_mul

OURS = "triton"


class Norm(nn.Module):
    """RMSNorm of x (B T D) in place of theirs, with its weight (D)."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = rms_norm[OURS](x, self.weight, eps=self.eps)
        return y


class Mlp(nn.Module):
    """SwiGLU of x (B T D) in place of theirs, with its three weights."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(silu_mul[OURS](self.gate_proj(x), self.up_proj(x)))
        return y


def with_ours(model: Any) -> Any:
    """The model, changed. Its loss is `loss_with`."""
    for layer in model.model.layers:
        layer.mlp = Mlp(layer.mlp)
        layer.input_layernorm = Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Norm(layer.post_attention_layernorm)
    model.model.norm = Norm(model.model.norm)
    return model


def loss_with(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss () of tokens and targets, each (B T) int64; no logits are in memory."""
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
    loss: torch.Tensor = linear_cross_entropy[OURS](hidden, model.lm_head.weight, targets.flatten())
    return loss
