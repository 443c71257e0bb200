"""KL divergence of a target distribution from predicted log-probabilities, mean over rows."""

import inspect

import torch

from field.sampling import DISTRIBUTIONS, log_probabilities, probabilities
from tinyllama.harness import Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

_TAKEN = inspect.signature(LigerKLDivLossFunction.forward).parameters
EPS = (False, 1e-10) if "eps" in _TAKEN else ()  # log_target, eps: its defaults

kl_div = Op(
    "kl_div",
    inputs={
        "log_q": Tensor("N V", grad=True, values=log_probabilities()),
        "p": Tensor("N V", values=probabilities()),
    },
    outputs={"loss": Tensor("", dtype=torch.float32)},
    cases=DISTRIBUTIONS,
    dtypes=(torch.float32,),
)


@kl_div.reference
def eager(log_q_NV: torch.Tensor, p_NV: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(p_NV.dtype, torch.float32)
    log_q_NV, p_NV = log_q_NV.to(wide), p_NV.to(wide)
    return (p_NV * (p_NV.log() - log_q_NV)).sum() / len(p_NV)


@kl_div.provider("liger", requires=("triton",), double_backward=False)
def liger(log_q_NV: torch.Tensor, p_NV: torch.Tensor) -> torch.Tensor:
    return LigerKLDivLossFunction.apply(log_q_NV, p_NV, "batchmean", *EPS)
