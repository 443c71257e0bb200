"""An op in each way that kernels compute it: providers, plans of a stack, long sequences."""

from collections.abc import Iterator
from unittest import mock

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.declare.registry import providers_restored
from tinyllama.ops import OPS
from tinyllama.ops.stack import provider_of

PLANS = {"stack": ("all", "none", "qkv", "single")}  # of another op: its providers
CASES = 3


def ways(name: str, dtype: torch.dtype) -> Iterator[OpCase]:
    """The first cases, each while few tokens count as few, and as many."""
    op = OPS[name]
    with providers_restored([op]):
        plans = [provider_of(plan) for plan in PLANS.get(name, ())]
        kernels = [p.name for p in op.providers.values() if "triton" in p.requires]
        for provider in plans or kernels:
            for case in op.cases[:CASES]:
                op_case = OpCase(op, op[provider], case, dtype)
                for few in (256, 0) if op_case.unsupported() is None else ():
                    with (
                        mock.patch("tinyllama.ops.attention.FEW_TOKENS", few),
                        mock.patch("tinyllama.ops.embedding.FEW", few),
                    ):
                        yield op_case
