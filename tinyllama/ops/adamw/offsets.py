"""AdamW at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Ends, Pairs, Results
from tinyllama.harness.kernels.configs import Config
from tinyllama.ops.adamw import UPDATE, adamw


@adamw.many_programs
def many_parameters(ends: Ends) -> Pairs:
    """One tensor of them all."""

    def call(*tensors: torch.Tensor) -> Results:
        step, found_inf = torch.zeros(()), torch.zeros(())
        lists = ([x] for x in tensors)
        adamw["triton"](*lists, step, found_inf, lr=0.05, weight_decay=0.5)
        return list(tensors)

    with UPDATE.force(Config(BLOCK=2**16), grad="bf16"):
        return ends(call, 1, *(ends.room(2**31 + 2) for _ in range(4)))
