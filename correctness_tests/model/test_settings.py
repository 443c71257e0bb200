"""Settings of a model and of training: what follows from them, and every bound."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tinyllama.model.config import PRESETS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama

ODD = ModelConfig(
    hidden_dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=10, vocab_size=7
)


def model(**changes: Any) -> ModelConfig:
    return replace(ODD, **changes)


def train(**changes: Any) -> TrainConfig:
    return replace(TrainConfig(), **changes)


def test_sizes_follow_from_a_shape() -> None:
    assert PRESETS["small"].parameters == 31_977_984
    assert ODD.parameters == sum(p.numel() for p in TinyLlama(ODD).parameters()) == 7104
    # 6 for each parameter but the norms' and each token; 6 products of the 45 scores of 6 heads
    assert ODD.step_flops(5, 9) == 6 * (7104 - 7 * 24) * 45 + 6 * 2 * 3 * 5 * 6 * 4 * 45
    assert train(batch_size=3, accumulate=5).samples_per_step == 15


COUNT = "use a whole number from 1 to 2147483647"


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        *((model, {"num_layers": n}, COUNT) for n in (0, -1, 2**31, True, 2.0, "8", None)),
        *((train, {n: 0}, COUNT) for n in ("batch_size", "accumulate", "seq_len", "num_steps")),
        *((train, {"eps": n}, "use a number from 0 to 1e") for n in (-1e-30, math.nan, "1", True)),
        (train, {"learning_rate": math.nextafter(1e20, math.inf)}, "use a number from 0 to 1e"),
        (train, {"max_grad_norm": 0.0}, "use a number above 0, up to 1e"),
        (model, {"rope_theta": 0}, "use a number above 0, up to 1e"),
        *((train, {name: 1.0}, "use a number below 1") for name in ("beta1", "beta2")),
        *((train, {"seed": n}, "use a whole number from 0 to 2^63 - 1") for n in (-1, 2**63, 1.0)),
        (model, {"hidden_dim": 25}, "hidden_dim 25 does not divide by num_heads 6: change one"),
        (model, {"hidden_dim": 18}, "hidden_dim / num_heads is 3: rotary pairs need an even"),
        (model, {"num_kv_heads": 4}, "num_heads 6 does not divide by num_kv_heads 4: change one"),
        (train, {"precision": "fp8"}, "use one of fp32, tf32, bf16, fp16"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_out_of_bounds_is_refused_by_its_name(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert {*changes} <= {*re.findall(r"\w+", str(error.value))}
    assert message in str(error.value)


def test_the_ends_of_each_range_are_taken() -> None:
    model(num_layers=2147483647)
    train(learning_rate=1e20, eps=0, weight_decay=0, seed=2**63 - 1)
    train(beta1=0, beta2=math.nextafter(1, 0), max_grad_norm=1e-30, batch_size=1)
