"""Column sums of a matrix; each program adds its row under a lock, as in Triton's tutorial on layer norm."""

from pathlib import Path

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor


@triton.jit
def sum_kernel(x, y, lock, D, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < D
    value = tl.load(x + row.to(tl.int64) * D + column, mask=mask, other=0.0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(y + column, tl.load(y + column, mask=mask, other=0.0) + value, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


class ColumnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.N, D = x.shape
        y = torch.zeros(D, dtype=x.dtype, device=x.device)
        lock = torch.zeros(1, dtype=torch.int32, device=x.device)
        if x.numel():
            sum_kernel[(ctx.N,)](x, y, lock, D, BLOCK=triton.next_power_of_2(D))
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(ctx.N, -1)


op = Op(
    "corpus_column_sums",
    inputs={"x": Tensor("N D", grad=True)},
    outputs={"y": "D"},
    dtypes=(torch.float32,),
    cases=[Case(N=3, D=8), Case(N=70, D=5, why="more programs than a small GPU runs at a time")],
)


@op.reference
def eager(x):
    return x.sum(0)


@op.provider(
    "triton",
    requires=("triton",),
    deterministic=frozenset({"cpu"}),
    races={f"{Path(__file__).stem}.sum_kernel": "under a lock"},
)
def candidate(x):
    return ColumnSums.apply(x)


# variants
from correctness_tests.corpus.variants import right, wrong

LOCK = "    while tl.atomic_cas(lock, 0, 1) == 1:\n        pass\n"
ADD = "    tl.store(y + column, tl.load(y + column, mask=mask, other=0.0) + value, mask=mask)\n"
BARRIER = "    tl.debug_barrier()\n"
RELEASE = "    tl.atomic_xchg(lock, 0)\n"
BODY = LOCK + ADD + BARRIER + RELEASE
UNDECLARED = ("""    deterministic=frozenset({"cpu"}),\n""", "")
NO_RACES = ("""    races={f"{Path(__file__).stem}.sum_kernel": "under a lock"},\n""", "")
ATOMIC = (BODY, "    tl.atomic_add(y + column, value, mask=mask)\n")
COUNTED = """\
    tl.store(partial + row * D + column, value, mask=mask)
    BARRIER
    if tl.atomic_add(lock, 1) == tl.num_programs(0) - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for other in range(tl.num_programs(0)):
            total += tl.load(partial + other * D + column, mask=mask, other=0.0)
        tl.store(y + column, total, mask=mask)
"""
PARTIAL = (
    ("def sum_kernel(x, y, lock,", "def sum_kernel(x, y, partial, lock,"),
    ("](x, y, lock, D", "](x, y, torch.empty_like(x), lock, D"),
)
TURN = """\
    while tl.atomic_add(lock, 0) != row:
        pass
"""
LOCKS = """\
    while tl.atomic_cas(lock + row % 2, 0, 1) == 1:
        pass
    while tl.atomic_cas(lock + 1 - row % 2, 0, 1) == 1:
        pass
"""
HALVES = (
    ("    row = tl.program_id(0)\n", "    row = tl.program_id(0) // 2\n"),
    ("sum_kernel[(ctx.N,)]", "sum_kernel[(2 * ctx.N,)]"),
    ("column, mask=mask, other=0.0)\n    while", "column, mask=mask, other=0.0) * 0.5\n    while"),
)

VARIANTS = [
    right(),
    right("atomics", ATOMIC, NO_RACES),
    # Right, but each order of the programs rounds the sum otherwise.
    wrong("bits_of_any_order_undeclared", UNDECLARED, fault="order", rank="warning"),
    wrong("atomics_in_any_order_undeclared", ATOMIC, UNDECLARED, fault="order", rank="warning"),
    # The lock is released while other threads of the program may still be storing.
    wrong("lock_without_barrier", (BARRIER, ""), fault="order", rank="unsafe", result="y: "),
    # Other bits show in every order, the wrong sum only where programs are interleaved.
    wrong(
        "lock_without_barrier_undeclared",
        (BARRIER, ""),
        UNDECLARED,
        fault="order",
        rank="unsafe",
        result="y: ",
    ),
    right(
        "last_program_adds_up",
        (BODY, COUNTED.replace("BARRIER", "tl.debug_barrier()")),
        *PARTIAL,
        NO_RACES,
    ),
    # The last program may read what others have not stored yet.
    wrong(
        "last_program_adds_up_without_barrier",
        (BODY, COUNTED.replace("    BARRIER\n", "")),
        *PARTIAL,
        fault="order",
        rank="unsafe",
        result="y: ",
    ),
    # Another program may have added its row before the first one clears the sum.
    wrong(
        "first_program_clears",
        (
            BODY,
            "    tl.store(y + column, tl.zeros((BLOCK,), tl.float32), mask=mask & (row == 0))\n"
            + ATOMIC[1],
        ),
        fault="order",
        rank="unsafe",
        result="y: ",
    ),
    wrong("added_without_lock", (BODY, ADD), NO_RACES, fault="race", rank="unsafe"),
    # The provider says that the race does no harm, but two programs may read the same sum.
    wrong("added_without_lock_declared", (BODY, ADD), fault="order", rank="unsafe", result="y: "),
    right("two_programs_a_row", *HALVES, (BODY, ATOMIC[1]), NO_RACES),
    wrong(
        "two_programs_a_row_without_atomics",
        *HALVES,
        (BODY, ADD),
        fault="order",
        rank="unsafe",
        result="y: ",
    ),
    # A launch that is right comes before the one that needs its order.
    wrong(
        "second_launch_needs_its_order",
        (
            "\n\nclass ColumnSums",
            """

@triton.jit
def first_kernel(x, y, D, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * D + column, mask=column < D, other=0.0)
    tl.atomic_add(y + column, value, mask=column < D)


class ColumnSums""",
        ),
        (
            "            sum_kernel[",
            "            first_kernel[(ctx.N,)](x, torch.zeros_like(y), D, BLOCK=triton.next_power_of_2(D))\n"
            "            sum_kernel[",
        ),
        (BODY, ADD),
        fault="order",
        rank="unsafe",
        result="sum_kernel",
    ),
    right("in_turn", (LOCK, TURN), (RELEASE, "    tl.atomic_add(lock, 1)\n")),
    # Each program waits for a turn that is never given, the first one too.
    wrong(
        "waits_for_a_turn_that_never_comes",
        (LOCK, TURN.replace("!= row", "!= row - 1")),
        (RELEASE, "    tl.atomic_add(lock, 1)\n"),
        fault="order",
        rank="unsafe",
    ),
    # Even and odd programs take two locks in opposite order, so that two of them may wait for each other.
    wrong(
        "two_locks_in_opposite_order",
        ("torch.zeros(1, dtype", "torch.zeros(2, dtype"),
        (LOCK, LOCKS),
        (RELEASE, RELEASE + RELEASE.replace("lock, 0", "lock + 1, 0")),
        fault="order",
        rank="unsafe",
    ),
    right(
        "two_locks",
        ("torch.zeros(1, dtype", "torch.zeros(2, dtype"),
        (LOCK, LOCKS.replace(" + row % 2", "").replace("1 - row % 2", "1")),
        (RELEASE, RELEASE + RELEASE.replace("lock, 0", "lock + 1, 0")),
    ),
    # Every program after the first one waits for the lock.
    wrong("lock_never_released", (RELEASE, ""), fault="order", rank="unsafe", result="sum_kernel"),
]
