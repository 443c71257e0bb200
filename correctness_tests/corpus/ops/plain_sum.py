"""The sum of two matrices, in plain PyTorch, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class PlainSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.add(x, y, out=z)
        return z

    @staticmethod
    def backward(ctx, dz):
        return dz.clone(), dz.clone()


op = Op(
    "corpus_plain_sum",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    dtypes=(torch.float32,),
    cases=[Case(N=5, D=8)],
)


@op.reference
def eager(x, y):
    return x + y


@op.provider("plain")
def candidate(x, y):
    return PlainSum.apply(x, y)


# variants
from correctness_tests.corpus.variants import right, wrong

# A store near a tensor's memory, three elements behind its last one or two before its first.
STORES = (
    "\n\nclass PlainSum",
    """

def store_behind(tensor):
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    place = tensor.storage_offset() + last + 3
    if tensor.numel() and tensor.untyped_storage().nbytes() > place * tensor.itemsize:
        tensor.detach().as_strided((1,), (1,), place).fill_(1.0)


def store_before(tensor):
    if tensor.numel() and tensor.storage_offset() >= 2:
        tensor.detach().as_strided((1,), (1,), tensor.storage_offset() - 2).fill_(1.0)


class PlainSum""",
)
ALIGNED = "{0}.data_ptr() % 16 == 0"
LAYOUTS = {  # name -> the condition, of a matrix of 5 rows and 8 columns
    "contiguous": "{0}.stride() == (8, 1) and {0}.data_ptr() % 16 == 0",
    "strided": "{0}.stride() == (16, 2)",
    "transposed": "{0}.stride() == (1, 5)",
    "expanded": "{0}.stride() == (0, 1)",
    "summed": "{0}.stride() == (0, 0)",
    "distinct": "{0}.stride(1) > 1 and {0}.stride(0) == 9 * {0}.stride(1)",
    "offset": "{0}.stride() == (8, 1) and {0}.data_ptr() % 16 == 8",
    "padded": "{0}.stride() == (9, 1) and {0}.data_ptr() % 16 == 0",
}
START = "        z = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n"
END = "        torch.add(x, y, out=z)\n"
BACKWARD = "        return dz.clone(), dz.clone()\n"
LINE = {"x": START, "y": START, "dz": BACKWARD}
OF_INPUTS = ("contiguous", "strided", "transposed", "expanded", "offset", "padded")
OF_UPSTREAM = ("contiguous", "strided", "transposed", "summed", "distinct", "offset", "padded")


def stores_behind(tensor, layout, result):
    line, condition = LINE[tensor], LAYOUTS[layout].format(tensor)
    return wrong(
        f"stores_behind_{layout}_{tensor}",
        STORES,
        (line, f"        if {condition}:\n            store_behind({tensor})\n{line}"),
        fault="out of bounds",
        rank="unsafe",
        result=f"{result}, a buffer",
    )


VARIANTS = [
    right(),
    *(stores_behind("x", layout, "x") for layout in OF_INPUTS),
    *(stores_behind("y", layout, "y") for layout in (*OF_INPUTS, "distinct")),
    *(stores_behind("dz", layout, "grad z") for layout in OF_UPSTREAM),
    wrong(
        "stores_behind_z",
        STORES,
        (END, END + "        store_behind(z)\n"),
        fault="out of bounds",
        rank="unsafe",
        result="after a buffer",
    ),
    wrong(
        "stores_before_x",
        STORES,
        (START, "        store_before(x)\n" + START),
        fault="out of bounds",
        rank="unsafe",
        result="before x, a buffer",
    ),
    wrong(
        "stores_behind_x_and_raises",
        STORES,
        (END, "        store_behind(x)\n        raise ArithmeticError('no result today')\n"),
        fault="out of bounds",
        rank="unsafe",
        result="after x, a buffer",
    ),
]
