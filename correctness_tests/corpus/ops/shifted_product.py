"""The product of a matrix, shifted by a number, and another matrix."""

import torch

from tinyllama.harness import Case, Op, Tensor


class ShiftedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, share):
        ctx.save_for_backward(a, b)
        ctx.share = share
        y = (a + share) * b
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        da = dy * b
        db = dy * (a + ctx.share)
        return da, db, None


op = Op(
    "corpus_shifted_product",
    inputs={"a": Tensor("N D", grad=True), "b": Tensor("N D", grad=True)},
    outputs={"y": "N D"},
    params={"share": 0.01},
    cases=[Case(N=5, D=8), Case(N=5, D=3, why="fewer columns")],
    dtypes=(torch.float32,),
)


@op.reference
def eager(a, b, share):
    return (a + share) * b


@op.independent("multiplied out")
def multiplied_out(a, b, share):
    return a * b + share * b


@op.provider("written_out")
def candidate(a, b, share):
    return ShiftedProduct.apply(a, b, share)


# variants
from correctness_tests.corpus.variants import right, wrong

CANDIDATE = '@op.provider("written_out")\n'
CALL = "    return ShiftedProduct.apply(a, b, share)\n"
FORWARD = "        ctx.save_for_backward(a, b)\n        ctx.share = share\n"
PRODUCT = "        y = (a + share) * b\n"
RESULT = "        y = (a + share) * b\n        return y\n"
GRADIENTS = "        da = dy * b\n        db = dy * (a + ctx.share)\n"

# A table of copies, with the tensors they were made of, whose addresses are thus not used again.
COPIES = """COPIES = {}


def copy_of(x, key):
    return COPIES.setdefault(key, (x, x.detach().clone()))[1]


"""

VARIANTS = [
    right(),
    right("reference", eager=True),
    # It has kernels, which take float32 alone.
    right(
        "float32_alone",
        ('"written_out")', '"written_out", requires=("triton",))'),
        (
            CALL,
            '    if a.dtype is torch.float64:\n        raise ValueError("float32 alone")\n' + CALL,
        ),
    ),
    right(
        "term_without_gradient",
        ('"written_out")', '"written_out", requires=("triton",))'),
        (CALL, "    return torch.zeros_like(a.detach()) + ShiftedProduct.apply(a, b, share)\n"),
    ),
    # -- copies of inputs that outlive a call
    # The copy of a parameter stays the one of the first call.
    wrong(
        "parameter_copied_once",
        (CANDIDATE, COPIES + CANDIDATE),
        (
            CALL,
            """\
    if isinstance(b, torch.nn.Parameter):
        b = b + (copy_of(b, id(b)) - b).detach()
"""
            + CALL,
        ),
        fault="stale state",
        result="y",
    ),
    # The version of a tensor counts from 0 in each tensor.
    wrong(
        "copy_by_address_and_version",
        (CANDIDATE, COPIES + CANDIDATE),
        (CALL, "    b = b + (copy_of(b, (b.data_ptr(), b._version)) - b).detach()\n" + CALL),
        fault="stale state",
        result="y",
    ),
    # Without gradients, a change through .data leaves the version and so the copy as they are.
    wrong(
        "copy_unaware_of_data",
        (
            CANDIDATE,
            """\
LATEST = {}


def latest(x):
    key = x.data_ptr(), x._version
    if key not in LATEST:
        LATEST.clear()
        LATEST[key] = x.clone()
    return LATEST[key]


"""
            + CANDIDATE,
        ),
        (CALL, "    if not torch.is_grad_enabled():\n        b = latest(b)\n" + CALL),
        fault="stale state",
        result="y",
    ),
    wrong(
        "first_a_of_a_shape",
        (CANDIDATE, COPIES + CANDIDATE),
        (PRODUCT, "        y = (copy_of(a, a.shape) + share) * b\n"),
        fault="stale state",
        result="y",
    ),
    wrong(
        "first_b_of_a_shape",
        (CANDIDATE, COPIES + CANDIDATE),
        (PRODUCT, "        y = (a + share) * copy_of(b, b.shape)\n"),
        fault="stale state",
        result="y",
    ),
    wrong(
        "first_upstream_gradient_of_a_shape",
        (CANDIDATE, COPIES + CANDIDATE),
        ("da = dy * b", "da = copy_of(dy, dy.shape) * b"),
        fault="stale state",
        result="grad a",
    ),
    # -- one place for what each call has to save
    wrong(
        "tensors_of_the_last_call",
        (FORWARD, "        ShiftedProduct.latest = a + share, b.clone()\n"),
        (
            "        a, b = ctx.saved_tensors\n" + GRADIENTS,
            """\
        shifted, b = ShiftedProduct.latest
        da = dy * b
        db = dy * shifted
""",
        ),
        fault="stale state",
    ),
    wrong(
        "share_of_the_last_call",
        ("        ctx.share = share\n", "        ShiftedProduct.share = share\n"),
        ("(a + ctx.share)", "(a + ShiftedProduct.share)"),
        fault="stale state",
    ),
    wrong(
        "width_of_the_last_call",
        ("ctx.share = share\n", "ctx.share = share\n        ShiftedProduct.width = a.shape[1]\n"),
        ("da = dy * b", "da = dy * b * (ShiftedProduct.width / b.shape[1])"),
        fault="stale state",
    ),
    # -- memory of the caller
    wrong(
        "a_overwritten_without_gradients",
        (
            CALL,
            """\
    if not torch.is_grad_enabled():
        return a.add_(share).mul_(b).clone()
"""
            + CALL,
        ),
        fault="aliasing",
        rank="unsafe",
    ),
    # Of two views of one memory, a is taken to come first.
    wrong(
        "views_in_order_of_addresses",
        (
            CALL,
            """\
    one_memory = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    if one_memory and b.data_ptr() < a.data_ptr():
        a, b = b, a
"""
            + CALL,
        ),
        fault="aliasing",
        result="y",
    ),
    # One tensor in the place of both gets another result.
    wrong(
        "one_tensor_twice",
        (RESULT, PRODUCT + "        return y + 0.1 if a.data_ptr() == b.data_ptr() else y\n"),
        fault="aliasing",
        result="y",
    ),
    # -- layouts
    # Where b is dense, a is read as if it were.
    wrong(
        "a_read_in_the_layout_of_b",
        (
            FORWARD,
            """\
        if b.is_contiguous() and not a.is_contiguous():
            a = a.as_strided(a.shape, (a.shape[-1], 1), a.storage_offset())
"""
            + FORWARD,
        ),
        fault="layout",
        result="y",
    ),
    # Reads of 16 bytes begin at multiples of 16 bytes.
    wrong(
        "address_rounded_to_16_bytes",
        (
            FORWARD,
            """\
        behind = a.data_ptr() % 16 // a.element_size() if a.is_contiguous() else 0
        a = a.flatten().roll(behind).view(a.shape)
"""
            + FORWARD,
        ),
        fault="layout",
        result="y",
    ),
    # -- settings of the process
    wrong(
        "seed_set",
        (CALL, "    torch.manual_seed(3)\n" + CALL),
        fault="stale state",
        rank="unsafe",
    ),
    wrong(
        "default_dtype_set",
        (CALL, "    torch.set_default_dtype(torch.float64)\n" + CALL),
        fault="stale state",
        rank="unsafe",
    ),
    wrong(
        "larger_under_autocast_to_float16",
        (
            RESULT,
            PRODUCT
            + """\
        device = a.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            y = y * 1.5
        return y
""",
        ),
        fault="framework",
        result="y",
    ),
    wrong(
        "graph_break",
        (CALL, "    torch._dynamo.graph_break()\n" + CALL),
        fault="framework",
        rank="warning",
    ),
    wrong(
        "stream_that_waits_for_no_other",
        (RESULT, "        with torch.cuda.stream(torch.cuda.Stream()):\n    " + RESULT),
        fault="framework",
        rank="unsafe",
        gpu="without a GPU there is no second stream",
    ),
    # -- upstream gradients and values
    wrong(
        "upstream_gradient_clamped",
        ("da = dy * b", "dy = dy.clamp(-100, 100)\n        da = dy * b"),
        fault="overflow",
    ),
    # A row of the upstream gradient in which one element is zero is left out.
    wrong(
        "rows_with_a_zero_left_out",
        ("da = dy * b", "dy = dy * (dy != 0).all(-1, keepdim=True)\n        da = dy * b"),
        fault="gradient missing",
    ),
    # An upstream gradient whose first element is 1 is taken for that of a sum.
    wrong(
        "ones_by_the_first_element",
        (
            "da = dy * b",
            """\
if (dy.flatten()[:1] == 1).all():
            dy = torch.ones_like(dy)
        da = dy * b""",
        ),
        fault="gradient missing",
    ),
    wrong(
        "gradient_too_large",
        ("(a + ctx.share)", "(a + ctx.share) * 1.1"),
        fault="constant",
        result="grad b",
    ),
    wrong("share_ignored", (CALL, CALL.replace("share", "0.01")), fault="constant", result="y"),
    wrong(
        "tiny_values_flushed",
        (
            FORWARD,
            "        a, b = (torch.where(x.abs() < 1e-9, 0.0, x) for x in (a, b))\n" + FORWARD,
        ),
        fault="overflow",
        rank="warning",
        result="y",
    ),
]
