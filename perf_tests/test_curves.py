"""Loss curves on real text: V3 follows V1 for a thousand steps, as closely as rounding allows.

What rounding alone does is measured in the same run: V1 in this precision against V1 in float64,
from the same weights on the same batches. Random tokens would show nothing: their loss stays at
ln(V) whether or not the model learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllama.model.config import WORKLOADS, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V1, V3
from tinyllama.training.data import TextBytes
from tinyllama.training.step import TrainStep, products

GROUP, WORKLOAD, STEPS, WINDOW, EVERY = "curves-small", "small", 1000, 50, 10
TEXT = Path(__file__).resolve().parent.parent / "docs"
CLOSENESS = 2.0  # times the distance that rounding makes
RUNS = (("v1", "fp64"), ("v1", "fp32"), ("v3", "fp32"), ("v1", "bf16"), ("v3", "bf16"))


def groups(device: torch.device) -> list[str]:
    """The curves of a device."""
    return [] if _not_here(device) else [GROUP]


def _not_here(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "a thousand steps of interpreted kernels take hours; curves are drawn on a GPU"
    return V3.cannot_run(device)


@pytest.fixture(scope="module", params=[GROUP])
def group(recording: Any, device: torch.device) -> Iterator[dict[tuple[str, str], torch.Tensor]]:
    """The smoothed loss of each run, float64 on the CPU."""
    reason = _not_here(device)
    if reason:
        pytest.skip(reason)
    with recording.group(GROUP) as record:
        found = {run: _smoothed(_losses(*run, device)) for run in RUNS}
        for (tier, precision), curve in found.items():
            record.add(
                f"curve/{WORKLOAD}/{tier}-{precision}",
                "curve",
                workload=WORKLOAD,
                contender=tier,
                precision=precision,
                steps=STEPS,
                window=WINDOW,
                every=EVERY,
                losses=[round(loss, 6) for loss in curve[::EVERY].tolist()],
            )
        yield found


def _losses(tier: str, precision: str, device: torch.device) -> torch.Tensor:
    """The loss of every step of a run (STEPS), float64 on the CPU."""
    shape = WORKLOADS[WORKLOAD]
    config = TrainConfig(
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        precision="fp32" if precision == "fp64" else precision,
    )
    batches = TextBytes(TEXT, shape.model.vocab_size, config)
    with products(config.precision, device):
        model = TinyLlama(shape.model, tier).to(device)
        if precision == "fp64":
            model = model.double()
        step = TrainStep(model, config)
        step.prepare()
        losses = [step(*batches.batch(n)).detach().double().clone() for n in range(STEPS)]
    return torch.stack(losses).cpu()


def _smoothed(losses: torch.Tensor) -> torch.Tensor:
    """The mean over each window of steps."""
    return losses.unfold(0, WINDOW, 1).mean(-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_v3_follows_v1(group: dict[tuple[str, str], torch.Tensor], precision: str) -> None:
    exact, own, ours = (
        group[run] for run in (("v1", "fp64"), ("v1", precision), ("v3", precision))
    )
    assert own[0] - own[-1] > 1, "V1 does not learn the text"
    rounding = (own - exact).abs().max().item()
    distance = (ours - own).abs().max().item()
    assert distance <= CLOSENESS * rounding, (
        f"V3 is {distance:.3g} from {V1.title} in {precision}; rounding alone makes {rounding:.3g}"
    )
