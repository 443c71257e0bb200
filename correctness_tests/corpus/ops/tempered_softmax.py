"""The softmax of the rows of a matrix times a number, without gradients."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_tempered_softmax",
    inputs={"x": Tensor("N D")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    params={"scale": 0.5},
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, scale):
    return torch.softmax(x * scale, -1)


@op.provider("in_passes")
def candidate(x, scale):
    scores = x * scale
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - largest).exp()
    return powers / powers.sum(-1, keepdim=True)


# variants
from correctness_tests.corpus.variants import right, wrong

PROVIDER = '@op.provider("in_passes")\n'
LARGEST = "    largest = scores.amax(-1, keepdim=True)\n"
POWERS = "    powers = (scores - largest).exp()\n"
RESULT = "    return powers / powers.sum(-1, keepdim=True)\n"

VARIANTS = [
    right(),
    right("torchs_softmax", (LARGEST + POWERS + RESULT, "    return scores.softmax(-1)\n")),
    # Each call keeps one more tensor.
    wrong(
        "calls_keep_tensors",
        (PROVIDER, f"MAXIMA = []\n\n\n{PROVIDER}"),
        (POWERS, f"    MAXIMA.append(largest)\n{POWERS}"),
        fault="stale state",
        rank="unsafe",
    ),
    # Two calls return one buffer, which also lies transposed in memory.
    wrong(
        "buffer_returned_twice",
        (PROVIDER, f"BUFFERS = {{}}\n\n\n{PROVIDER}"),
        (
            RESULT,
            """\
    key = x.shape, x.dtype, torch.is_inference_mode_enabled()
    buffer = BUFFERS.setdefault(key, x.new_empty(x.shape[::-1])).t()
    return buffer.copy_(powers / powers.sum(-1, keepdim=True))
""",
        ),
        fault="aliasing",
        result="y of A",
    ),
    # The caller's tensor requires a gradient from then on.
    wrong(
        "input_requires_a_gradient_afterwards",
        ("scores = x * scale", "scores = x.requires_grad_() * scale"),
        fault="aliasing",
        rank="unsafe",
        result="x",
    ),
    # A value is read back from the device to see whether all rows have one maximum.
    wrong(
        "maxima_read_back",
        (
            POWERS,
            f"""\
    if x.numel() and (largest.amax() - largest.amin()).item() == 0:
        largest = largest[:1]
{POWERS}""",
        ),
        fault="framework",
        rank="warning",
    ),
]
