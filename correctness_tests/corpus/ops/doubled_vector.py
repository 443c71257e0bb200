"""Twice a vector, in a file that asks for its GPU as Triton's tutorials do."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor

DEVICE = triton.runtime.driver.active.get_active_torch_device()
COUNT = triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"]


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, value * 2, mask=at < n)


op = Op(
    "corpus_doubled_vector",
    inputs={"x": Tensor("N")},
    outputs={"y": "N"},
    cases=[Case(N=40), Case(N=3)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x):
    return x + x


@op.provider("triton", requires=("triton",))
def candidate(x):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=DEVICE)

    def grid(meta):
        return (triton.cdiv(len(x), meta["BLOCK"]),)

    double_kernel[grid](x, y, len(x), BLOCK=16)
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

UNDECLARED = (', requires=("triton",)', "")
STORE = ("at, value * 2, mask=at < n)", "at, value * 2, mask=at < n + 1)")
BESIDE = """@triton.jit
def beside_kernel(x, scratch, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    BODY


op = Op("""
CALL = "    return y\n"


def launched(body, dtype="float32", condition="True"):
    """The edits that launch another kernel, whose result is not used."""
    lines = f"""\
    if {condition}:
        scratch = torch.zeros(64, dtype=torch.{dtype}, device=DEVICE)
        beside_kernel[(1,)](x, scratch, min(len(x), 3), BLOCK=64)
"""
    return ("op = Op(", BESIDE.replace("BODY", body)), (CALL, lines + CALL)


ATOMIC = "tl.atomic_add(scratch + at, tl.load(x + at, mask=at < n).to(tl.bfloat16), mask=at < n)"
# An instruction of AMD's chips.
ASSEMBLY = """value = tl.load(x + at, mask=at < n)
    value = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [value.to(tl.float32)], tl.float32, True, 1)
    tl.store(scratch + at, value, mask=at < n)"""
TWO_LENGTHS = (
    "tl.store(scratch + at, tl.load(x + at, mask=at < n) + tl.arange(0, 2 * BLOCK), mask=at < n)"
)
PROMISE = "tl.assume(n < 0)\n    tl.store(scratch + at, tl.load(x + at, mask=at < n), mask=at < n)"

VARIANTS = [
    right(),
    right("kernel_not_declared", UNDECLARED),
    # One element behind the end is stored.
    wrong(
        "store_one_beyond",
        STORE,
        fault="out of bounds",
        rank="unsafe",
        result="double_kernel, program (0, 0, 0): a store of 4 bytes, right behind",
    ),
    wrong(
        "store_one_beyond_not_declared",
        UNDECLARED,
        STORE,
        fault="out of bounds",
        rank="unsafe",
        result="double_kernel, program (0, 0, 0): a store of 4 bytes, right behind",
    ),
    # An assertion without words fails.
    wrong(
        "assertion_without_words",
        (CALL, f"    assert y is None\n{CALL}"),
        fault="constant",
        result="AssertionError: assert y is None",
    ),
    right("atomic_on_bfloat16", *launched(ATOMIC, "bfloat16")),
    # The chip's compiler takes this kernel; Triton's interpreter has no assembly.
    right("assembly", *launched(ASSEMBLY)),
    right("assembly_in_larger_cases", *launched(ASSEMBLY, condition="len(x) > 3")),
    wrong(
        "tail_lost_beside_assembly_in_bfloat16",
        ("dtypes=(torch.float32,)", "dtypes=(torch.float32, torch.bfloat16)"),
        *launched(ASSEMBLY, condition="x.dtype is torch.bfloat16")[:1],
        (
            CALL,
            launched(ASSEMBLY, condition="x.dtype is torch.bfloat16")[1][1].replace(
                CALL, "    y[64:] = 0\n" + CALL
            ),
        ),
        fault="tail",
        result="y",
    ),
    # Blocks of two lengths are added, which no compiler takes.
    wrong("blocks_of_two_lengths", *launched(TWO_LENGTHS), fault="constant"),
    wrong(
        "blocks_of_two_lengths_in_larger_cases",
        *launched(TWO_LENGTHS, condition="len(x) > 3"),
        fault="constant",
    ),
    # A kernel promises its compiler what does not hold.
    wrong("false_promise", *launched(PROMISE), fault="constant", result="Assume failed"),
    wrong(
        "copied_instead",
        (CALL, "    return x.clone()\n"),
        fault="constant",
        result="y",
    ),
]
