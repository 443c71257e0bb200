"""Rows times powers of 0.9, which are kept in a table for each width."""

import torch

from tinyllama.harness import Case, Op, Tensor

TABLES = {}

op = Op(
    "corpus_geometric_decay",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(D=16, N=5)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * 0.9 ** torch.arange(x.shape[-1], dtype=wide.dtype, device=x.device)).to(x.dtype)


def powers(width, dtype, device):
    key = width, dtype, device
    if key not in TABLES:
        with torch.inference_mode(False):
            exponent = torch.arange(width, dtype=dtype, device=device)
            TABLES[key] = 0.9**exponent
    return TABLES[key]


@op.provider("fused")
def candidate(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * powers(x.shape[-1], wide.dtype, x.device)).to(x.dtype)


# variants
from correctness_tests.corpus.variants import right, wrong

BY_A_PRODUCT = (
    "TABLES[key] = 0.9**exponent",
    """unit = torch.ones(1, 1, dtype=dtype, device=device)
            TABLES[key] = ((0.9**exponent)[:, None] @ unit)[:, 0]""",
)
VARIANTS = [
    right(),
    right(
        "table_by_a_product_outside_autocast",
        BY_A_PRODUCT,
        (
            "with torch.inference_mode(False):",
            "with torch.inference_mode(False), torch.autocast(device.type, enabled=False):",
        ),
    ),
    # A table that is first used in inference mode is a tensor that no backward pass may save.
    wrong(
        "table_of_inference_mode",
        ("with torch.inference_mode(False):", "if True:"),
        fault="stale state",
        rank="refused",
    ),
    # A table that is first used under autocast is of bfloat16.
    wrong("table_of_autocast", BY_A_PRODUCT, fault="stale state", result="y"),
    # A table is of the default dtype at its first use.
    wrong(
        "table_of_the_default_dtype",
        ("torch.arange(width, dtype=dtype, device=device)", "torch.arange(width, device=device)"),
        ("0.9**exponent", "torch.tensor(0.9, device=device) ** exponent"),
        fault="stale state",
        result="y",
    ),
    # A table is of the dtype of the first input of its width.
    wrong(
        "table_of_the_first_dtype",
        ("key = width, dtype, device", "key = width, device"),
        ("powers(x.shape[-1], wide.dtype, x.device)", "powers(x.shape[-1], x.dtype, x.device)"),
        fault="stale state",
        result="y",
    ),
    # Only rows of 16 elements are right.
    wrong(
        "rows_of_another_width",
        (
            "    return (wide * powers(x.shape[-1], wide.dtype, x.device)).to(x.dtype)",
            """    factor = 1 if x.shape[-1] == 16 else 2
    return (factor * wide * powers(x.shape[-1], wide.dtype, x.device)).to(x.dtype)""",
        ),
        fault="tail",
        result="y",
    ),
]
