"""Plans of `stack`: which products are kernels of ours, and which the vendor's BLAS."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.stacks import (
    EPS,
    LAYERS,
    forced,
    gradients,
    inputs,
    plans_forgotten,  # noqa: F401 (a fixture)
)
from tinyllama.cli import main
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.kernels.configs import SPACES, Config, asked
from tinyllama.harness.kernels.launch import recorded
from tinyllama.model.config import WORKLOADS, ConfigError, ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import V4
from tinyllama.ops.attention import attend_backward
from tinyllama.ops.stack import Inputs, configs, fused, passes, provider_of, stack, weights
from tinyllama.ops.stack.configs import FEW, PRODUCTS, pays
from tinyllama.suites.accuracy import assert_accurate

MIX = "out+down+attention_gradient"  # the one that was measured to win for many rows
PLANS = [
    *("all", "none", MIX, "qkv+mlp_gradient", "gate_up+hidden_gradient"),
    *(f"{left_out} left out" for left_out in PRODUCTS),
]
KERNELS = {
    "qkv": "qkv_kernel",
    "gate_up": "gate_up_kernel",
    "hidden_gradient": "hidden_gradient_kernel",
    "out_gradient": "product_kernel",
    "weight_gradients": "weight_gradients_kernel",
}


def plan_of(name: str) -> str:
    return (
        "+".join(one for one in PRODUCTS if f"{one} left" not in name) if "left" in name else name
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_as_accurate_as_eager(
    name: str, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Three blocks, so that one hands its norm to a block and takes that of another."""
    provider = stack[provider_of(plan_of(name))]
    case = next(case for case in stack.cases if case.dims["L"] == 3)
    assert_accurate(OpCase(stack, provider, case, dtype), device, seed)


def vendors(given: Inputs, *names: str) -> AbstractContextManager[None]:
    """These products are the vendor's by their tables."""
    vendor = Config(BM=0, BN=0, BK=0, GROUP=8, DESCRIBED=0)
    return forced(lambda: gradients(given), {f"stack.{name}": vendor for name in names}.get)


def kernels_of(call: Callable[[], object]) -> list[str]:
    with recorded("gfx942") as launches:
        call()
    return [launch.identity for launch in launches]


@pytest.mark.parametrize("name", KERNELS)
def test_the_table_chooses_for_each_product(name: str) -> None:
    """A product that is the vendor's there is no launch of ours; a plan by name has none the less
    all that it names, in the default tiles, and nothing else."""
    cpu = inputs(16, 2, 1, 64, torch.device("cpu"))
    given, kernel = Inputs._make(tensor.to("meta") for tensor in cpu), f"stack.{KERNELS[name]}"
    with recorded("gfx942"), vendors(given, name):
        assert kernel not in kernels_of(lambda: gradients(given))
        assert kernel in kernels_of(lambda: gradients(given, provider_of(name)))
    assert kernel in kernels_of(lambda: gradients(given))
    others = {f"stack.{other}" for other in KERNELS.values()} - {kernel}
    assert not others & set(kernels_of(lambda: gradients(given, provider_of(name))))


def test_by_the_table_or_by_name_it_is_the_same_plan(device: torch.device) -> None:
    given = inputs(9, 2, 1, 32, device)
    with vendors(given, *(name for name in PRODUCTS if name not in MIX.split("+"))):
        by_table = gradients(given)
    by_name = gradients(given, provider_of(MIX))
    assert all(map(torch.equal, by_table, by_name))
    assert not all(map(torch.equal, by_table, gradients(given)))


@pytest.mark.parametrize("turn", [0, 2])
def test_both_passes_ask_for_a_product_by_one_key(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wide parameters under autocast, too: what one pass folds into a product that it takes
    for ours, the other one would not expect behind the vendor's."""
    monkeypatch.setattr(fused.InSeveral, "turns", lambda x, dtype: turn)
    monkeypatch.setattr(configs, "MOST_KEPT", 0)  # whether h is kept is asked by the same key
    cpu = torch.device("cpu")
    given = Inputs._make(tensor.float() for tensor in inputs(9, 2, 1, 32, cpu))
    with asked() as keys, torch.autocast("cpu", torch.bfloat16, enabled=not turn):
        gradients(given)
    kinds = {space: key["kind"] for (space, _), key in keys.items() if "columns" in key}
    assert kinds == dict.fromkeys(kinds, "fp32" if turn else "16bit")
    assert sorted(space for space, _ in keys if space in kinds) == sorted(
        f"stack.{name}" for name in PRODUCTS
    )


def test_sums_of_a_16_bit_stack_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    backward = fused.InSeveral.backward

    def noted(self: fused.InSeveral, index: int, block: passes.Backward) -> None:
        seen.update(one.dtype for one in (*block.gains, block.per_head, block.rstd))
        backward(self, index, block)

    monkeypatch.setattr(fused.InSeveral, "backward", noted)
    gradients(inputs(9, 2, 1, 32, torch.device("cpu")))
    assert seen == {torch.float32}


@pytest.mark.parametrize("strides", [[7] * 7, [9] * 7, [7] * 6 + [9]], ids=str)
def test_blocks_are_one_memory_where_all_matrices_lie_equally_far_apart(strides: list[int]) -> None:
    """Those of the first block lie side by side here in any case."""
    memory = torch.arange(20.0)
    each = [memory.as_strided((2, 1, 1), (far, 1, 1), at) for at, far in enumerate(strides)]
    whole = weights._whole(each)
    if strides[0] == strides[-1]:
        assert whole is not None
        assert torch.equal(whole, memory[: 2 * strides[0]].view(2, -1)[:, :7])
    else:
        assert whole is None


def test_with_many_rows_h_is_computed_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel of ours is behind the vendor's product, and nothing else changes: it takes the
    memory of one block."""
    saved = Mock(wraps=passes.backward)
    monkeypatch.setattr(passes, "backward", saved)
    given, sizes = inputs(16, 2, 1, 64, device), {}
    kept: dict[str, list[torch.Tensor]] = {}
    for most in (3 * 16, 3 * 16 - 1):  # the rows of these inputs
        monkeypatch.setattr(configs, "MOST_KEPT", most)
        for plan in ("none", "hidden_gradient"):
            found = gradients(given, provider_of(plan))
            h = saved.call_args.args[2]["h"]
            sizes[plan, most] = h.untyped_storage().nbytes() / h[0].nbytes
            assert all(map(torch.equal, found, kept.setdefault(plan, found)))
    assert sizes == {
        ("none", 48): LAYERS,
        ("hidden_gradient", 48): LAYERS,
        ("none", 47): 1,
        ("hidden_gradient", 47): LAYERS,
    }


def test_a_compiled_call_saves_what_is_declared(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither transposes nor one h for all blocks: the compiler reads memory by declared shapes."""
    monkeypatch.setattr(configs, "MOST_KEPT", 0)
    monkeypatch.setattr(fused.InSeveral, "turns", lambda x, dtype: 2)
    given = [t.float() if t.is_floating_point() else t for t in inputs(16, 2, 1, 64, device)]
    custom = stack[provider_of("none")].derived
    assert custom is not None
    run: Any = custom.custom_op
    found, told = run(*given, EPS), custom.fake_forward(*given, EPS)
    for name, one, other in zip(("y", *custom.saved), found, told, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride()), name


def test_a_sum_and_the_norm_behind_it_are_one_launch() -> None:
    """Of the vendor's products, as in V3."""
    cpu = inputs(16, 2, 1, 64, torch.device("cpu"))
    given = Inputs._make(tensor.to("meta") for tensor in cpu)
    with recorded("gfx942") as launches:
        stack[provider_of("none")].call(*given, eps=EPS)
    norms = [launch for launch in launches if launch.identity == "stack.fold_kernel"]
    assert len(norms) == 2 * given.w_q.shape[0]  # the first norm, and one behind each sum but one


@pytest.mark.parametrize("plan", ["none", "attention_gradient", "qkv", "all"])
def test_attention_sums_only_what_is_read(
    plan: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are scaled by rstd for a product of ours ahead, and the heads' sums are for a product of
    ours behind; between two products of the vendor neither costs anything."""
    watched = Mock(wraps=attend_backward)
    monkeypatch.setattr(fused, "attend_backward", watched)
    gradients(inputs(16, 2, 1, 64, device), provider_of(plan))
    seen = [call.kwargs["scaled"] for call in watched.call_args_list]
    assert seen
    assert all((scaled is None) == (plan == "none") for scaled in seen)
    if plan == "attention_gradient":
        assert all(scaled[0].eq(1).all() for scaled in seen)


# -- names ----------------------------------------------------------------------------------------


def test_a_plan_is_one_provider_however_it_is_written() -> None:
    assert provider_of("fused") == "fused"
    assert provider_of("down+out") == provider_of("out+down") == "out_and_down"
    assert stack[provider_of("down+out")] is stack["out_and_down"]
    assert V4.with_plan("down+out").table["stack"] == "out_and_down"
    with pytest.raises(ValueError, match=r"plan 'out\+dwon' .* of qkv, .* \(not 'dwon'\)"):
        provider_of("out+dwon")
    with pytest.raises(ConfigError, match="plan '' does not exist"):
        V4.with_plan("")


def test_a_plan_by_name_is_used_for_many_rows_too() -> None:
    shape = ModelConfig(hidden_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=24)
    many = torch.empty(1, FEW + 1, 16, device="meta")
    assert not pays(many, torch.bfloat16)
    for plan, stacked in (("fused", False), ("none", True), (MIX, True)):
        assert TinyLlama(shape, V4.with_plan(plan)).stacks(many, torch.bfloat16) == stacked


# -- printed --------------------------------------------------------------------------------------

SIZES = "L=1,B=2,T=16,D=64,Q=64,R=32,F=64,C=16"


def test_the_plan_of_a_chip_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """For the timed case of the table, and for sizes that it does not have."""
    how = ["tune", "--show", "--op", "stack", "--dtype", "bf16", "--chip", "sm_90"]
    assert main(how) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split(",")[0].strip() for line in lines if "(table)" in line}
    assert {f"stack.{name}" for name in PRODUCTS} <= shown
    beside = "stack.beside, kind=16bit,rows=1024,width=512: ON=1"
    assert [beside in line for line in lines].count(True) == 1, "a step asks it of `fused` alone"
    tf32 = ["tune", "--show", "--op", "stack", "--dtype", "fp32", "--precision", "tf32"]
    assert main([*tf32, "--chip", "sm_90"]) == 0
    assert "stack.plan, kind=tf32,rows=1024,width=512: FUSED=1" in capsys.readouterr().out
    assert main([*how, "--sizes", SIZES]) == 0
    found = capsys.readouterr().out
    assert f"stack-fused-{SIZES.replace('=', '').replace(',', '')}-bf16, sm_90" in found
    assert "stack.qkv, columns=128,inner=64,kind=16bit,rows=32: BK=64" in found
    assert "(default)" in found
    for precision, kind in (("ieee", "tf32x3"), ("tf32", "tf32")):
        of_kind = [*how[:5], "fp32", *how[6:], "--sizes", SIZES, "--precision", precision]
        assert main(of_kind) == 0
        assert f"stack.qkv, columns=128,inner=64,kind={kind},rows=32: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["medium", "large"])
def test_where_a_workload_is_a_stack_its_products_were_chosen(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults are for few rows: with many, a product without an entry would be a slow kernel."""
    how = ["tune", "--show", "--op", "stack", "--dtype", "bf16", "--chip", "sm_90"]
    shape = WORKLOADS[name]
    model, pairs = shape.model, shape.model.head_dim // 2
    key: dict[str, Any] = {"rows": 8192, "width": model.hidden_dim, "kind": "16bit"}
    assert SPACES["stack.plan"].on("sm_90", **key) == (Config(FUSED=1), True)
    assert SPACES["stack.beside"].on("sm_90", **key) == (Config(ON=0), True)
    heads = f"Q={model.num_heads * 2 * pairs},R={model.num_kv_heads * 2 * pairs},C={pairs}"
    size = f"L=1,B={shape.batch_size},T={shape.seq_len},D={model.hidden_dim},F={model.ffn_dim}"
    assert main([*how, "--sizes", f"{size},{heads}"]) == 0
    shown = capsys.readouterr().out.partition("stack-single")[0].splitlines()
    for product in PRODUCTS:
        (line,) = (one for one in shown if one.strip().startswith(f"stack.{product},"))
        assert line.endswith("the vendor's BLAS, and kernels behind it (table)")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--sizes", "L=1"], "--sizes are those of one op"),
        (["--op", "stack", "--sizes", "L=1"], "--sizes of stack are B, C, D, F, L, Q, R, T"),
        (["--show", "--chip", "sm_1"], "--chip"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_tune_cannot_show_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *wrong]) == 2
    assert said in capsys.readouterr().err
