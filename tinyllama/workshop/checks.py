"""The checks that find each stage's fault. A check returns what is wrong, or None; where it cannot
be made on this device it raises `Unsupported` with the reason."""

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllama.harness.check.candidate import Unsupported
from tinyllama.harness.kernels import HAS_TRITON
from tinyllama.harness.kernels.launch import recorded
from tinyllama.ops import OPS
from tinyllama.workshop.contender import StageStep
from tinyllama.workshop.strided import attention

NEAR = 0.5  # of ln(vocabulary): the first loss of weights that say nothing yet
TOLERANCE = 0.1  # of a step: what its phases may differ from it


def first_loss(stage: StageStep) -> str | None:
    """Before the first update no token is preferred, so the loss is near ln(vocabulary)."""
    expected, loss = math.log(stage.shape.vocab_size), stage.first_loss
    if abs(loss - expected) <= NEAR:
        return None
    return f"the first loss is {loss:.1f}, and ln({stage.shape.vocab_size}) is {expected:.1f}"


def dense_inputs(stage: StageStep) -> str | None:
    """Every tensor that attention's kernel is launched with has a dense last axis. The launch is
    recorded with tensors that have no memory, so no GPU is needed."""
    if not HAS_TRITON:
        raise Unsupported("triton is not installed")
    shape, meta = stage.shape, torch.device("meta")
    size = (stage.config.batch_size, stage.config.seq_len)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    inputs = [torch.empty(*size, count, shape.head_dim, device=meta) for count in heads]
    with recorded("sm_90") as launches:
        attention(*inputs, dense=stage.parts.dense)
    strides = {
        name: tensor.stride(-1)
        for launch in launches
        for name, tensor in launch.arguments.items()
        if isinstance(tensor, torch.Tensor) and tensor.stride(-1) != 1
    }
    if not strides:
        return None
    text = ", ".join(f"{name}'s are {stride} apart" for name, stride in strides.items())
    return f"neighbours along the last axis are not adjacent in memory: {text}"


def phases_add_up(stage: StageStep) -> str | None:
    """The phases as reported sum to the time of a whole step from idle device to idle device."""
    if stage.device.type == "cpu":
        raise Unsupported("needs a GPU: a CPU works while it is called, so no clock can be early")
    return difference(sum(stage.phases().values()), stage.turn(5))


def difference(phases: float, step: float) -> str | None:
    """What is wrong with phases of these seconds in all, in a step of these seconds."""
    if abs(phases - step) <= TOLERANCE * step:
        return None
    return f"the phases are {phases * 1e3:.2f} ms in all, and the step is {step * 1e3:.2f} ms"


def products_by_blas(stage: StageStep) -> str | None:
    """SwiGLU's products go through torch, which has the BLAS library's: torch's counter of
    operations sees at least those of two products. No GPU is needed."""
    if not HAS_TRITON:
        raise Unsupported("triton is not installed")
    shape, config = stage.shape, stage.config
    tokens, width, wide = config.batch_size * config.seq_len, shape.hidden_dim, shape.ffn_dim
    sizes = ((config.batch_size, config.seq_len, width), (wide, width), (wide, width))
    inputs = [torch.empty(size, device="meta") for size in sizes]
    provider = OPS["swiglu"]["triton" if stage.parts.blas else "naive"]
    with recorded("sm_90") as launches, FlopCounterMode(display=False) as counter:
        provider.call(*inputs)
    expected, executed = 4 * tokens * width * wide, counter.get_total_flops()
    if executed >= expected:
        return None
    programs = max(math.prod(launch.grid) for launch in launches)
    return (
        f"torch computed {executed:,} of the products' {expected:,} operations: the others are in "
        f"a kernel of {programs:,} programs"
    )


def gradients(stage: StageStep) -> str | None:
    """Every parameter gets the gradient of the float64 reference, as before every timed step."""
    try:
        stage.verify()
    except AssertionError as error:
        return str(error)
    return None


CHECKS: dict[str, Callable[[StageStep], str | None]] = {
    "first loss": first_loss,
    "dense inputs": dense_inputs,
    "phases add up": phases_add_up,
    "products by BLAS": products_by_blas,
    "gradients": gradients,
}


class CheckedStage(StageStep):
    """A stage with the checks that find its fault."""

    def check(self, name: str) -> tuple[str, str]:
        """``passed``, ``failed`` or ``unsupported``, and what was seen."""
        try:
            problem = CHECKS[name](self)
        except Unsupported as reason:
            return "unsupported", str(reason)
        return ("failed", problem) if problem else ("passed", "")
