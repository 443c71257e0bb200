"""The tool that mutates kernels: what it changes, and that a mutant runs in its kernel's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import mutants

from tinyllama.harness.kernels import jit, tl


@jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    """A docstring - with a minus - stays."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, tl.where(seen > 0, seen, -seen), mask=at < n)


def test_each_operator_number_mask_and_choice_is_changed() -> None:
    texts = {mutant.text for mutant in mutants.mutants_of(kernel)}
    assert {
        "tl.program_id(0) * BLOCK -> tl.program_id(0) + BLOCK",
        "at < n -> at <= n",
        "0.0 -> 1.0",
        "tl.load(x + at, mask=at < n, other=0.0) -> tl.load(x + at)",
        "tl.where(seen > 0, seen, -seen) -> tl.where(seen > 0, -seen, seen)",
        "-seen -> +seen",
    } <= texts
    assert not any("docstring" in text for text in texts)
    for mutant in mutants.mutants_of(kernel):
        compile(mutant.source, "mutant", "exec")
        assert mutant.source != kernel.src
        assert mutant.line > kernel.fn.__code__.co_firstlineno


def test_every_kernel_has_a_provider_that_runs_it() -> None:
    found = mutants.candidates()
    assert {"silu_mul.sigmoids", "rope.rotate_kernel", "attention_kernels.forward_kernel"} <= set(
        found
    )
    assert all(mutants.mutants_of(kernel) for kernel, users in found.values() if users)


EXPECTED = {
    "1 + small -> 1 - small": mutants.KILLED,
    "x < 0 -> x <= 0": mutants.SURVIVED,  # at 0 both ways give one half; nothing of the first stays
}


def test_a_mutant_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a fork of this one, which may have used autograd, and a GPU."""
    kernel, users = mutants.candidates()["silu_mul.sigmoids"]
    by_text = {mutant.text: mutant for mutant in mutants.mutants_of(kernel)}

    def fork() -> int:
        raise AssertionError("this process is forked")

    monkeypatch.setattr(os, "fork", fork)
    with mutants.forks() as worker:
        for change, outcome in EXPECTED.items():
            trial = mutants.tried(worker, by_text[change], kernel, users[:1])
            assert trial.outcome == outcome, trial
            assert bool(trial.check) is (outcome == mutants.KILLED)
