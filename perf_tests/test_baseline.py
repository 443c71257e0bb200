"""V1 is an honest baseline: at most 1.10 times as slow as Hugging Face's Llama.

The same shape, attention ("eager"), optimizer and precision, in one run, in turn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from correctness_tests.peers import hugging_face_llama
from perf_tests.workloads import ALL, DEVICE, ROUNDS, Group, Stepper, measured
from tinyllama.config import WORKLOADS
from tinyllama.harness.clock import interleaved, ratio

BAR = 1.10


class HuggingFaceStep:
    """A training step of `LlamaForCausalLM` as its users write it."""

    def __init__(self, group: Group, batches: torch.Tensor) -> None:
        shape = WORKLOADS[group.workload].model
        self.model = hugging_face_llama(shape).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.batches = batches
        self.autocast = group.precision == "bf16"
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        batch = self.batches[self.calls % len(self.batches)]
        self.calls += 1
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten()
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.peers
@pytest.mark.parametrize("group", ALL, ids=str)
def test_v1_is_no_straw_man(group: Group, record: Any) -> None:
    pytest.importorskip("transformers", reason="extra 'peers' is not installed")
    with measured(group):
        ours = Stepper(group, "v1")
        theirs = HuggingFaceStep(group, ours.batches)
        for step in (ours, theirs):
            assert step().isfinite()
            step()
        seconds = interleaved({"v1": ours, "hf": theirs}, DEVICE, ROUNDS[group.workload])
    times = ratio(seconds["v1"], seconds["hf"])
    record(
        f"honest/{group}",
        workload=group.workload,
        precision=group.precision,
        v1_over_hf_eager=[times.median, times.low, times.high],
    )
    assert times.median <= BAR, f"V1 takes {times} times as long as Hugging Face's Llama"
