"""The exponentials of a quarter of a matrix plus a vector, which backward reads again."""

import torch

from tinyllama.harness import Case, Op, Tensor


class ColumnExponentials(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, g):
        wide = torch.promote_types(a.dtype, torch.float32)
        y = ((a.to(wide) + g.to(wide)) / 4).exp().to(a.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        wide = torch.promote_types(dy.dtype, torch.float32)
        product = dy.to(wide) * y.to(wide) / 4
        da = product.to(dy.dtype)
        dg = product.sum(0).to(dy.dtype)
        return da, dg


def fits(dims):
    return None if max(dims["N"], dims["D"]) <= 1100 else "more than 1,100 rows or columns"


op = Op(
    "corpus_column_exponentials",
    inputs={"a": Tensor("N D", grad=True), "g": Tensor("D", grad=True)},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=64)],
    dtypes=(torch.float32, torch.bfloat16),
)


@op.reference
def eager(a, g):
    wide = torch.promote_types(a.dtype, torch.float32)
    return ((a.to(wide) + g.to(wide)) / 4).exp().to(a.dtype)


@op.provider("written_out", supports=fits)
def candidate(a, g):
    return ColumnExponentials.apply(a, g)


# variants
from correctness_tests.corpus.variants import right, wrong

CALL = "    return ColumnExponentials.apply(a, g)\n"
SAVED = "        ctx.save_for_backward(y)\n        return y\n"
LOADED = "        (y,) = ctx.saved_tensors\n"
GRADIENTS = "        return da, dg\n"
BUFFERS = "BUFFERS = {}\n\n\nclass ColumnExponentials("

VARIANTS = [
    right(),
    right(
        "inputs_saved",
        (SAVED, SAVED.replace("(y)", "(a, g)")),
        (
            LOADED,
            """\
        a, g = ctx.saved_tensors
        y = torch.exp((a.to(torch.promote_types(a.dtype, torch.float32)) + g) / 4)
""",
        ),
    ),
    # -- memory that several calls share
    wrong(
        "one_buffer_for_gradients",
        ("class ColumnExponentials(", BUFFERS),
        (
            GRADIENTS,
            "        dg = BUFFERS.setdefault((dg.shape, dg.dtype), torch.empty_like(dg)).copy_(dg)\n"
            + GRADIENTS,
        ),
        fault="aliasing",
        rank="unsafe",
    ),
    wrong(
        "one_buffer_for_outputs",
        ("class ColumnExponentials(", BUFFERS),
        (
            SAVED,
            """\
        if any(ctx.needs_input_grad):
            y = BUFFERS.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y).detach()
"""
            + SAVED,
        ),
        fault="aliasing",
        rank="unsafe",
    ),
    # A change of the output in place reaches what was saved, and raises no error.
    wrong(
        "output_saved_behind_the_back_of_autograd",
        (
            SAVED,
            "        ctx.y = y\n        return y.detach()\n",
        ),
        (LOADED, "        y = ctx.y\n"),
        fault="aliasing",
    ),
    # -- several blocks
    # Where g alone has a gradient, the last block of rows is left out if it is not full.
    wrong(
        "last_rows_left_out_of_one_gradient_alone",
        (
            GRADIENTS,
            """\
        if len(dy) > 64 and not ctx.needs_input_grad[0]:
            full = len(dy) - len(dy) % 64
            dg = product[:full].sum(0).to(dy.dtype)
"""
            + GRADIENTS,
        ),
        fault="tail",
        result="grad g",
    ),
    wrong(
        "last_rows_zero_without_gradients",
        (
            CALL,
            """\
    y = ColumnExponentials.apply(a, g)
    if len(y) > 64 and not (a.requires_grad or g.requires_grad):
        y[len(y) - len(y) % 64 :] = 0
    return y
""",
        ),
        fault="tail",
        result="y",
    ),
    # The tiles that are second on both axes are left out.
    wrong(
        "second_tile_of_both_axes_left_out",
        (SAVED, "        y[64:, 64:] = 0\n" + SAVED),
        fault="tail",
        result="y",
    ),
    wrong(
        "tail_of_two_columns_left_out",
        (
            SAVED,
            "        if a.shape[1] > 64 and a.shape[1] % 4 == 2:\n            y[:, -2:] = 0\n"
            + SAVED,
        ),
        fault="tail",
        result="y",
    ),
    # A row of a multiple of 128 is taken for a block, whose length is a power of two.
    wrong(
        "width_taken_for_a_power_of_two",
        (
            SAVED,
            """\
        width = a.shape[1]
        if width % 128 == 0:
            y = y * ((1 << (width - 1).bit_length()) / width)
"""
            + SAVED,
        ),
        fault="tail",
        result="y",
    ),
    # Rows of the second block are read as if they were dense.
    wrong(
        "second_block_read_as_dense",
        (
            CALL,
            """\
    first, rest = a[:512], a[512:]
    if len(rest) and not rest.is_contiguous():
        rest = rest.as_strided(rest.shape, (rest.shape[-1], 1), rest.storage_offset())
    return ColumnExponentials.apply(torch.cat([first, rest]), g)
""",
        ),
        fault="layout",
        result="y",
    ),
    # The sum is rounded after each row.
    wrong(
        "sum_in_the_dtype_of_the_inputs",
        (
            GRADIENTS,
            """\
        dg = dy.new_zeros(dy.shape[1])
        for row in da.unbind():
            dg += row
"""
            + GRADIENTS,
        ),
        fault="accumulation",
        open="not found since sums in 16 bits are granted four times the usual error",
        result="grad g",
    ),
    # -- values
    # An infinity less itself is a NaN.
    wrong(
        "difference_with_itself_in_a_gradient",
        (GRADIENTS, "        da = da + (y - y)\n" + GRADIENTS),
        fault="overflow",
        result="grad a",
    ),
]
