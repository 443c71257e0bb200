"""Tiers with a known fault, for the specifications that must see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from tinyllama.harness import Provider
from tinyllama.ops import OPS
from tinyllama.tiers import V1, Tier


def _detached_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As in the published V3: the norm is written outside autograd."""
    return OPS["rms_norm"]["eager"].call(x.detach(), weight.detach(), eps)


@contextlib.contextmanager
def detached_norm_tier() -> Iterator[Tier]:
    """V1 with a norm through which no gradient passes: only the embedding learns."""
    rms_norm = OPS["rms_norm"]
    rms_norm.providers["detached"] = Provider("rms_norm", "detached", _detached_norm, ())
    try:
        yield replace(V1, name="v1-detached", table={**V1.table, "rms_norm": "detached"})
    finally:
        del rms_norm.providers["detached"]
