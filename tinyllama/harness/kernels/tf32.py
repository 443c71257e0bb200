"""Rounding to tf32: the sign, 8 bits of exponent and 10 bits of fraction of a float32.

Matrix units that multiply in tf32 cut the other 13 bits of an operand off. All errors then have one
sign and add up from product to product. So operands are rounded first: to the nearest number, and
away from zero where two are equally near. Cutting then changes nothing. A descriptor's
loads round in the same time (`descriptors_round`); what is in registers, `to_tf32` rounds.
"""

import functools
from typing import Any

import torch

from tinyllama.harness.kernels.launch import HAS_DESCRIPTORS, jit, tl


@jit
def to_tf32(x):  # type: ignore[no-untyped-def]
    """x, float32, rounded to tf32; infinities and NaN stay. Values at least half a unit of the last
    place above tf32's largest become infinite."""
    nearest = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """x, float32 of any shape, rounded as `to_tf32` does."""
    nearest = x.view(torch.int32).add(0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(x == x, nearest, x)


ROUNDED = 11  # CUDA's number of the type of a tensor map that rounds float32 to tf32 as it loads


@functools.cache
def descriptors_round() -> bool:
    """Whether descriptors can round float32 to tf32 as they load on a GPU. On a CPU no product is
    in tf32, and not every interpreter rounds.

    Descriptors of triton 3.7 and later have an option for it. For earlier versions this function
    replaces the driver's `make_tensordesc_arg`, where there is one.
    """
    if not HAS_DESCRIPTORS:
        return False
    from triton.tools.tensor_descriptor import TensorDescriptor

    if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__:
        return True
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_tensordesc_arg"):
        return False
    encode: Any = driver.make_tensordesc_arg

    def encoded(argument: Any, metadata: Any, *rest: Any) -> Any:
        if getattr(argument, "round_f32_to_tf32", False):
            if metadata is None:
                raise RuntimeError("this chip has no tensor maps, which round: use no descriptors")
            metadata = {**metadata, "elem_type": ROUNDED}
        return encode(argument, metadata, *rest)

    driver.make_tensordesc_arg = encoded
    return True
