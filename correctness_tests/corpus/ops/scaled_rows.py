"""Each row of a matrix times its factor: programs of rows and blocks, with strides of 64 bits."""

from pathlib import Path

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor

KERNEL = f"{Path(__file__).stem}.scale_kernel"


@triton.jit
def scale_kernel(x, factor, y, row_stride, column_stride, factor_stride, N, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = column < D
    value = tl.load(x + row * row_stride + column * column_stride, mask=mask, other=0.0)
    scaled = value.to(tl.float32) * tl.load(factor + row * factor_stride).to(tl.float32)
    tl.store(y + row * D + column, scaled, mask=mask)


def scaled(x, factor):
    N, D = x.shape
    BLOCK = 8
    y = torch.empty(N, D, dtype=x.dtype, device=x.device)
    grid = (N, triton.cdiv(D, BLOCK))
    if y.numel():
        scale_kernel[grid](x, factor, y, *x.stride(), factor.stride(0), N, D, BLOCK=BLOCK)
    return y


class ScaledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        y = scaled(x, factor)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, factor = ctx.saved_tensors
        dx = scaled(dy, factor)
        return dx, (dy.float() * x.float()).sum(1).to(factor.dtype)


op = Op(
    "corpus_scaled_rows",
    inputs={"x": Tensor("N D", grad=True), "factor": Tensor("N", grad=True)},
    outputs={"y": "N D"},
    dtypes=(torch.float32, torch.bfloat16),
    cases=[Case(N=4, D=24), Case(N=3, D=13, why="width that is no multiple of a block")],
)


@op.reference
def eager(x, factor):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * factor.to(wide)[:, None]).to(x.dtype)


@op.provider("triton", requires=("triton",), double_backward=False)
def candidate(x, factor):
    return ScaledRows.apply(x, factor)


# variants
from correctness_tests.corpus.variants import right, wrong

STORE = "    tl.store(y + row * D + column, scaled, mask=mask)\n"
LOAD = "    value = tl.load(x + row * row_stride + column * column_stride, mask=mask, other=0.0)\n"
PRODUCT = (
    "    scaled = value.to(tl.float32) * tl.load(factor + row * factor_stride).to(tl.float32)\n"
)
HEAD = "    row = tl.program_id(0).to(tl.int64)\n"
BLOCKS = (
    ("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK - 1)"),
    ("triton.cdiv(D, BLOCK)", "triton.cdiv(D, BLOCK - 1)"),
)
DECLARED = ("requires=(", 'races={KERNEL: "equal values"}, requires=(')


def beside(text, argument=""):
    """Edits that put lines behind the kernel's store, and pass it another argument."""
    edits = [(STORE, STORE + text)]
    if argument:
        edits.append(("factor_stride, N, D, BLOCK: ", "factor_stride, N, D, extra, BLOCK: "))
        edits.append(("N, D, BLOCK=BLOCK", f"N, D, {argument}, BLOCK=BLOCK"))
    return tuple(edits)


PLACE = "row * row_stride + column * column_stride"
DISTANCE = "(x.data_ptr() - y.data_ptr()) // x.itemsize"
POINTER = "tl.pointer_type(x.dtype.element_ty)"
POINTER_TO_FACTOR = "tl.pointer_type(factor.dtype.element_ty)"
NUMBER = f"""\
    far = (y + 2**20 + tl.load(extra + row)).to(tl.int64)
    tl.store(far.to({POINTER}), 0.0)
"""
FACTOR = "tl.load(factor + row * factor_stride)"
BY_TABLE = (
    *beside("", "torch.tensor([factor.data_ptr()], device=x.device)"),
    (FACTOR, FACTOR.replace("factor +", f"tl.load(extra).to({POINTER_TO_FACTOR}) +")),
)
# The factors are copied to memory below 2^31, which mmap(2) gives with its flag MAP_32BIT.
LOW = (
    ("from pathlib", "import mmap\nimport platform\nfrom pathlib"),
    (
        "\n\ndef scaled(",
        """

def low(x):
    below = 0x40 if platform.machine() == "x86_64" else 0
    memory = mmap.mmap(-1, x.numel() * x.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | below)
    return torch.frombuffer(memory, dtype=x.dtype).copy_(x)


def scaled(""",
    ),
    ("    if y.numel():\n", "    if y.numel():\n        factor = low(factor)\n"),
)


def in_a_loop(first, loop):
    """Edits by which half of the programs go through two rows each."""
    inside = (LOAD + PRODUCT + STORE).replace("    ", "        ")
    return (
        (HEAD, f"    first = {first}\n"),
        (LOAD + PRODUCT + STORE, f"    for row in {loop}:\n" + inside),
        ("grid = (N,", "grid = (triton.cdiv(N, 2),"),
    )


VARIANTS = [
    right(),
    # -- offsets
    wrong(
        "row_of_32_bits",
        (HEAD, "    row = tl.program_id(0)\n"),
        fault="offset",
        result="y: ",
    ),
    wrong(
        "row_of_32_bits_in_backward",
        (HEAD, "    row = tl.program_id(0).to(ROW)\n"),
        ("N, D, BLOCK: tl.constexpr", "N, D, ROW: tl.constexpr, BLOCK: tl.constexpr"),
        ("def scaled(x, factor):", "def scaled(x, factor, ROW=tl.int64):"),
        ("N, D, BLOCK=BLOCK", "N, D, ROW=ROW, BLOCK=BLOCK"),
        ("dx = scaled(dy, factor)", "dx = scaled(dy, factor, tl.int32)"),
        fault="offset",
        result="grad x",
    ),
    right(
        "rows_in_a_loop",
        *in_a_loop("tl.program_id(0).to(tl.int64)", "range(first, N, tl.num_programs(0))"),
    ),
    # A loop's variable has the width of its bounds.
    wrong(
        "row_of_a_loop_of_32_bits",
        *in_a_loop("tl.program_id(0)", "range(first, N, tl.num_programs(0))"),
        fault="offset",
        result="y: ",
    ),
    right(
        "rows_in_a_loop_of_triton",
        *in_a_loop("tl.program_id(0).to(tl.int64)", "tl.range(first, N, tl.num_programs(0))"),
    ),
    wrong(
        "row_of_a_loop_of_triton_of_32_bits",
        *in_a_loop("tl.program_id(0)", "tl.range(first, N, tl.num_programs(0))"),
        fault="offset",
        result="y: ",
    ),
    # Rows of the dense output cannot lie far apart, but there may be more than 2^31 elements.
    wrong(
        "row_of_dense_output_of_32_bits",
        (STORE, STORE.replace("row * D", "tl.program_id(0) * D")),
        fault="offset",
        rank="warning",
    ),
    # -- layouts
    wrong(
        "rows_taken_as_dense", (LOAD, LOAD.replace("row_stride", "D")), fault="layout", result="y: "
    ),
    # The rows of the upstream gradient are read as if they lay behind each other.
    wrong(
        "upstream_rows_taken_as_dense",
        (
            "dx = scaled(dy, factor)",
            "dx = scaled(dy.as_strided(dy.shape, (dy.shape[1], dy.stride(1))), factor)",
        ),
        fault="layout",
        result="grad x",
    ),
    # The second input is read with the strides of a dense one.
    wrong(
        "factors_taken_as_dense",
        ("x.stride(), factor.stride(0)", "x.stride(), 1"),
        fault="layout",
        result="factor alone",
    ),
    # -- races
    right("blocks_overlap_declared", *BLOCKS, DECLARED),
    # Two programs store equal values to one element, and nobody says that this is meant.
    wrong("blocks_overlap", *BLOCKS, fault="race", rank="unsafe", result="scale_kernel"),
    wrong(
        "blocks_overlap_in_the_last_case",
        (BLOCKS[0][0], "tl.program_id(1) * STEP"),
        ("N, D, BLOCK: tl.constexpr", "N, D, STEP: tl.constexpr, BLOCK: tl.constexpr"),
        ("N, D, BLOCK=BLOCK", "N, D, STEP=STEP, BLOCK=BLOCK"),
        (
            "    grid = (N, triton.cdiv(D, BLOCK))",
            "    STEP = BLOCK if D % BLOCK else BLOCK - 1\n    grid = (N, triton.cdiv(D, STEP))",
        ),
        fault="race",
        rank="unsafe",
        result="scale_kernel",
    ),
    right(
        "counted_by_atomics",
        *beside(
            "    tl.atomic_add(extra, 1)\n", "torch.zeros(1, dtype=torch.int32, device=x.device)"
        ),
    ),
    # Two launches may store to the same elements.
    right(
        "launched_twice",
        (
            "    if y.numel():\n",
            "    if y.numel():\n        scale_kernel[grid](x, factor, y, *x.stride(), 0, N, D, BLOCK=BLOCK)\n",
        ),
    ),
    # -- chance and unwritten memory
    wrong(
        "other_bits_in_each_call",
        (
            "        y = scaled(x, factor)\n",
            "        y = scaled(x, factor)\n        y *= 1 + 1e-7 * torch.rand_like(y)\n",
        ),
        fault="order",
        rank="unsafe",
        result="scale_kernel",
    ),
    wrong(
        "last_row_unwritten",
        ("    grid = (N,", "    grid = (max(N - 1, 1),"),
        fault="tail",
        rank="unsafe",
        result="scale_kernel",
    ),
    # -- out of bounds
    wrong(
        "stores_far_behind",
        *beside("    tl.store(y + tl.cast(2**40, tl.int64) + column, scaled, mask=mask)\n"),
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    wrong(
        "stores_right_behind",
        *beside("    tl.store(y + N * D, 0.0, mask=row == N - 1)\n"),
        fault="out of bounds",
        rank="unsafe",
        result="right behind the end of y",
    ),
    wrong(
        "loads_before_the_start",
        (LOAD, LOAD + "    value += tl.load(x - 1) * 0.0\n"),
        fault="out of bounds",
        rank="unsafe",
        result="before the start of x",
    ),
    wrong(
        "adds_far_before",
        *beside("    tl.atomic_add(y - tl.cast(2**40, tl.int64) + column, 1.0, mask=mask)\n"),
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    wrong(
        "swaps_far_behind",
        *beside(
            "    tl.atomic_cas(extra + tl.cast(2**40, tl.int64), 0, 1)\n",
            "torch.zeros(1, dtype=torch.int32, device=x.device)",
        ),
        fault="out of bounds",
        rank="unsafe",
        result="of extra, a buffer",
    ),
    wrong(
        "stores_behind_for_strided_inputs",
        *beside("    tl.store(y + N * D, 0.0, mask=(row == N - 1) & (column_stride == 2))\n"),
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    # Which tensor lies at this distance behind another one depends on the allocator.
    wrong(
        "stores_to_x_behind_y",
        *beside(f"    tl.store(y + extra + {PLACE}, value, mask=mask)\n", DISTANCE),
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    wrong(
        "adds_to_x_behind_y",
        *beside(f"    tl.atomic_add(y + extra + {PLACE}, 0.0, mask=mask)\n", DISTANCE),
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    wrong(
        "loads_y_behind_x",
        *beside(
            "    tl.load(x + extra + row * D + column, mask=mask)\n",
            DISTANCE.replace("x.data_ptr() - y", "y.data_ptr() - x"),
        ),
        fault="out of bounds",
        rank="unsafe",
        result="of x, a buffer",
    ),
    # A pointer that was a number may reach the tensors of its launch, but nothing else.
    wrong(
        "number_beside_indices_stores_far_behind",
        *beside(NUMBER, "torch.arange(N, device=x.device)"),
        fault="out of bounds",
        rank="unsafe",
    ),
    # The filling of the indices is large, but below every address.
    wrong(
        "number_beside_large_indices_stores_far_behind",
        *beside(NUMBER, "torch.full((N,), 2**32 - 2**20, device=x.device)"),
        fault="out of bounds",
        rank="unsafe",
    ),
    right(
        "addresses_in_bytes",
        (
            LOAD,
            "    start = x.to(tl.int64) + row * row_stride * (x.dtype.element_ty.primitive_bitwidth // 8)\n"
            + LOAD.replace("x + row * row_stride", f"start.to({POINTER})"),
        ),
    ),
    right(
        "x_by_its_distance_from_y",
        *beside("", DISTANCE),
        (
            LOAD,
            "    start = y.to(tl.int64) + extra * (x.dtype.element_ty.primitive_bitwidth // 8)\n"
            + LOAD.replace("load(x", f"load(start.to({POINTER})"),
        ),
    ),
    right(
        "factor_by_address",
        *beside("", "factor.data_ptr()"),
        (FACTOR, FACTOR.replace("factor +", f"extra.to(tl.int64).to({POINTER_TO_FACTOR}) +")),
    ),
    right(
        "factor_by_low_address",
        *beside("", "factor.data_ptr()"),
        (FACTOR, FACTOR.replace("factor +", f"extra.to(tl.int64).to({POINTER_TO_FACTOR}) +")),
        *LOW,
    ),
    right("factor_by_table_of_addresses", *BY_TABLE),
    right("factor_by_table_of_low_addresses", *BY_TABLE, *LOW),
    # Beside a table of addresses, a pointer of an argument is held to this argument.
    wrong(
        "stores_to_x_behind_y_beside_a_table",
        *beside(
            f"    tl.store(y + tl.load(extra + 1) + {PLACE}, value, mask=mask)\n",
            f"torch.tensor([factor.data_ptr(), {DISTANCE}], device=x.device)",
        ),
        BY_TABLE[-1],
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    wrong(
        "stores_to_x_behind_y_beside_a_table_of_low_addresses",
        *beside(
            f"    tl.store(y + tl.load(extra + 1) + {PLACE}, value, mask=mask)\n",
            f"torch.tensor([factor.data_ptr(), {DISTANCE}], device=x.device)",
        ),
        BY_TABLE[-1],
        *LOW,
        fault="out of bounds",
        rank="unsafe",
        result="of y, a buffer",
    ),
    # A lock that nobody releases is taken again and again, in one layout.
    wrong(
        "endless_for_strided_inputs",
        *beside(
            "    while (column_stride == 2) & (tl.atomic_cas(extra, 0, 1) == 0):\n        tl.store(extra, 0)\n",
            "torch.zeros(1, dtype=torch.int32, device=x.device)",
        ),
        fault="layout",
        rank="unsafe",
    ),
]
