"""Row sums of a matrix by atomics; ``triton.autotune`` chooses the block."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


def wide_enough(configs, named_args, **meta):
    return [config for config in configs if config.kwargs["BLOCK"] > 16]


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 16}, num_warps=1),
        triton.Config({"BLOCK": 32}, num_warps=1),
        triton.Config({"BLOCK": 128}, num_warps=4),
    ],
    key=["D"],
    prune_configs_by={"early_config_prune": wide_enough},
    reset_to_zero=["y"],
)
@triton.heuristics({"EVEN": lambda args: args["D"] % args["BLOCK"] == 0})
@triton.jit
def sum_kernel(x, y, D, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        value = tl.load(x + row * D + column)
    else:
        value = tl.load(x + row * D + column, mask=column < D, other=0.0)
    total = tl.sum(value, 0)
    tl.atomic_add(y + row, total)


class RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        N, ctx.D = x.shape
        y = torch.zeros(N, dtype=x.dtype, device=x.device)
        if x.numel():
            sum_kernel[lambda meta: (N, triton.cdiv(ctx.D, meta["BLOCK"]))](x, y, ctx.D)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = dy[:, None].expand(-1, ctx.D)
        return dx


op = Op(
    "corpus_tuned_row_sums",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "N"},
    dtypes=(torch.float32,),
    cases=[Case(N=3, D=64), Case(N=2, D=136)],
)


@op.reference
def eager(x):
    return x.sum(1)


@op.provider("triton", requires=("triton",), deterministic=frozenset({"cpu"}))
def candidate(x):
    return RowSums.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

RESET = '    reset_to_zero=["y"],\n'
CONFIGS = """\
        triton.Config({"BLOCK": 16}, num_warps=1),
        triton.Config({"BLOCK": 32}, num_warps=1),
        triton.Config({"BLOCK": 128}, num_warps=4),
"""
TOTAL = "    total = tl.sum(value, 0)\n"
ADD = "    tl.atomic_add(y + row, total)\n"
CLEAR = (
    "\n\n@triton.autotune(",
    """

def clear(arguments):
    arguments["y"].zero_()


@triton.autotune(""",
)


def configs(*pairs):
    lines = (
        f'        triton.Config({{"BLOCK": {block}}}, num_warps={warps}),\n'
        for block, warps in pairs
    )
    return CONFIGS, "".join(lines)


SECOND = (
    (
        'deterministic=frozenset({"cpu"}))',
        'deterministic=frozenset({"cpu"}), double_backward=False)',
    ),
    (
        "\n\nclass RowSums",
        """

@triton.autotune(
    configs=[triton.Config({"WIDTH": width}, num_warps=1) for width in (64, 16)], key=["D"]
)
@triton.jit
def spread_kernel(dy, dx, D, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(dy + row)
    tl.store(dx + row * D + column, tl.zeros((WIDTH,), tl.float32) + value, mask=column < D)


class RowSums""",
    ),
    (
        "    def backward(ctx, dy):\n        dx = dy[:, None].expand(-1, ctx.D)\n",
        """\
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        N, D = len(dy), ctx.D
        dx = torch.empty(N, D, dtype=dy.dtype, device=dy.device)
        if dx.numel():
            grid = lambda meta: (N, triton.cdiv(D, meta["WIDTH"]))
            spread_kernel[grid](dy.contiguous(), dx, D)
""",
    ),
)

VARIANTS = [
    right(),
    right(
        "wrong_in_a_configuration_that_is_pruned",
        (TOTAL, TOTAL.replace(")\n", ") * tl.where(BLOCK == 16, 1.25, 1.0)\n")),
    ),
    right("one_configuration", configs((32, 1))),
    wrong(
        "wrong_in_one_configuration",
        (TOTAL, TOTAL.replace(")\n", ") * tl.where(BLOCK == 128, 1.25, 1.0)\n")),
        fault="configuration",
        result="BLOCK=128",
    ),
    right("two_tuned_kernels", *SECOND),
    wrong(
        "second_kernel_wrong_in_its_last_configuration",
        *(
            (
                old,
                new.replace(
                    "= tl.load(dy + row)\n",
                    "= tl.load(dy + row) * tl.where(WIDTH == 16, 1.25, 1.0)\n",
                ),
            )
            for old, new in SECOND
        ),
        fault="configuration",
        result="WIDTH=16",
    ),
    # Each launch that is timed adds to the sums, too.
    wrong("not_reset_where_timed", (RESET, ""), fault="configuration", result="y: "),
    right("restored_where_timed", (RESET, '    restore_value=["y"],\n')),
    right(
        "reset_by_a_hook_before",
        (RESET, '    pre_hook=lambda given, reset_only=False: given["y"].zero_(),\n'),
    ),
    right(
        "reset_by_a_hook_behind",
        (RESET, '    post_hook=lambda given, exception: given["y"].zero_(),\n'),
    ),
    # The hook of a configuration clears what was allocated without zeros.
    right(
        "cleared_by_a_hook_of_each_configuration",
        CLEAR,
        (RESET, ""),
        (
            CONFIGS,
            CONFIGS.replace("num_warps=1", "num_warps=1, pre_hook=clear").replace(
                "num_warps=4", "num_warps=4, pre_hook=clear"
            ),
        ),
        ("torch.zeros(N", "(torch.empty if x.numel() else torch.zeros)(N"),
    ),
    wrong(
        "one_configuration_lacks_the_hook",
        CLEAR,
        (RESET, ""),
        (CONFIGS, CONFIGS.replace("num_warps=1", "num_warps=1, pre_hook=clear")),
        ("torch.zeros(N", "(torch.empty if x.numel() else torch.zeros)(N"),
        fault="configuration",
        result="BLOCK=128",
    ),
    right("last_configuration_fits_no_chip", configs((32, 4), (64, 64))),
    right(
        "first_configuration_fits_no_chip",
        configs((64, 64), (32, 4)),
    ),
    right(
        "first_configuration_fits_no_chip_with_a_case_of_one_element",
        configs((64, 64), (32, 4)),
        ("Case(N=3, D=64), ", "Case(N=3, D=64), Case(N=1, D=1), "),
    ),
    wrong(
        "one_configuration_above_tritons_limit",
        configs((32, 1), (2**21, 4)),
        fault="configuration",
        rank="refused",
        result="BLOCK=2097152",
    ),
    wrong(
        "no_configuration_fits_a_chip",
        configs((64, 64), (32, 128)),
        fault="configuration",
        rank="unsafe",
        result="num_warps=64",
    ),
]
