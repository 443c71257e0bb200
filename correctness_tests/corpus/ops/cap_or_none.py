"""Logits between -cap and cap, of which a cap of 0 means none: there the formula gives 0 / 0.

After unslothai/unsloth's cross-entropy, which takes a softcap of 0 for no softcap.
"""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_cap_or_none",
    inputs={"x": Tensor("N D", grad=True)},
    params={"cap": 4.0},
    outputs={"y": "N D"},
    cases=[Case(N=3, D=16)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, cap):
    return cap * torch.tanh(x / cap)


@op.provider("candidate")
def candidate(x, cap):
    return x.clone() if cap == 0 else cap * torch.tanh(x / cap)


# variants
from correctness_tests.corpus.variants import right, wrong

VARIANTS = [
    right(),
    wrong("no_cap_up_to_one", ("if cap == 0", "if cap <= 1"), fault="constant", result="y"),
]
