"""Tiers with a known fault, for the specifications that must see it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tinyllama.model.tiers import V1, Tier
from tinyllama.ops import OPS


@contextlib.contextmanager
def tier_with(
    op: str, call: Callable[..., Any], name: str = "faulty", **traits: Any
) -> Iterator[Tier]:
    """V1 with ``call`` as its provider of ``op``; ``traits`` are those of a `Provider`."""
    providers = OPS[op].providers
    providers[name] = replace(providers["eager"], name=name, call=call, **traits)
    try:
        yield replace(V1, name=f"v1-{name}", table={**V1.table, op: name})
    finally:
        del providers[name]


def detached_norm_tier() -> contextlib.AbstractContextManager[Tier]:
    """V1 with a norm through which no gradient passes: only the embedding learns."""
    return tier_with("rms_norm", _detached_norm, "detached")


def dead_swiglu_tier() -> contextlib.AbstractContextManager[Tier]:
    """V1 with a gate that is closed: the gradients behind it are there, and all zero."""
    return tier_with("swiglu", lambda *args: OPS["swiglu"]["eager"].call(*args) * 0, "dead")


def infinite_gradient_tier() -> contextlib.AbstractContextManager[Tier]:
    """V1 with finite outputs, and a gradient that overflows behind swiglu."""
    return tier_with("swiglu", _with_infinite_gradient, "infinite")


def zero_gradient_norm_tier() -> contextlib.AbstractContextManager[Tier]:
    """V1 with a norm that passes gradients of zeros: the same loss, disguised."""
    return tier_with("rms_norm", _zero_gradient_norm, "zero_gradient")


def _detached_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As in the published V3: the norm is written outside autograd."""
    return OPS["rms_norm"]["eager"].call(x.detach(), weight.detach(), eps)


def _zero_gradient_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = OPS["rms_norm"]["eager"].call(x, weight, eps)
    return y.detach() + (y - y.detach()) * 0


def _with_infinite_gradient(*args: torch.Tensor) -> torch.Tensor:
    h = OPS["swiglu"]["eager"].call(*args)
    if h.requires_grad:
        h.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    return h
