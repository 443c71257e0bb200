"""Rows through a gate: gate sigmoid(gate) up, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import normal


class GatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        h = gate * torch.sigmoid(gate) * up
        return h

    @staticmethod
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dh * gate * sigmoid
        return dgate, dup


CASES = [Case(F=8, N=6), Case(F=16, N=4)]
op = Op(
    "corpus_gated_rows",
    inputs={"gate": Tensor("N F", grad=True), "up": Tensor("N F", grad=True)},
    outputs={"h": "N F"},
    cases=CASES,
    extremes={
        "large gate": {"gate": normal(std=30.0)},
        "large up": {"up": normal(std=30.0)},
        "large both": {"gate": normal(std=30.0), "up": normal(std=30.0)},
    },
    dtypes=(torch.float32,),
)


@op.reference
def eager(gate, up):
    return torch.nn.functional.silu(gate) * up


@op.independent("sigmoid as a quotient")
def written_out(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


@op.provider("torch")
def library(gate, up):
    return torch.nn.functional.silu(gate).mul(up)


@op.provider("rows")
def candidate(gate, up):
    return GatedRows.apply(gate, up)


# variants
from correctness_tests.corpus.variants import right, wrong

RETURN, CALL = "        return h\n", "    return GatedRows.apply(gate, up)\n"
BACK = "        return dgate, dup\n"


def forward(*lines):
    """An edit of what the forward pass does before it returns."""
    return RETURN, "".join(f"        {line}\n" for line in lines) + RETURN


def backward(*lines):
    return BACK, "".join(f"        {line}\n" for line in lines) + BACK


def called(*lines):
    """An edit of what is done before the function is applied."""
    return CALL, "".join(f"    {line}\n" for line in lines) + CALL


FIRST = "CASES = [Case(F=8, N=6), Case(F=16, N=4)]"
ROWS_FIRST = FIRST, "CASES = [Case(N=6, F=8), Case(N=4, F=16)]"
FEW_COLUMNS = (
    '@op.provider("rows")',
    '@op.provider("rows", supports=lambda dims: None if dims["F"] <= 16 else "too wide")',
)
NO_TAIL = "h[:, h.shape[1] // 8 * 8 if h.shape[1] > 8 else 8 :] = 0"
VARIANTS = [
    right(),
    # The op's rule and the provider's limit get numbers where N is several axes.
    right(
        "limits_of_several_leading_axes",
        (FIRST, "CASES = [Case(N=(2, 3), F=8)]"),
        (
            "    dtypes=(torch.float32,),\n)",
            "    dtypes=(torch.float32,),\n"
            '    leading=("N",),\n'
            '    fits=lambda sizes: None if sizes["N"] <= 3300 else "too many",\n)',
        ),
        (
            '@op.provider("rows")',
            '@op.provider("rows", supports=lambda dims: None if dims["F"] <= 300 else "too wide")',
        ),
    ),
    right(
        "supports_few_rows_and_columns",
        (
            '@op.provider("rows")',
            "def supports(dims):\n"
            '    return None if dims["N"] <= 1100 and dims["F"] <= 64 else "too large"\n\n\n'
            '@op.provider("rows", supports=supports)',
        ),
    ),
    right(
        "reference_refuses_many_rows",
        (
            "def eager(gate, up):\n",
            "def eager(gate, up):\n"
            "    if len(gate) > 2000:\n"
            '        raise ValueError("no more than 2000 rows")\n',
        ),
    ),
    # The extreme makes the reference itself overflow: exp of 30 times a large number.
    right(
        "reference_overflows_with_large_gate",
        (
            "    return torch.nn.functional.silu(gate) * up\n",
            "    return gate * (torch.exp(gate) / (1 + torch.exp(gate))) * up\n",
        ),
        ('"large gate": {"gate": normal(std=30.0)}', '"large gate": {"gate": normal(std=90.0)}'),
    ),
    # -- rows beyond a limit
    wrong(
        "rows_beyond_4096_left_zero",
        ROWS_FIRST,
        forward("h[4096:] = 0"),
        fault="offset",
        result="h",
    ),
    wrong(
        "rows_beyond_4096_too_large",
        ROWS_FIRST,
        forward("h[4096:] *= 1.1"),
        fault="offset",
        result="h",
    ),
    # The rows that a count of 16 bits does not reach.
    wrong(
        "rows_beyond_65535_too_large",
        (FIRST, "CASES = [Case(N=6, F=2)]"),
        forward("h[65535:] *= 1.1"),
        fault="offset",
        result="h",
    ),
    # -- tails
    # The last block of 8 columns is left out where it is not full, if there are others.
    wrong("last_block_of_columns_left_out", forward(NO_TAIL), fault="tail", result="h"),
    # A path for large gates leaves out the last column where the block is not full.
    wrong(
        "last_column_lost_for_large_gates",
        forward("if gate.abs().max() > 20 and h.shape[1] % 8:", "    h[:, -1] = 0"),
        fault="tail",
        result="h",
    ),
    # -- sizes that are refused
    right(
        "many_rows_refused_by_value_error",
        ROWS_FIRST,
        FEW_COLUMNS,
        called("if len(gate) > 2000:", '    raise ValueError("no more than 2000 rows")'),
    ),
    # torch raises the error: the shape of a view does not fit.
    wrong(
        "many_rows_in_a_view_that_does_not_fit",
        ROWS_FIRST,
        forward("if len(h) > 2000:", "    h = h.view(-1, 64)"),
        fault="tail",
        rank="refused",
    ),
    # Rows beyond 2,000 are refused, which must not hide the tail of columns.
    wrong(
        "many_rows_refused_and_last_block_left_out",
        ROWS_FIRST,
        called("if len(gate) > 2000:", '    raise ValueError("no more than 2000 rows")'),
        forward(NO_TAIL),
        fault="tail",
        result="h",
    ),
    # -- a second block of columns, under one condition alone
    wrong(
        "second_block_lost_for_large_gate",
        forward("if gate.abs().max() > 20 and up.abs().max() < 20:", "    h[:, 128:] = 0"),
        fault="tail",
        result="h",
    ),
    wrong(
        "second_block_lost_for_large_up",
        forward("if up.abs().max() > 20 and gate.abs().max() < 20:", "    h[:, 128:] = 0"),
        fault="tail",
        result="h",
    ),
    wrong(
        "second_block_lost_for_large_both",
        forward("if up.abs().max() > 20 and gate.abs().max() > 20:", "    h[:, 128:] = 0"),
        fault="tail",
        result="h",
    ),
    wrong(
        "second_block_lost_without_gradients",
        called(
            "if not torch.is_grad_enabled():",
            "    h = GatedRows.apply(gate, up)",
            "    h[:, 128:] = 0",
            "    return h",
        ),
        fault="tail",
        result="h",
    ),
    wrong(
        "second_block_of_gradient_of_gate_alone_lost",
        backward("if not ctx.needs_input_grad[1]:", "    dgate[:, 128:] = 0"),
        fault="tail",
        result="grad gate",
    ),
    wrong(
        "second_block_of_gradient_of_up_alone_lost",
        backward("if not ctx.needs_input_grad[0]:", "    dup[:, 128:] = 0"),
        fault="tail",
        result="grad up",
    ),
    # Inputs whose strides differ take a path with one block of 1,024 columns.
    wrong(
        "second_block_lost_for_different_strides",
        forward("if gate.stride() != up.stride():", "    h[:, 1024:] = 0"),
        fault="tail",
        result="h",
    ),
    wrong(
        "second_block_lost_for_transposed_inputs",
        forward("if gate.stride(0) == up.stride(0) == 1 < len(h):", "    h[:, 1024:] = 0"),
        fault="tail",
        result="h",
    ),
    # -- along an axis of the first case alone, wherever it is by its size
    wrong(
        "many_rows_wrong_in_smallest_case",
        forward("if h.shape[1] == 8:", "    h[100:] *= 1.1"),
        (FIRST, "CASES = [Case(N=6, F=8), Case(N=6, F=16), Case(N=6, F=24)]"),
        fault="tail",
        result="h",
    ),
    wrong(
        "many_rows_wrong_in_middle_case",
        forward("if h.shape[1] == 16:", "    h[100:] *= 1.1"),
        (
            FIRST,
            "CASES = [Case(N=6, F=16), Case(N=6, F=8), Case(N=6, F=24)]",
        ),
        fault="tail",
        result="h",
    ),
    wrong(
        "many_rows_wrong_in_largest_case",
        forward("if h.shape[1] == 24:", "    h[100:] *= 1.1"),
        (
            FIRST,
            "CASES = [Case(N=6, F=24), Case(N=6, F=8), Case(N=6, F=16)]",
        ),
        fault="tail",
        result="h",
    ),
    # The provider does not take the first case.
    wrong(
        "many_rows_wrong_in_smallest_supported_case",
        forward("if h.shape[1] == 8:", "    h[100:] *= 1.1"),
        (
            FIRST,
            "CASES = [Case(N=6, F=24), Case(N=6, F=16), Case(N=6, F=8)]",
        ),
        (
            '@op.provider("rows")',
            '@op.provider("rows", supports=lambda dims: "no" if dims["F"] == 24 else None)',
        ),
        fault="tail",
        result="h",
    ),
    wrong(
        "many_rows_wrong_in_first_case_of_bfloat16",
        forward("if h.shape[1] == 8:", "    h[100:] *= 1.5"),
        ("    dtypes=(torch.float32,),\n)", "    dtypes=(torch.bfloat16,),\n)"),
        (FIRST, "CASES = [Case(N=6, F=8), Case(N=6, F=16), Case(N=6, F=24)]"),
        fault="tail",
        result="h",
    ),
    # -- entries out of place
    # Each row of the output is the next one's.
    wrong(
        "rows_of_output_moved_by_one",
        (RETURN, "        return torch.cat((h[1:], h[:1]))\n"),
        fault="offset",
        result="h",
    ),
    wrong(
        "rows_of_gradient_moved_by_one",
        (BACK, "        return torch.cat((dgate[1:], dgate[:1])), dup\n"),
        fault="offset",
        result="grad gate",
    ),
    # One row of the gradient, between others, is that of the last one.
    wrong(
        "gradient_of_third_row_overwritten",
        backward("if len(dh) > 3:", "    dgate[2] = dgate[-1]"),
        fault="offset",
        result="grad gate",
    ),
    # The rows between the first two and the last two are never written.
    wrong(
        "rows_between_ends_unwritten",
        (RETURN, "        return torch.cat((h[:2], torch.empty_like(h[2:-2]), h[-2:]))\n"),
        fault="tail",
        rank="unsafe",
        result="h",
    ),
]
