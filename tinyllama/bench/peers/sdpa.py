"""`scaled_dot_product_attention` by one backend each, as providers to be timed beside ours.

The provider "torch" takes the backend that torch picks, which differs between versions and shapes.
This is a file of providers like any other (``--ops FILE``).
"""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyllama.ops.attention import attention, sdpa

TRAITS: dict[str, Any] = {
    "requires": ("gpu",),
    "dtypes": (torch.bfloat16, torch.float16),  # both have kernels for 16 bits only
    "deterministic": frozenset(),
    "double_backward": False,
}


@attention.provider("flash", **TRAITS)
def flash(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    return by_backend(SDPBackend.FLASH_ATTENTION, q_BTHK, k_BTGK, v_BTGK)


@attention.provider("cudnn", **TRAITS)
def cudnn(q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    return by_backend(SDPBackend.CUDNN_ATTENTION, q_BTHK, k_BTGK, v_BTGK)


def by_backend(backend: SDPBackend, *qkv: torch.Tensor) -> torch.Tensor:
    """Attention by this backend. Raises ValueError when it cannot take these inputs."""
    with sdpa_kernel(backend):
        try:
            return sdpa(*qkv)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in qkv)
            raise ValueError(
                f"{backend.name} does not take q, k, v of {shapes} in {qkv[0].dtype}: {error}"
            ) from error
