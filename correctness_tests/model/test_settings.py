"""Settings of a model and of training: the documented numbers, every bound, and what follows."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from tinyllama.model.config import PRESETS, WORKLOADS, ConfigError, ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama

ODD = ModelConfig(
    hidden_dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=10, vocab_size=7
)
LARGEST, LARGEST_NUMBER = 2147483647, 1e20


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

WHOLE = {
    model: ("hidden_dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"),
    train: ("batch_size", "accumulate", "seq_len", "num_steps"),
}
# Whether 0 is refused.
REAL = {
    model: {"rope_theta": True, "norm_eps": False, "init_std": False},
    train: {
        **dict.fromkeys(("learning_rate", "eps", "weight_decay", "beta1", "beta2"), False),
        "max_grad_norm": True,
    },
}


def refused(make: Any, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "name"), [(make, name) for make, names in WHOLE.items() for name in names]
)
def test_a_count_is_a_whole_number(make: Any, name: str) -> None:
    for value in (0, -1, 2**31, True, 2.0, "8", None):
        message = f"{name} is {value!r}: use a whole number from 1 to 2147483647"
        assert refused(make, **{name: value}) == message
    if name not in ("hidden_dim", "num_heads", "num_kv_heads"):  # which must divide each other
        for value in (1, LARGEST):
            assert getattr(make(**{name: value}), name) == value


def test_what_is_refused_is_said_in_a_few_words() -> None:
    assert refused(train, batch_size="x" * 500) == (
        f"batch_size is '{'x' * 79}: use a whole number from 1 to 2147483647"
    )
    assert refused(train, eps="x" * 500) == f"eps is '{'x' * 79}: use a number from 0 to 1e+20"
    assert refused(train, seed="x" * 500) == (
        f"seed is '{'x' * 79}: use a whole number from 0 to 2^63 - 1"
    )


@pytest.mark.parametrize(
    ("make", "name", "above"),
    [(make, name, above) for make, names in REAL.items() for name, above in names.items()],
)
def test_a_real_number_has_bounds(make: Any, name: str, above: bool) -> None:
    bound = "above 0, up to" if above else "from 0 to"
    wrong = [-1e-30, math.nan, math.inf, -math.inf, True, "1", math.nextafter(1e20, math.inf)]
    for value in [*wrong, *([0, 0.0] if above else [])]:
        message = f"{name} is {value!r}: use a number {bound} 1e+20"
        assert refused(make, **{name: value}) == message
    fine = [1e-30, 0.5] + ([] if above else [0, 0.0])
    for value in [*fine, *([] if name.startswith("beta") else [1, LARGEST_NUMBER])]:
        assert getattr(make(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_beta_is_below_one(name: str) -> None:
    for value in (1, 1.0, 1.5):
        assert refused(train, **{name: value}) == f"{name} is {value!r}: use a number below 1"
    assert getattr(train(**{name: math.nextafter(1, 0)}), name) < 1


def test_sizes_divide_each_other() -> None:
    assert refused(model, hidden_dim=25) == (
        "hidden_dim 25 does not divide by num_heads 6: change one of them"
    )
    assert refused(model, hidden_dim=18) == (
        "hidden_dim / num_heads is 3: rotary pairs need an even number"
    )
    assert refused(model, num_kv_heads=4) == (
        "num_heads 6 does not divide by num_kv_heads 4: change one of them"
    )
    for heads in (1, 2, 3, 4, 6, 12):
        assert model(num_heads=heads, num_kv_heads=1).head_dim == 24 // heads
    for groups in (1, 2, 3, 6):
        assert model(num_kv_heads=groups).num_kv_heads == groups


def test_a_precision_is_one_of_four() -> None:
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        assert train(precision=precision).precision == precision
    assert refused(train, precision="fp8") == (
        "precision 'fp8' is unknown: use one of fp32, tf32, bf16, fp16"
    )


def test_a_seed_has_63_bits() -> None:
    for seed in (0, 1, 2**63 - 1):
        assert train(seed=seed).seed == seed
    for wrong in (-1, 2**63, True, 1.0, None):
        message = f"seed is {wrong!r}: use a whole number from 0 to 2^63 - 1"
        assert refused(train, seed=wrong) == message
    assert train(max_grad_norm=None).max_grad_norm is None
