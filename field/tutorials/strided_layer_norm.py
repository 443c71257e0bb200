"""Layer norm (tutorial 5): it stores y with the strides of x, but y is dense."""

import torch

from field import sampling
from tinyllama.harness import Case, Op
from tinyllama.harness.kernels import jit, next_power_of_2, tl

strided_layer_norm = Op(
    "strided_layer_norm",
    inputs=sampling.norm_inputs("N D", "D", grad=False),
    params={"eps": 1e-5},
    outputs={"y": "N D"},
    cases=[Case(N=4, D=64), Case(N=3, D=100, why="width that no power of two divides")],
    dtypes=(torch.float32,),
)
strided_layer_norm.reference(sampling.layer_norm)


@jit
def layer_norm_kernel(x, y, weight, bias, stride, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    inside = at < width
    start = tl.program_id(0) * stride
    value = tl.load(x + start + at, mask=inside, other=0.0)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    gain = tl.load(weight + at, mask=inside)
    shift = tl.load(bias + at, mask=inside)
    tl.store(y + start + at, centred * scale * gain + shift, mask=inside)


@strided_layer_norm.provider("tutorials", requires=("triton",), double_backward=False)
def tutorials(
    x_ND: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    y_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    N, D = x_ND.shape
    block = next_power_of_2(D)
    layer_norm_kernel[(N,)](x_ND, y_ND, weight_D, bias_D, x_ND.stride(0), D, eps, BLOCK=block)
    return y_ND
