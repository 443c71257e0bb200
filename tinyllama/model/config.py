"""Shapes and settings, validated when they are made. Fields with a help text are options of the
command line (`tinyllama.cli.argument_types`)."""

from dataclasses import dataclass, field
from typing import Any

from tinyllama.harness.machine.errors import UsageError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
TIER_NAMES = ("v1", "v2", "v3", "v4")  # of `tinyllama.model.tiers.TIERS`
MEMORY = ("fast", "selective", "small")  # what a `StepPlan` may do with memory
PLANS = ("fused", "single")  # of the blocks of a tier that has them as one op
LARGEST = 2**31 - 1  # of a size or a count
# Of a real number: a step computes with it in float32, also divided by 1 - beta1.
LARGEST_NUMBER = 1e20


class ConfigError(UsageError):
    """A setting of a model or of a training run that cannot be used."""


def option(
    default: Any, help: str, metavar: str | None = None, choices: tuple[str, ...] | None = None
) -> Any:
    """A field that the command line has as an option."""
    metadata = {"help": help, "metavar": metavar, "choices": choices}
    return field(default=default, metadata=metadata)


def _number(config: Any, name: str, low: float, *, above: bool = False) -> None:
    value = getattr(config, name)
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= LARGEST_NUMBER or (above and value == low):
        bound = f"above {low:g}, up to" if above else f"from {low:g} to"
        raise ConfigError(f"{name} is {value!r:.80}: use a number {bound} {LARGEST_NUMBER:g}")


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise ConfigError(f"{name} is {value!r:.80}: use a whole number from 1 to {LARGEST}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Tiny LLaMA; the defaults are the documented ``small`` model.

    hidden_dim D, num_layers L, num_heads H, num_kv_heads G, ffn_dim F, vocab_size V;
    rope_theta and norm_eps as in LLaMA 2, init_std as documented.
    """

    hidden_dim: int = option(512, "width of the model", "D")
    num_layers: int = option(8, "transformer blocks", "L")
    num_heads: int = option(8, "query heads of a block", "H")
    num_kv_heads: int = option(4, "key and value heads; default half of --num-heads", "G")
    ffn_dim: int = option(2048, "width inside the MLP", "F")
    vocab_size: int = option(1000, "tokens", "V")
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _positive(
            self, "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"
        )
        _number(self, "rope_theta", 0, above=True)
        _number(self, "norm_eps", 0)
        _number(self, "init_std", 0)
        if self.hidden_dim % self.num_heads:
            raise ConfigError(
                f"hidden_dim {self.hidden_dim} does not divide by num_heads {self.num_heads}: "
                "change one of them"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"hidden_dim / num_heads is {self.head_dim}: rotary pairs need an even number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} does not divide by num_kv_heads "
                f"{self.num_kv_heads}: change one of them"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def parameters(self) -> int:
        """The number of parameters; the output projection is the embedding, counted once."""
        attention = 2 * self.hidden_dim * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden_dim * self.ffn_dim + 2 * self.hidden_dim
        return self.vocab_size * self.hidden_dim + self.num_layers * layer + self.hidden_dim

    def dims(self, batch_size: int, seq_len: int) -> dict[str, int]:
        """The sizes of a step by the letters of `tinyllama.ops`; P: the number of parameters."""
        q, r = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            **{"B": batch_size, "T": seq_len, "N": batch_size * seq_len, "D": self.hidden_dim},
            **{"H": self.num_heads, "G": self.num_kv_heads, "K": self.head_dim},
            **{"C": self.head_dim // 2, "Q": q, "R": r, "F": self.ffn_dim, "V": self.vocab_size},
            **{"P": self.parameters, "L": self.num_layers},
        }

    def step_flops(self, batch_size: int, seq_len: int) -> int:
        """Operations of one training step: 6 per parameter and token, and the attention.

        Of causal attention only the unmasked half is counted: T (T + 1) / 2 scores, with 2 products
        forward and 4 backward (without recomputation). Norms and activations are not counted, as
        usual (PaLM, arXiv 2204.02311, appendix B).
        """
        tokens = batch_size * seq_len
        width = self.num_heads * self.head_dim
        norms = (2 * self.num_layers + 1) * self.hidden_dim
        scores = self.num_layers * batch_size * width * seq_len * (seq_len + 1)
        return 6 * (self.parameters - norms) * tokens + 6 * scores


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(hidden_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=256),
    "small": ModelConfig(),
    "medium": ModelConfig(
        hidden_dim=1024, num_layers=12, num_heads=16, num_kv_heads=8, ffn_dim=4096
    ),
    "large": ModelConfig(
        hidden_dim=2048, num_layers=22, num_heads=32, num_kv_heads=8, ffn_dim=5632
    ),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batch it is trained on, as the published course and the bars name them."""

    model: ModelConfig
    batch_size: int
    seq_len: int


WORKLOADS: dict[str, Workload] = {
    "tiny": Workload(model=PRESETS["tiny"], batch_size=4, seq_len=64),
    "small": Workload(model=PRESETS["small"], batch_size=8, seq_len=128),
    "medium": Workload(model=PRESETS["medium"], batch_size=16, seq_len=512),
    "large": Workload(model=PRESETS["large"], batch_size=4, seq_len=4096),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; the defaults are the published course's.

    learning_rate, betas, eps, weight_decay are AdamW's; ``precision`` is one of
    `PRECISIONS`: fp32 (IEEE products), tf32, or bf16 and fp16 autocast with fp32 weights.
    accumulate: micro-batches of ``batch_size`` samples in a step, whose loss is their mean.
    max_grad_norm: gradients whose norm over all parameters is larger are scaled down to it.
    reduce_in: the format in which gradients are summed over ranks, fp32 or bf16; bf16 halves what
    is sent, and rounds each gradient twice.
    """

    batch_size: int = option(8, "sequences in a micro-batch", "B")
    accumulate: int = option(1, "micro-batches in a step; the loss is their mean", "A")
    seq_len: int = option(256, "tokens in a sequence", "T")
    num_steps: int = option(50, "steps; with --resume they are added to those done", "N")
    learning_rate: float = option(3e-4, "of AdamW", "LR")
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = option(
        None, "scale gradients down to this norm over all parameters, or none", "NORM"
    )
    precision: str = option("fp32", "of matrix products", choices=PRECISIONS)
    reduce_in: str = option(
        "fp32", "format of gradients while ranks sum them", choices=("fp32", "bf16")
    )
    seed: int = option(0, "of weights and data", "N")

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "accumulate", "seq_len", "num_steps")
        for name in ("learning_rate", "eps", "weight_decay", "beta1", "beta2"):
            _number(self, name, 0)
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: use a number below 1")
        if self.max_grad_norm is not None:
            _number(self, "max_grad_norm", 0, above=True)
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision {self.precision!r} is unknown: use one of {', '.join(PRECISIONS)}"
            )
        if self.reduce_in not in ("fp32", "bf16"):
            raise ConfigError(f"reduce_in {self.reduce_in!r} is unknown: use fp32 or bf16")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r:.80}: use a whole number from 0 to 2^63 - 1")

    @property
    def samples_per_step(self) -> int:
        """Sequences that a step trains on, over all its micro-batches."""
        return self.batch_size * self.accumulate
