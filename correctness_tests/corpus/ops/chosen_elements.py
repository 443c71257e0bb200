"""One element of each row, by its index, in Triton."""

import torch
import triton
import triton.language as tl

from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values


@triton.jit
def choose_kernel(x, index, y, stride, D):
    row = tl.program_id(0)
    column = tl.load(index + row * stride)
    tl.store(y + row, tl.load(x + row * D + column))


def indices(shape, generator):
    return torch.randint(1, 8, shape, generator=generator)


op = Op(
    "corpus_chosen_elements",
    inputs={
        "x": Tensor("N D"),
        "index": Tensor("N", dtype=torch.int64, values=Values("indices", indices)),
    },
    outputs={"y": "N"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(x, index):
    return x.gather(1, index[:, None])[:, 0]


@op.provider("triton", requires=("triton",))
def candidate(x, index):
    x, y = x.contiguous(), x.new_empty(len(x))
    choose_kernel[(len(x),)](x, index, y, index.stride(0), x.shape[1])
    return y


# variants
from correctness_tests.corpus.variants import right, wrong

# Of a kernel that takes an address from a tensor of integers.
BY_ADDRESS = (
    (
        "    tl.store(y + row, tl.load(x + row * D + column))\n",
        "    rows = tl.load(x).to(tl.pointer_type(tl.float32))\n"
        "    tl.store(y + row, tl.load(rows + row * D + column))\n",
    ),
    (
        "    choose_kernel[(len(x),)](x, index,",
        "    address = torch.tensor([x.data_ptr()], device=x.device)\n"
        "    choose_kernel[(len(x),)](address, index,",
    ),
)
# Likewise, of memory below 2^32, where an address is as small as an index may be.
LOW = (
    "    x, y = x.contiguous(), x.new_empty(len(x))\n",
    "    x, y = in_low_memory(x), x.new_empty(len(x))\n",
)
IN_LOW_MEMORY = '''
def in_low_memory(x):
    """A copy of x in the first 2 GiB, where x86-64 and the system give such memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x40 if platform.machine() == "x86_64" else 0)
    memory = mmap.mmap(-1, 4 * max(1, x.numel()), flags)
    return torch.frombuffer(memory, dtype=torch.float32)[: x.numel()].view(x.shape).copy_(x)


def indices('''

VARIANTS = [
    right(),
    right("table_of_addresses", *BY_ADDRESS),
    right(
        "table_of_low_addresses",
        *BY_ADDRESS,
        LOW,
        (
            'Triton."""\n\nimport torch',
            'Triton."""\n\nimport mmap\nimport platform\n\nimport torch',
        ),
        ("\ndef indices(", IN_LOW_MEMORY),
    ),
    # Each program reads the next row's index, the last one what lies behind the end.
    wrong(
        "index_behind_the_end",
        (
            "tl.load(index + row * stride)",
            "tl.load(index + (row + 1) * stride)",
        ),
        fault="out of bounds",
        rank="unsafe",
        result="index",
    ),
    wrong(
        "indices_read_as_dense",
        ("y, index.stride(0), x.shape[1]", "y, 1, x.shape[1]"),
        fault="layout",
        result="index",
    ),
]
