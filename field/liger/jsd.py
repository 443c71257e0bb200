"""Generalised Jensen-Shannon divergence of two rows of log-probabilities, mean over rows."""

import math

import torch

from field.sampling import DISTRIBUTIONS, log_probabilities
from tinyllama.harness import Op, Tensor
from tinyllama.harness.kernels.foreign import foreign

with foreign():
    from liger_kernel.ops.jsd import LigerJSDFunction

jsd = Op(
    "jsd",
    inputs={
        "log_q": Tensor("N V", grad=True, values=log_probabilities()),
        "log_p": Tensor("N V", values=log_probabilities()),
    },
    params={"beta": 0.5},
    outputs={"loss": ""},
    cases=DISTRIBUTIONS,
    dtypes=(torch.float32,),
)


@jsd.reference
def eager(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor, beta: float) -> torch.Tensor:
    log_m_NV = torch.logaddexp(log_p_NV + math.log(beta), log_q_NV + math.log(1 - beta))
    of_p = log_p_NV.exp() * (log_p_NV - log_m_NV)
    of_q = log_q_NV.exp() * (log_q_NV - log_m_NV)
    return (beta * of_p + (1 - beta) * of_q).sum() / len(log_q_NV)


@jsd.provider("liger", requires=("triton",), double_backward=False)
def liger(log_q_NV: torch.Tensor, log_p_NV: torch.Tensor, beta: float) -> torch.Tensor:
    return LigerJSDFunction.apply(log_q_NV, log_p_NV, None, beta)
