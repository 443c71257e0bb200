"""The sum of two products of tensors, with a backward pass of its own."""

import torch

from tinyllama.harness import Case, Op, Tensor


class SumOfTwoProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, height, width, price, count):
        ctx.save_for_backward(height, width, price, count)
        return height * width + price * count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        height, width, price, count = ctx.saved_tensors
        of_height = dy * width
        of_width = dy * height
        of_price = dy * count
        of_count = dy * price
        return of_height, of_width, of_price, of_count


op = Op(
    "corpus_sum_of_two_products",
    inputs={name: Tensor("N D", grad=True) for name in ("height", "width", "price", "count")},
    outputs={"y": "N D"},
    cases=[Case(N=5, D=8)],
    dtypes=(torch.float32,),
)


@op.reference
def eager(height, width, price, count):
    return height * width + price * count


@op.provider("explicit", double_backward=False)
def candidate(height, width, price, count):
    return SumOfTwoProducts.apply(height, width, price, count)


# variants
from correctness_tests.corpus.variants import right, wrong

FACTORS = {"height": "width", "width": "height", "price": "count", "count": "price"}
UNPACKED = "        height, width, price, count = ctx.saved_tensors\n"


def clamped(name):
    """One of the gradients is that of an upstream gradient of at most 100."""
    return wrong(
        f"upstream_of_{name}_clamped",
        (f"of_{name} = dy * ", f"of_{name} = dy.clamp(-100, 100) * "),
        fault="overflow",
        result=name,
    )


def with_strides(name):
    """One of the saved tensors is read with the strides that it had in the forward pass."""
    factor = FACTORS[name]
    return wrong(
        f"strides_of_{factor}_of_the_forward_pass",
        (
            "price, count)\n        return",
            f"price, count)\n        ctx.strides = {factor}.stride()\n        return",
        ),
        (
            f"of_{name} = dy * {factor}\n",
            f"of_{name} = dy * {factor}.as_strided(dy.shape, ctx.strides)\n",
        ),
        fault="stale state",
        result=f"grad {name}",
    )


def halved(*names):
    """The gradients are halved if exactly these inputs want one."""
    needs = tuple(name in names for name in FACTORS)
    line = f"        if ctx.needs_input_grad == {needs}:\n            dy = dy / 2\n"
    return wrong(
        f"halved_where_{'_and_'.join(names)}_alone",
        (UNPACKED, UNPACKED + line),
        fault="gradient missing",
        result=f"grad {names[0]}",
    )


VARIANTS = [
    right(),
    *map(clamped, ("height", "width", "count")),
    *map(with_strides, ("height", "width", "count")),
    halved("height"),
    halved("count"),
    halved("height", "price"),
    halved("width", "count"),
    halved("height", "width", "count"),
    halved("width", "price", "count"),
]
