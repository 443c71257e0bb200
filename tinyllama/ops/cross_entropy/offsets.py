"""The loss's kernels at offsets past 2^31."""

import torch

from tinyllama.harness.declare.offsets import Put, Results, randn, unwritten
from tinyllama.ops.cross_entropy import (
    cross_entropy,
    loss_backward,
    losses_and_gradient,
    row_losses,
)


def _losses(put: Put, classes: int) -> Results:
    targets = torch.tensor([1, 0, classes - 1])
    logits, gradient = put(randn(3, classes)), put(unwritten(3, classes))
    loss, statistics = row_losses(logits, targets)
    loss_backward(logits, targets, statistics, torch.tensor(1.0), gradient)
    again = put(unwritten(3, classes))
    in_copy = losses_and_gradient(logits, targets, 0.5, loss.clone(), again)
    return [loss, statistics, gradient, in_copy, losses_and_gradient(logits, targets, 0.5, loss)]


@cross_entropy.rows_apart
def loss(put: Put) -> Results:
    return _losses(put, classes=50)


@cross_entropy.rows_apart
def loss_in_blocks(put: Put) -> Results:
    return _losses(put, classes=4100)
