"""A file of ops, as a repository of one's own has it."""

OP = """
import torch

from tinyllama.harness import Case, Op, Tensor

{name} = Op(
    "{name}",
    inputs={{"x": Tensor("N D", grad=True)}},
    outputs={{"y": "N D"}},
    cases=[Case(N=3, D=8)],
    timed=[Case(N=16, D=8)],
    bytes={{"forward": lambda size, N, D: 2 * N * D * size,
           "backward": lambda size, N, D: 2 * N * D * size}},
    flops={{"forward": lambda N, D: N * D, "backward": lambda N, D: N * D}},
)


@{name}.reference
def eager(x):
    return 2.0 * x


@{name}.provider("sum")
def added(x):
    return {body}
"""
