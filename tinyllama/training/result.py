"""The result of a training run, as data."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.training.diagnose import Diagnosis
from tinyllama.training.memory import Memory

COMPLETED, INTERRUPTED, FAILED = "completed", "interrupted", "failed"


@dataclass(kw_only=True)
class Result:
    """A run, whole or stopped; `tinyllama.training.train.train` fills it in as it goes.

    status: ``completed``; ``interrupted`` by Ctrl-C; or ``failed``. reason: why not completed.
    model, train: the settings; parameters: how many numbers the model has.
    tier, plan: what ran; left_out: parts of the tier's plan that could not run, and why.
    ranks: processes that shared the batch; in_shards: they shared the parameters too (FSDP2).
        Seconds, memory and diagnoses are those of the first rank.
    start: steps done before this run, by those that it resumed from.
    losses: one for each step of this run, before its update; step_seconds likewise, of the
        whole step (on a GPU, the device's time).
    gradient_norms: likewise where ``max_grad_norm`` is set, before clipping; None in a step of
        fp16 whose gradients overflowed, which its scaler skipped. Empty elsewhere.
    phase_seconds: of one step's forward, backward and optimizer, each run by itself.
    gradients: by parameter, whether a finite gradient that is not all zero arrived in the
        first step; lost: by parameter, why not. Both are empty if the run ended earlier.
    """

    status: str = COMPLETED
    reason: str | None = None
    model: ModelConfig
    parameters: int
    train: TrainConfig
    tier: str
    plan: str
    left_out: Mapping[str, str]
    ranks: int = 1
    in_shards: bool = False
    batches: Mapping[str, Any]
    start: int
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float | None] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Memory = field(init=False)
    gradients: Mapping[str, bool] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    device: str
    versions: Mapping[str, str]

    @property
    def samples_per_second(self) -> float | None:
        """Sequences a second, from the median step; None without a step."""
        if not self.step_seconds:
            return None
        return self.train.samples_per_step / statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        samples = self.samples_per_second
        return None if samples is None else samples * self.train.seq_len

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the speeds are included, and no number is infinite or NaN."""
        return {
            **asdict(self),
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
        }
