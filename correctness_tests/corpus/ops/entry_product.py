"""A product of elements; most of its variants have two faults, one of which must not hide the other."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def copy_kernel(source, target, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(source + row * D + column, mask=column < D)
    tl.store(target + row * D + column, value, mask=column < D)


@triton.jit
def clear_kernel(x, start, D, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(x + start + column, tl.zeros((BLOCK,), tl.float32), mask=column < D)


class EntryProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        z = x * y
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz):
        x, y = ctx.saved_tensors
        dx = dz * y
        dy = dz * x
        return dx, dy


op = Op(
    "corpus_entry_product",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=8), Case(N=2, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, y):
    return x * y


@op.provider("function", double_backward=False)
def candidate(x, y):
    return EntryProduct.apply(x, y)


# variants
from correctness_tests.corpus.variants import right, wrong

FORWARD = "        z = x * y\n"
LOAD = "        x, y = ctx.saved_tensors\n"
RETURN = "        return dx, dy\n"
CALL = "    return EntryProduct.apply(x, y)\n"
ONCE = "    @torch.autograd.function.once_differentiable\n"


def after_forward(lines):
    return FORWARD, FORWARD + lines


def called(lines):
    return CALL, lines + CALL


RAISED = LOAD, f'        raise ArithmeticError("no gradient today")\n{LOAD}'
TOO_LARGE = FORWARD, "        z = 1.5 * x * y\n"
MISSING = RETURN, "        return dx, None\n"
ZEROS = RETURN, "        return torch.zeros_like(x), torch.zeros_like(y)\n"
HALVED = RETURN, "        return dx, 0.5 * dy\n"
OVERWRITTEN = RETURN, f"        dz.zero_()\n{RETURN}"
OVERWRITTEN_AND_MISSING = RETURN, "        dz.zero_()\n        return dx, None\n"
OVERWRITTEN_AND_ZEROS = RETURN, f"        dz.zero_()\n{ZEROS[1]}"
TOO_LARGE_AND_MISSING = RETURN, "        return 1.5 * dx, None\n"
X_CLEARED = after_forward("        x.data.zero_()\n")
Y_CLEARED = after_forward("        y.data.zero_()\n")
Y_CLEARED_AND_TOO_LARGE = FORWARD, f"{TOO_LARGE[1]}        y.data.zero_()\n"
BACKWARD_CHANGES_BOTH = RETURN, f"        dz.zero_()\n        x.data.zero_()\n{RETURN}"
RACING = after_forward(
    """\
        if x.numel():
            source, BLOCK = x.detach().contiguous(), triton.next_power_of_2(x.shape[1])
            copy_kernel[(len(x),)](source, torch.empty_like(source), x.shape[1], BLOCK=BLOCK)
"""
)
RACE = ("target + row * D + column", "target + column")
SHORT = after_forward("        z = z * (torch.arange(len(x))[:, None] < 100)\n")
DENSE_Y = after_forward("        z = z * (1.0 if y.is_contiguous() else 1.5)\n")
# The upstream gradient is halved where it lies, and the gradients are doubled.
SCALED_IN_PLACE = (
    ("dx = dz * y", "dx = 2 * dz.mul_(0.5) * y"),
    ("dy = dz * x", "dy = 2 * dz * x"),
)


def refuses(condition, error):
    return called(f"    if {condition}:\n        raise {error}\n")


NORMAL = "from tinyllama.harness.declare.values import normal\n"
# What is said of a fault behind another one, where a check runs without those that find the other.
STRIDED = "not (x.is_contiguous() and y.is_contiguous())"
ALL_CONTIGUOUS = '"make both inputs contiguous"'

VARIANTS = [
    right(),
    wrong("backward_raises", RAISED, fault="gradient missing", result="no gradient today"),
    wrong(
        "forward_raises",
        after_forward('        raise ArithmeticError("no result today")\n'),
        fault="constant",
        result="no result today",
    ),
    # The smallest case raises, gradients of others are too large.
    wrong(
        "gradients_beside_a_case_that_raises",
        called('    if len(x) == 2:\n        raise ArithmeticError("no result today")\n'),
        ("dx = dz * y", "dx = 1.1 * dz * y"),
        fault="constant",
        result="grad x",
    ),
    wrong("gradients_zero", ZEROS, fault="gradient missing", result="grad x"),
    wrong(
        "changed_input_beside_zero_gradients",
        X_CLEARED,
        ZEROS,
        fault="aliasing",
        rank="unsafe",
        result="forward changed its input x",
    ),
    wrong(
        "overwritten_upstream_gradient_beside_zero_gradients",
        OVERWRITTEN_AND_ZEROS,
        fault="aliasing",
        rank="unsafe",
        result="the upstream gradient of z",
    ),
    wrong(
        "gradient_too_large_beside_a_missing_one",
        TOO_LARGE_AND_MISSING,
        fault="constant",
        result="grad x: at [",
    ),
    wrong(
        "gradient_missing_beside_one_too_large",
        TOO_LARGE_AND_MISSING,
        fault="gradient missing",
        result="grad y is missing",
    ),
    wrong(
        "overwritten_upstream_gradient_beside_a_missing_gradient",
        OVERWRITTEN_AND_MISSING,
        fault="aliasing",
        rank="unsafe",
        result="the upstream gradient of z",
    ),
    # A hundredth is added wherever the upstream gradient is not zero; the other one is missing.
    wrong(
        "disproportionate_gradient_beside_a_missing_one",
        MISSING,
        ("dx = dz * y", "dx = dz * y + 0.01 * (dz != 0)"),
        fault="constant",
        result="grad x: at [",
    ),
    # Programs copy two rows to one, and the backward pass raises.
    wrong(
        "race_beside_a_backward_that_raises",
        RACING,
        RACE,
        RAISED,
        fault="race",
        rank="unsafe",
        result="copy_kernel",
    ),
    right("copy_in_a_kernel", RACING),
    # A backward kernel stores far behind its tensor, and a gradient is halved.
    wrong(
        "store_far_out_of_bounds_beside_a_halved_gradient",
        (
            RETURN,
            "        clear_kernel[(1,)](dx.contiguous(), 2**40, 8, BLOCK=8)\n        return dx, 0.5 * dy\n",
        ),
        fault="out of bounds",
        rank="unsafe",
        result="clear_kernel, program (0, 0, 0): a store of",
    ),
    # Where an input is not dense, outputs are too large.
    wrong(
        "either_input_must_be_dense",
        after_forward(
            "        z = z * (1.0 if x.is_contiguous() and y.is_contiguous() else 1.5)\n"
        ),
        fault="layout",
        result=" alone: ",
    ),
    wrong(
        "input_cleared_by_a_kernel",
        after_forward("        clear_kernel[(1,)](y.detach(), 0, y.shape[1], BLOCK=8)\n"),
        fault="aliasing",
        rank="unsafe",
        result="forward changed its input y; kernels: ",
    ),
    # A backward kernel clears an input, beside a race of the forward pass.
    wrong(
        "input_cleared_by_a_backward_kernel",
        RACING,
        RACE,
        (RETURN, f"        clear_kernel[(1,)](x.detach(), 0, x.shape[1], BLOCK=8)\n{RETURN}"),
        fault="aliasing",
        rank="unsafe",
        result="backward changed its input x; kernels: ",
    ),
    # The forward pass changes one input, the backward pass the other and the upstream gradient.
    wrong(
        "changed_in_forward_and_in_backward",
        Y_CLEARED_AND_TOO_LARGE,
        BACKWARD_CHANGES_BOTH,
        fault="aliasing",
        rank="unsafe",
        result="forward changed its input y; backward changed its input x and the upstream gradient of z",
    ),
    wrong(
        "changed_input_beside_a_backward_that_raises",
        Y_CLEARED,
        RAISED,
        fault="aliasing",
        rank="unsafe",
        result="forward changed its input y",
    ),
    wrong(
        "backward_that_raises_beside_a_changed_input",
        Y_CLEARED,
        RAISED,
        fault="gradient missing",
        result="no gradient today",
    ),
    wrong(
        "upstream_gradient_scaled_in_place",
        *SCALED_IN_PLACE,
        fault="aliasing",
        rank="unsafe",
        result="the upstream gradient of z",
    ),
    wrong(
        "backward_in_float16",
        (LOAD, f"{LOAD}        dz = (dz * 2**-13).half().float() * 2**13\n"),
        fault="accumulation",
        result="grad x",
    ),
    # Layouts that are refused.
    wrong(
        "asserts_contiguous_inputs",
        called(f"    assert x.is_contiguous() and y.is_contiguous(), {ALL_CONTIGUOUS}\n"),
        fault="layout",
        rank="refused",
        result=ALL_CONTIGUOUS.strip('"'),
    ),
    wrong(
        "raises_for_strided_inputs",
        refuses(STRIDED, f"RuntimeError({ALL_CONTIGUOUS})"),
        fault="layout",
        rank="refused",
        result=ALL_CONTIGUOUS.strip('"'),
    ),
    wrong(
        "refuses_strided_upstream_gradients",
        (
            LOAD,
            f'        if not dz.is_contiguous():\n            raise ValueError("a dense gradient only")\n{LOAD}',
        ),
        fault="layout",
        rank="refused",
        result="a dense gradient only",
    ),
    # An error of torch's, which is no refusal by the author.
    wrong(
        "views_a_strided_input",
        called("    y = y.view(-1).view_as(x)\n"),
        fault="layout",
        rank="refused",
    ),
    wrong(
        "another_dtype_for_strided_inputs",
        (
            CALL,
            "    z = EntryProduct.apply(x, y)\n    return z if y.is_contiguous() else z.double()\n",
        ),
        fault="layout",
        result="z",
    ),
    # Strided inputs are refused, and others that are not dense give a wrong result.
    wrong(
        "layout_beside_one_that_is_refused",
        DENSE_Y,
        refuses("x.stride(-1) == 2", 'ValueError("the last axis must be dense")'),
        fault="layout",
        result="z: ",
    ),
    # What has to be taken, and is refused.
    wrong(
        "plain_case_refused",
        refuses("True", 'ValueError("not today")'),
        fault="constant",
        rank="refused",
    ),
    wrong(
        "large_values_refused",
        ("import Case, Op, Tensor\n", f"import Case, Op, Tensor\n{NORMAL}"),
        (
            "    cases=",
            '    extremes={"large": {"x": normal(std=1e4)}},\n    cases=',
        ),
        refuses("(x.detach().abs() > 1e3).any()", 'ValueError("values are too large")'),
        fault="overflow",
        rank="refused",
        result="values are too large",
    ),
    wrong(
        "some_gradients_refused",
        (
            LOAD,
            f'        if not all(ctx.needs_input_grad):\n            raise ValueError("both or none")\n{LOAD}',
        ),
        fault="gradient missing",
        rank="refused",
        result="both or none",
    ),
    # A second derivative loses the part that goes through one gradient.
    wrong(
        "one_gradient_detached",
        (ONCE, ""),
        (RETURN, "        return dx.detach(), dy\n"),
        fault="gradient missing",
        result="gives a wrong one by",
    ),
    wrong(
        "one_gradient_detached_and_declared",
        (ONCE, ""),
        (", double_backward=False", ""),
        (RETURN, "        return dx.detach(), dy\n"),
        fault="gradient missing",
        result="its second derivative by",
    ),
]
