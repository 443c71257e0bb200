"""A user's model with our ops put in: Hugging Face's Llama with our norm, SwiGLU and loss.

Losses and gradients are those of the same model without ours: no further from the float64 model
than three times what the plain one is, in every way that such a model is run.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from correctness_tests.support.posed import Posed
from tinyllama.bench.peers.hugging_face import hugging_face_llama
from tinyllama.bench.peers.with_ours import loss_with, with_ours
from tinyllama.harness.kernels.launch_cache import as_written
from tinyllama.model.config import ModelConfig

pytest.importorskip("transformers", reason="extra 'peers' is not installed")
pytest.importorskip("triton")
pytestmark = pytest.mark.peers

SHAPE = ModelConfig(
    hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=53
)
TIMES = 3  # the plain model's own error, at most


def plain_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits.flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets.flatten())


@cache
def initial() -> Any:
    """A model whose norms' weights are not all one."""
    torch.manual_seed(0)
    model = hugging_face_llama(SHAPE, "sdpa").train()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randint(SHAPE.vocab_size, (2, 10), generator=generator)
    return both[:, :-1], both[:, 1:].contiguous()


@dataclass
class Way:
    """How a model is run."""

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    checkpoints: dict[str, Any] | None = None  # as Hugging Face's gradient_checkpointing_kwargs
    backend: str = ""  # of torch.compile
    inference: bool = False


@dataclass
class Found:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


@contextlib.contextmanager
def in_the_way(way: Way, device: torch.device) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way.autocast is not None:
            stack.enter_context(torch.autocast(device.type, way.autocast))
        if way.inference:
            stack.enter_context(torch.inference_mode())
        yield


def run(
    kind: str, way: Way, device: torch.device, steps: int = 1, dtype: torch.dtype | None = None
) -> Found:
    """The loss and the gradients of the last of some equal steps. kind: plain or ours."""
    model = copy.deepcopy(initial()).to(device, dtype or way.dtype)
    loss_of = plain_loss if kind == "plain" else loss_with
    model = model if kind == "plain" else with_ours(model)
    if way.checkpoints is not None:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)(way.checkpoints)
    if way.backend:
        torch._dynamo.reset()
        loss_of = torch.compile(loss_of, backend=way.backend)
    tokens, targets = (half.to(device) for half in windows())
    for _ in range(steps):
        model.zero_grad()
        with in_the_way(way, device):
            loss = loss_of(model, tokens, targets)
        if not way.inference:
            loss.backward()
    gradients = {} if way.inference else {n: p.grad for n, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values()), "a gradient is missing"
    return Found(loss.detach(), gradients)


def assert_as_plain(ours: Found, plain: Found, exact: Found) -> None:
    """As near to float64 as the plain model, by each parameter's gradient.

    The allowance is the plain gradient's own error, and at least that share of the gradient that
    all gradients together are off by.
    """

    def off(gradient: torch.Tensor, name: str) -> float:
        return float((gradient.double() - exact.gradients[name]).norm())

    sizes = {name: float(gradient.norm()) for name, gradient in exact.gradients.items()}
    errors = {name: off(gradient, name) for name, gradient in plain.gradients.items()}
    share = math.hypot(*errors.values()) / math.hypot(*sizes.values())
    for name, gradient in ours.gradients.items():
        allowed = TIMES * max(errors[name], share * sizes[name])
        assert allowed < sizes[name] / 2, f"{name}: a gradient of zero would pass"
        assert off(gradient, name) <= allowed, name
    # A loss can be right by chance: a rounding of the plain model's is allowed in any case.
    rounding = torch.finfo(torch.float32).eps * float(exact.loss)
    spread = max(abs(float(plain.loss) - float(exact.loss)), share * float(exact.loss), rounding)
    assert abs(float(ours.loss) - float(exact.loss)) <= TIMES * spread


SLOW = partial(pytest.param, marks=pytest.mark.slow("as the others, with one choice changed"))
BF16, FP16 = torch.bfloat16, torch.float16
WAYS = [
    pytest.param(Way(), id="eager"),
    pytest.param(Way(autocast=BF16), id="autocast"),
    pytest.param(Way(dtype=BF16), id="16-bit"),
    pytest.param(Way(autocast=BF16, checkpoints={"use_reentrant": False}), id="checkpoints"),
    pytest.param(Way(inference=True), id="inference"),
    pytest.param(Way(backend="aot_eager"), id="compiled"),
    SLOW(Way(autocast=FP16), id="autocast-float16"),
    SLOW(Way(checkpoints={"use_reentrant": True}), id="reentrant-checkpoints"),
    SLOW(Way(autocast=BF16, backend="aot_eager"), id="compiled-autocast"),
    SLOW(Way(backend="aot_eager", checkpoints={"use_reentrant": False}), id="compiled-checkpoints"),
    SLOW(Way(backend="inductor"), id="inductor"),
]


def check(way: Way, device: torch.device, steps: int = 1) -> None:
    exact = run("plain", Way(inference=way.inference), device, dtype=torch.float64)
    ours, plain = run("ours", way, device, steps), run("plain", replace(way, backend=""), device)
    if way.inference:
        unit = torch.finfo(way.dtype).eps
        torch.testing.assert_close(ours.loss.double(), exact.loss, rtol=4 * unit, atol=0)
    else:
        assert_as_plain(ours, plain, exact)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_model_with_our_ops_computes_what_plain_one_does(way: Way, device: torch.device) -> None:
    check(way, device, steps=1 if device.type == "cpu" else 5)  # on a GPU the last ones by plans


def test_second_gpu_computes_same(device: torch.device) -> None:
    """While the first one is the current one."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(Way(autocast=BF16), torch.device("cuda", 1), steps=5)


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(Way(), id="eager"),
        SLOW(Way(autocast=BF16), id="autocast"),
        SLOW(Way(checkpoints={"use_reentrant": False}), id="checkpoints"),
    ],
)
def test_steps_by_plans_give_the_bits_of_the_code(way: Way, posed: Posed) -> None:
    cpu = torch.device("cpu")
    with as_written():
        expected = run("ours", way, cpu)
    assert posed.plans == []
    replayed = run("ours", way, cpu, steps=4)
    assert posed.plans
    assert {plan.reason for plan in posed.plans} == {""}
    assert torch.equal(replayed.loss, expected.loss)
    for name, gradient in replayed.gradients.items():
        assert torch.equal(gradient, expected.gradients[name]), name
