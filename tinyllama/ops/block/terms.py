"""The magnitude of what cancels in a block's gradients: those of the query's and key's weights.

They are sums over tokens of an outer product with the gradients of q and k, whose terms cancel in
attention (see `tinyllama.ops.attention.independent`): for a token that sees only itself, to zero.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tinyllama.harness import Op

Compose = Callable[[Mapping[str, Callable[..., Any]]], Callable[..., torch.Tensor]]


def weight_terms(
    compose: Compose, parts: Mapping[str, Op]
) -> Callable[..., dict[str, torch.Tensor]]:
    """Of a block that ``compose`` makes of these ops: what `Op.magnitude` registers."""
    eager = {name: op["eager"].call for name, op in parts.items()}
    attention = parts["attention"]

    def terms(
        upstream: dict[str, torch.Tensor], eps: float, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Root sum of squares over tokens and the terms of dq (dk), before the rotation."""
        values: dict[str, torch.Tensor] = {}

        def norm(x_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
            return values.setdefault("n", eager["rms_norm"](x_BTD, weight_D, eps))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            values.update(q=q, k=k, v=v, o=eager["attention"](q, k, v).requires_grad_())
            return values["o"]

        tensors = [tensor.detach() for tensor in inputs.values()]
        with torch.enable_grad():
            y = compose({**eager, "rms_norm": norm, "attention": attend})(*tensors, eps=eps)
            (do,) = torch.autograd.grad(y, values.pop("o"), upstream["y"])
        n_BTD = values.pop("n")
        assert attention.magnitudes is not None
        of = attention.magnitudes(**values, upstream={"o": do})
        cos, sin = inputs["cos"].square()[:, None], inputs["sin"].square()[:, None]
        magnitudes = {}
        for name in "qk":
            first, second = of[f"grad {name}"].square().unflatten(-1, (-1, 2)).unbind(-1)
            turned = (first * cos + second * sin, second * cos + first * sin)
            terms_BTQ = torch.stack(turned, -1).flatten(2)
            summed = torch.einsum("btq,btd->qd", terms_BTQ, n_BTD.square())
            magnitudes[f"grad w_{name}"] = summed.sqrt()
        return magnitudes

    return terms
