"""Kimi's delta attention, one step after the other: a state that decays, and is corrected by each
key and value. Forward alone."""

import torch

from field.fla import module
from tinyllama.harness import Case, Op, Tensor
from tinyllama.harness.declare.values import Values, normal

released = module("ops.kda.fused_recurrent")

DECAYS = Values("decays", lambda shape, generator: -torch.rand(shape, generator=generator))
RATES = Values("rates", lambda shape, generator: torch.rand(shape, generator=generator))

delta_attention = Op(
    "delta_attention",
    inputs={
        "q": Tensor("B T H K"),
        "k": Tensor("B T H K", values=normal(0.3)),
        "v": Tensor("B T H V"),
        "decay": Tensor("B T H K", values=DECAYS),
        "rate": Tensor("B T H", values=RATES),
    },
    outputs={"o": "B T H V"},
    cases=[
        Case(B=2, T=4, H=2, K=16, V=8),
        Case(B=1, T=3, H=1, K=12, V=40, why="a head that no power of two divides, two blocks"),
    ],
    dtypes=(torch.float32,),
)


@delta_attention.reference
def eager(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    decay_BTHK: torch.Tensor,
    rate_BTH: torch.Tensor,
) -> torch.Tensor:
    B, T, H, K = k_BTHK.shape
    state_BHKV = v_BTHV.new_zeros(B, H, K, v_BTHV.shape[-1])
    outputs = []
    for t in range(T):
        state_BHKV = state_BHKV * decay_BTHK[:, t, :, :, None].exp()
        seen_BHV = (k_BTHK[:, t, :, :, None] * state_BHKV).sum(-2)
        correction_BHV = (v_BTHV[:, t] - seen_BHV) * rate_BTH[:, t, :, None]
        state_BHKV = state_BHKV + k_BTHK[:, t, :, :, None] * correction_BHV[:, :, None]
        outputs.append((q_BTHK[:, t, :, :, None] * state_BHKV).sum(-2) * K**-0.5)
    return torch.stack(outputs, 1)


@delta_attention.provider("fla", requires=("triton",), double_backward=False)
def fla(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    decay_BTHK: torch.Tensor,
    rate_BTH: torch.Tensor,
) -> torch.Tensor:
    return released.fused_recurrent_kda(q_BTHK, k_BTHK, v_BTHV, decay_BTHK, rate_BTH)[0]
