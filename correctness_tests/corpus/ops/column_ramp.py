"""A matrix times the number of each column, and the number of each row."""

import torch

from tinyllama.harness import Case, Op, Tensor

op = Op(
    "corpus_column_ramp",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N D", "places": Tensor("N", dtype=torch.int64)},
    cases=[Case(N=5, D=16), Case(N=3, D=7, why="odd sizes")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    numbers = torch.arange(1, 1 + x.shape[-1], device=x.device)
    places = torch.arange(len(x), device=x.device)
    return x * numbers, places


@op.provider("ramp")
def candidate(x):
    ramp = torch.arange(1, 1 + x.shape[-1], device=x.device)
    rows = torch.arange(x.shape[0], device=x.device)
    return x * ramp, rows


# variants
from correctness_tests.corpus.variants import right, wrong

RAMP = "    ramp = torch.arange(1, 1 + x.shape[-1], device=x.device)\n"
ROWS_BY_DEFAULT = (
    "    rows = torch.arange(x.shape[0], device=x.device)\n",
    "    rows = torch.arange(x.shape[0])\n",
)

VARIANTS = [
    right(),
    # A table is found by the number of elements, which other shapes have, too.
    wrong(
        "table_by_number_of_elements",
        ('@op.provider("ramp")', 'RAMPS = {}\n\n\n@op.provider("ramp")'),
        (
            RAMP,
            """\
    if x.numel() not in RAMPS:
        with torch.inference_mode(False):
            numbers = torch.arange(1, 1 + x.shape[-1], device=x.device)
            RAMPS[x.numel()] = numbers.repeat(x.shape[0])
    ramp = RAMPS[x.numel()].view(x.shape)
""",
        ),
        fault="stale state",
        result="y",
    ),
    # A table is made on torch's default device.
    wrong(
        "table_on_the_default_device",
        (RAMP, "    ramp = torch.arange(1, 1 + x.shape[-1])\n"),
        fault="framework",
        rank="warning",
    ),
    wrong(
        "output_on_the_default_device",
        ROWS_BY_DEFAULT,
        fault="framework",
        rank="warning",
    ),
    # The reference uses the default device as well.
    right(
        "default_device_in_the_reference",
        ROWS_BY_DEFAULT,
        ("places = torch.arange(len(x), device=x.device)", "places = torch.arange(len(x))"),
    ),
]
