"""A bias for each channel of images."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_image_bias",
    inputs={"x": Tensor("B C H W"), "bias": Tensor("C")},
    outputs={"y": "B C H W"},
    cases=[Case(B=2, C=3, H=2, W=3)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, bias):
    return x + bias[:, None, None]


@op.provider("fused")
def candidate(x, bias):
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return (x.permute(0, 2, 3, 1) + bias).permute(0, 3, 1, 2)
    return x + bias.view(-1, 1, 1)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    # Each channel of an image whose channels are innermost gets the first channel's bias.
    wrong(
        "first_bias_in_channels_last",
        ("(x.permute(0, 2, 3, 1) + bias)", "(x.permute(0, 2, 3, 1) + bias[0])"),
        fault="layout",
        result="y",
    ),
]
