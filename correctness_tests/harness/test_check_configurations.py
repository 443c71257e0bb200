"""Each configuration of a kernel under ``triton.autotune`` is tried and named; extremes that torch
itself fails are not held against a kernel."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support import tried
from correctness_tests.support.tried import finding, small
from tinyllama.harness import Case, Tensor
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank, configurations, run
from tinyllama.harness.declare.registry import Registry, load_file, providers_restored
from tinyllama.harness.declare.values import normal
from tinyllama.harness.kernels import tuned
from tinyllama.harness.kernels.tuned import AutoTuned
from tinyllama.ops import OPS

FILE = """
import torch, triton
import triton.language as tl
from tinyllama.ops.silu_mul import silu_mul

def zero(args):
    args["counts"].zero_()

def wide_enough(configs, named, **meta):
    return [one for one in configs if one.kwargs["BLOCK"] > 16]

@triton.autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps, pre_hook=HOOK)
        for block, warps in CONFIGS
    ],
    key=["n"],
    prune_configs_by={"early_config_prune": wide_enough},
    TOLD
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def kernel(gate, up, h, counts, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    before = tl.atomic_add(counts + tl.program_id(0), 1)
    h_at = g * tl.sigmoid(g) * u * WRONG
    tl.store(h + at, (h_at + before).to(h.dtype.element_ty), mask=at < n)

@silu_mul.provider("tuned", requires=("triton",), dtypes=(torch.float32,), frozen=("gate", "up"))
def tuned(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    h, counts = torch.empty_like(gate), torch.zeros(999, dtype=torch.int32, device=gate.device)
    if HOOK is zero:
        counts += 7
    kernel[lambda meta: (triton.cdiv(h.numel(), meta["BLOCK"]),)](gate, up, h, counts, h.numel())
    return h
"""


def found(
    tmp_path: Path, configs: str, check: str, wrong: str = "1.0", hook: str = "zero", told: str = ""
) -> Finding:
    path = tmp_path / "tuned.py"
    text = FILE.replace("CONFIGS", configs).replace("WRONG", wrong)
    path.write_text(text.replace("HOOK", hook).replace("TOLD", told))
    with providers_restored(OPS.values()):
        load_file(path, Registry())
        op = OPS["silu_mul"]
        (finding,) = run(Candidate(op, op["tuned"]), only=[check])
    return finding


BOTH = "((16, 64), (32, 4), (128, 1))"  # the first one is left out by the author's pruning


def test_each_configuration_is_right(tmp_path: Path) -> None:
    """What a configuration's hook clears is cleared."""
    finding = found(tmp_path, BOTH, "configurations")
    assert (finding.outcome, finding.message) == (Outcome.PASSED, "2 configurations"), finding
    assert found(tmp_path, BOTH, "outputs").outcome is Outcome.PASSED


def test_one_configuration_that_is_wrong_is_named(tmp_path: Path) -> None:
    wrong = "tl.where(BLOCK == 128, 1.25, 1.0)"
    assert found(tmp_path, BOTH, "outputs", wrong).outcome is Outcome.PASSED
    finding = found(tmp_path, BOTH, "configurations", wrong)
    assert (finding.outcome, finding.rank) == (Outcome.FAILED, Rank.WRONG)
    assert "tuned.kernel [BLOCK=128, num_warps=1" in finding.message
    assert "outputs: h: " in finding.message


def test_configurations_that_were_not_tried_are_not_called_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configurations, "SECONDS", 0.0)
    finding = found(tmp_path, BOTH, "configurations", "tl.where(BLOCK == 128, 1.25, 1.0)")
    assert finding.outcome is Outcome.UNSUPPORTED
    expected = "0 of 2 configurations are right; those after 0 s were not tried"
    assert finding.message == expected


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ("", Outcome.FAILED),
        ("reset_to_zero=['counts']", Outcome.PASSED),
        ("restore_value=['counts']", Outcome.PASSED),
        ("pre_hook=lambda given, reset_only=False: zero(given)", Outcome.PASSED),
        ("post_hook=lambda given, exception: zero(given)", Outcome.PASSED),
    ],
)
def test_what_a_timed_launch_leaves_behind_changes_no_result(
    tmp_path: Path, told: str, outcome: Outcome
) -> None:
    """Of one that adds to its own output: each launch that is timed adds to it, too."""
    assert found(tmp_path, BOTH, "outputs", hook="None", told=told).outcome is Outcome.PASSED
    finding = found(tmp_path, BOTH, "configurations", hook="None", told=told)
    assert finding.outcome is outcome, finding
    assert (configurations.TIMED in finding.message) == (outcome is Outcome.FAILED)


def cleared(given: dict[str, torch.Tensor], reset_only: bool) -> None:
    given["counts"].fill_(float(reset_only))


@pytest.mark.parametrize("told", [{"reset_to_zero": ["counts"]}, {"pre_hook": cleared}])
def test_a_timed_launch_finds_what_it_clears_clear(told: dict[str, Any]) -> None:
    counts, seen = torch.ones(2), list[float]()
    AutoTuned._time(Mock(_told=told), {"counts": counts}, lambda: seen.append(counts.sum().item()))
    assert seen == [0.0]


@pytest.mark.parametrize(
    ("configs", "outcome", "seen"),
    [
        ("((32, 4), (64, 64))", Outcome.PASSED, ""),
        ("((64, 64), (32, 4))", Outcome.PASSED, "configurations that autotune leaves out: "),
        ("((64, 64), (32, 128))", Outcome.FAILED, "none of its 1 other configurations fits"),
    ],
    ids=["first", "second", "none"],
)
def test_one_configuration_must_fit_a_chip(
    tmp_path: Path, configs: str, outcome: Outcome, seen: str
) -> None:
    finding = found(tmp_path, configs, "resources")
    assert finding.outcome is outcome, finding
    assert seen in finding.message
    assert not seen or "tuned.kernel [BLOCK=64, num_warps=64" in finding.message


def test_a_kernel_of_one_configuration_has_none_to_compare(tmp_path: Path) -> None:
    finding = found(tmp_path, "((32, 4),)", "configurations")
    assert finding.outcome is Outcome.UNSUPPORTED


def test_every_configuration_of_every_kernel_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several kernels, those of one configuration among them: the last as well as the first."""
    forced: list[tuple[Any, ...]] = []

    class Kernel(SimpleNamespace):
        def forced(self, config: str, timed: bool = False) -> None:
            forced.append((self.identity, config, timed))

    def space(name: str, sizes: dict[int, list[str]]) -> Any:
        return SimpleNamespace(
            configs=lambda n: sizes[n], force=lambda config, n: forced.append((name, config, n))
        )

    kernels = [Kernel(identity=name, configs=list(name)) for name in ("ab", "c", "def")]
    spaces = {
        name: space(name, {1: ["x"], 2: [f"{name}y", f"{name}z"]}) for name in ("s", "t", "u")
    }
    keys = {(name, f"n={n}"): {"n": n} for name in spaces for n in (2, 1)}
    named = nullcontext({one.identity: one for one in kernels})
    monkeypatch.setattr(tuned, "tuned", lambda: named)
    monkeypatch.setattr(tuned, "config_text", str)
    monkeypatch.setattr(configurations, "SPACES", spaces)
    monkeypatch.setattr(configurations, "asked", lambda: nullcontext(keys))
    names = [name for name, _ in configurations._every(Mock(), Mock())]
    of_kernels = [(one, config, False) for one in ("ab", "def") for config in one]
    expected = [*of_kernels, ("ab", "a", True), ("def", "d", True)]
    of_spaces = [(name, f"{name}{config}", 2) for name in spaces for config in "yz"]
    assert sorted(map(str, forced)) == sorted(map(str, [*expected, *of_spaces]))
    assert sorted(names) == sorted(
        [
            *(f"{one} [{config}]{configurations.TIMED * timed}" for one, config, timed in expected),
            *(f"{name} n=2 [{config}]" for name, config, _ in of_spaces),
        ]
    )


# -- extremes -------------------------------------------------------------------------------------


def rough(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An exponential that is off by a factor for wide inputs."""
    return lambda x: torch.where(x.abs() > 10, x.exp() * factor, x.exp())


@pytest.mark.parametrize(
    ("call", "torchs", "outcome"),
    [
        (rough(1.0001), rough(1.0001), Outcome.UNSUPPORTED),
        (rough(1.0001), None, Outcome.FAILED),
        (rough(1.0001), rough(1.0), Outcome.FAILED),
        (rough(1.1), rough(1.0001), Outcome.FAILED),
        (rough(float("nan")), rough(1.0001), Outcome.FAILED),
        (rough(1.0), rough(1.0001), Outcome.PASSED),
    ],
    ids=["as torch", "no torch", "torch is right", "far worse", "nan", "right"],
)
def test_an_extreme_that_torch_fails_is_not_held_against_a_kernel(
    call: Any, torchs: Any, outcome: Outcome
) -> None:
    op = small(
        "grown",
        lambda x: x.double().exp().to(x.dtype),
        {"x": Tensor("N D")},
        {"y": "N D"},
        [Case(N=40, D=16)],
        extremes={"wide": {"x": normal(20.0)}},
    )
    if torchs is not None:
        op.provider("torch")(lambda x: torchs(x))
    one = finding(op, call, "extreme values")
    assert one.outcome is outcome, one
    if outcome is Outcome.UNSUPPORTED:
        assert "wide is not held against it: torch fails likewise, y: " in one.message
        assert tried.found(op, call, "input layouts", "extreme values")["extreme values"] == one
        op.extremes = {**op.extremes, "narrow": {"x": normal(0.1)}}
        one = finding(op, call, "extreme values")
        assert one.outcome is Outcome.PASSED, "another extreme was held against it"
        assert "wide is not held against it" in one.message
