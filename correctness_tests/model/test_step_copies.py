"""A step of V3 copies what is written down here, and nothing else.

A kernel's boundary counts what it copies, and there it is nothing: parameters lie side by side,
kernels take strides. Copies by torch's own operators are observed one by one, so that a stray
``contiguous()`` anywhere in a provider is found.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tinyllama.harness.kernels import interpreter, layout
from tinyllama.harness.kernels import precision as precision_file
from tinyllama.harness.kernels.addresses import Tables
from tinyllama.model.config import ModelConfig, TrainConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V3, StepPlan, Tier
from tinyllama.ops import OPS
from tinyllama.ops.adamw import kernels as adamw_kernels
from tinyllama.training.step import TrainStep, products

SHAPE = ModelConfig(
    hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48, vocab_size=101
)
SETTINGS = {"batch_size": 2, "seq_len": 5}
AT_BOUNDARIES = 0  # what kernels' boundaries copy in a step (`tinyllama.harness.kernels.layout`)

aten = torch.ops.aten
COPYING = {
    aten._to_copy.default,
    aten.clone.default,
    aten.copy_.default,
    aten.cat.default,
    aten.stack.default,
    aten.repeat.default,
    aten._foreach_copy_.default,
}
FP32, BF16, INT64 = torch.float32, torch.bfloat16, torch.int64

Copy = tuple[str, torch.dtype, torch.dtype, tuple[int, ...]]  # operator, from, to, shape


def casts_of_bf16(device: torch.device) -> Counter[Copy]:
    """What autocast to 16 bits copies: weights for the products, gradients on the way back."""
    D, F, V = SHAPE.hidden_dim, SHAPE.ffn_dim, SHAPE.vocab_size
    Q, R = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
    rows, matrices = SETTINGS["batch_size"] * SETTINGS["seq_len"], D * (2 * Q + 2 * R + 3 * F)
    cast: Counter[Copy] = Counter()
    cast["_to_copy", FP32, BF16, (matrices,)] += SHAPE.num_layers  # a block's matrices, as one
    cast["_to_copy", FP32, BF16, (rows, D)] += SHAPE.num_layers  # the residual's gradient
    cast["_to_copy", FP32, BF16, (V, D)] += 1  # the embedding, as output projection
    if device.type == "cpu" or not precision_file._mixed_products(device):
        cast["copy_", BF16, FP32, (V, D)] += 1  # its gradient
        for shape in ((D, F), (2 * F, D), (D, Q), (Q + 2 * R, D)):  # gradients of a block's
            cast["_to_copy", BF16, FP32, shape] += SHAPE.num_layers
    return cast


def expected(precision: str, device: torch.device) -> Counter[Copy]:
    """Every copy of a step."""
    parameters = 2 + 9 * SHAPE.num_layers
    tables = (6, adamw_kernels.next_power_of_2(parameters))
    copies: Counter[Copy] = Counter()
    copies["copy_", INT64, INT64, (2, *SETTINGS.values())] += 1  # tokens and targets
    copies["copy_", torch.bool, FP32, ()] += 1  # whether the loss was finite
    copies["copy_", INT64, INT64, (6, parameters)] += 1  # AdamW's addresses, where they are new
    copies["copy_", INT64, INT64, tables] += 1  # and to the device
    return copies + casts_of_bf16(device) if precision == "bf16" else copies


class Copies(TorchDispatchMode):
    """Counts the copies by torch's operators, those of the kernels' interpreter left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Copy] = Counter()
        self.interpreting = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COPYING and not self.interpreting:
            source = args[1] if func is aten.copy_.default else args[0]
            first = source if isinstance(source, torch.Tensor) else source[0]
            into = result if isinstance(result, torch.Tensor) else args[0][0]
            name = func.overloadpacket.__name__
            self.found[name, first.dtype, into.dtype, tuple(into.shape)] += 1
        return result


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Not active yet; AdamW's table of addresses is then new in every step."""
    seen, run = Copies(), interpreter.run

    def unseen(*args: Any) -> None:
        seen.interpreting = True
        try:
            run(*args)
        finally:
            seen.interpreting = False

    monkeypatch.setattr(interpreter, "run", unseen)
    return seen


def prepared(tier: Tier, precision: str, device: torch.device, apart: bool = False) -> TrainStep:
    """A step after its preparation; ``apart``: a matrix does not lie beside the others."""
    model = TinyLlama(SHAPE, tier).to(device)
    if apart:
        matrix = model.layers[0].w_k
        assert isinstance(matrix, torch.Tensor)
        matrix.data = matrix.data.clone()
    step = TrainStep(model, TrainConfig(**SETTINGS, precision=precision), StepPlan())
    step.prepare(warm_up=1)
    return step


def counted(
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    device: torch.device,
    **how: Any,
) -> tuple[int, Counter[Copy]]:
    """Copies of one training step: at kernels' boundaries, and by torch's operators."""
    tier = how.pop("tier", V3)
    shape = (SETTINGS["batch_size"], SETTINGS["seq_len"] + 1)
    tokens = torch.arange(shape[0] * shape[1]).view(shape).to(device)
    with products(precision, device):
        step = prepared(tier, precision, device, **how)
        monkeypatch.setattr(adamw_kernels, "TABLES", Tables())
        before = layout.copies
        with copies:
            step(tokens)
    assert all(parameter.grad is not None for parameter in step.model.parameters())
    return layout.copies - before, copies.found


def difference(found: Counter[Copy], declared: Counter[Copy]) -> str:
    return f"not declared: {dict(found - declared)}; did not happen: {dict(declared - found)}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_copies_what_is_declared(
    precision: str, copies: Copies, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    at_boundaries, found = counted(copies, monkeypatch, precision, device)
    assert at_boundaries == AT_BOUNDARIES
    declared = expected(precision, device)
    assert found == declared, difference(found, declared)


@pytest.mark.parametrize(("precision", "times"), [("fp32", 2), ("bf16", 1)])
def test_parameters_that_lie_apart_are_copied_and_counted(
    precision: str,
    times: int,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Forward and backward; where they are cast to 16 bits anyway, once before that."""
    at_boundaries, found = counted(copies, monkeypatch, precision, device, apart=True)
    assert at_boundaries == AT_BOUNDARIES + times
    more = found - expected(precision, device)
    assert more.total() == times, more
    assert {operator for operator, *_ in more} == {"cat"}


def test_a_stray_copy_in_a_provider_is_found(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of the model's last norm, which its boundary does not count."""
    provider = OPS["rms_norm"]["triton"]

    def untidy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return provider.call(x.transpose(1, 2).contiguous().transpose(1, 2), weight, eps=eps)

    monkeypatch.setitem(OPS["rms_norm"].providers, "untidy", replace(provider, call=untidy))
    tier = replace(V3, table={**V3.table, "rms_norm": "untidy"})
    at_boundaries, found = counted(copies, monkeypatch, "fp32", device, tier=tier)
    more = found - expected("fp32", device)
    assert {operator for operator, *_ in more} == {"clone"}
    assert at_boundaries > AT_BOUNDARIES, "the kernel copies it back"
