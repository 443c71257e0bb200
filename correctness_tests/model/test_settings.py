"""Settings of a model and of training: the documented numbers, every bound, and what follows."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tinyllama.model.config import PRESETS, WORKLOADS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama

ODD = ModelConfig(
    hidden_dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=10, vocab_size=7
)


def model(**changes: Any) -> ModelConfig:
    return replace(ODD, **changes)


def train(**changes: Any) -> TrainConfig:
    return replace(TrainConfig(), **changes)


# -- the documented numbers --------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones() -> None:
    assert asdict(ModelConfig()) == {
        "hidden_dim": 512,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_dim": 2048,
        "vocab_size": 1000,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "init_std": 0.02,
    }
    assert asdict(TrainConfig()) == {
        "batch_size": 8,
        "accumulate": 1,
        "seq_len": 256,
        "num_steps": 50,
        "learning_rate": 3e-4,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": None,
        "precision": "fp32",
        "seed": 0,
    }


def test_the_workloads_are_the_documented_ones() -> None:
    """Width, layers, heads, their groups, the MLP's width; then batch and length."""
    shapes = {
        "tiny": (128, 2, 4, 2, 256, 4, 64),
        "small": (512, 8, 8, 4, 2048, 8, 128),
        "medium": (1024, 12, 16, 8, 4096, 16, 512),
        "large": (2048, 22, 32, 8, 5632, 4, 4096),
    }
    assert list(PRESETS) == list(WORKLOADS) == list(shapes)
    usual = asdict(ModelConfig())
    for name, workload in WORKLOADS.items():
        settings = asdict(workload.model)
        assert workload.model == PRESETS[name]
        assert (*list(settings.values())[:5], workload.batch_size, workload.seq_len) == shapes[name]
        for rest in ("vocab_size", "rope_theta", "norm_eps", "init_std"):
            assert settings[rest] == usual[rest]


# -- what follows from them --------------------------------------------------------------------


def test_sizes_follow_from_a_shape() -> None:
    assert ODD.head_dim == 4
    assert ODD.parameters == 3 * (2 * 24 * 8 * 4 + 3 * 24 * 10 + 48) + 7 * 24 + 24
    assert ODD.parameters == sum(p.numel() for p in TinyLlama(ODD).parameters())
    assert ODD.dims(5, 9) == {
        **{"B": 5, "T": 9, "N": 45, "D": 24, "H": 6, "G": 2, "K": 4, "C": 2},
        **{"Q": 24, "R": 8, "F": 10, "V": 7, "P": 7104, "L": 3},
    }
    # 6 for each parameter but the norms' and each token; 6 products of the 45 scores of 6 heads
    assert ODD.step_flops(5, 9) == 6 * (7104 - 7 * 24) * 45 + 6 * 2 * 3 * 5 * 6 * 4 * 45
    assert train(batch_size=3, accumulate=5).samples_per_step == 15


# -- bounds ------------------------------------------------------------------------------------

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
def test_a_value_that_cannot_be_is_refused_by_its_name(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**changes)
    assert {*changes} <= {*re.findall(r"\w+", str(refused.value))}
    assert message in str(refused.value)


def test_the_ends_of_each_range_can_be() -> None:
    assert model(num_layers=2147483647).num_layers == 2147483647
    assert train(learning_rate=1e20, eps=0, weight_decay=0).learning_rate == 1e20
    assert train(seed=2**63 - 1, beta1=0, beta2=math.nextafter(1, 0)).seed == 2**63 - 1
    assert train(max_grad_norm=1e-30, batch_size=1).max_grad_norm == 1e-30
