"""Which compilations instructions are recorded of, and what the digest of a record depends on."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tinyllama.harness.correct.launched import held_kernels
from tinyllama.harness.kernels.instruction_record import key_of, made_of
from tinyllama.harness.kernels.limits import Known


def compilation(kernel: str, **traits: Any) -> Any:
    chip = SimpleNamespace(name="a chip")
    return SimpleNamespace(kernel=kernel, chip=chip, traits=traits, digest=f"{kernel}{traits}")


def test_each_compilation_whose_instructions_are_held_is_grouped() -> None:
    """The first, those in the middle and the last; not what is not held, or does not compile."""
    a, b, c = (compilation(name) for name in "abc")
    more = compilation("a", N=3)
    every = [(True, a), (False, b), (True, None), (True, more), (False, a), (True, c)]
    planned: Any = [SimpleNamespace(held=held, compilation=one) for held, one in every]
    found = held_kernels(planned)
    assert {key[1]: some for key, some in found.items()} == {"a, ": [a, more], "c, ": [c]}


def test_a_key_has_the_types_of_all_pointers_wherever_they_stand() -> None:
    traits = {"x": "*fp32", "y": "*bf16", "z": "*fp32", "ids": "*i64", "N": 3, "PRECISION": "tf32"}
    for order in itertools.permutations(traits):
        one = compilation("a", **{name: traits[name] for name in order})
        assert key_of(one) == ("a chip", "a, bf16 fp32 tf32")
    assert key_of(compilation("a", x="*fp32", PRECISION="ieee")) == ("a chip", "a, fp32")


def test_a_digest_is_of_each_compilation_and_of_each_limit_that_speaks_of_one() -> None:
    def known(kernel: str, why: str = "") -> Known:
        return Known(kernel, "a chip", "3.6", {}, why)

    compilations = [compilation(name) for name in "abc"]
    limits = [known(name) for name in "abc"]
    usual = made_of(compilations, limits)
    assert made_of(compilations[::-1], limits[::-1]) == usual
    assert made_of(compilations, [known("d"), *limits, known("e")]) == usual
    for place in range(3):
        changed = [
            *compilations[:place],
            compilation("abc"[place], N=3),
            *compilations[place + 1 :],
        ]
        assert made_of(changed, limits) != usual
        other = list(limits)
        other[place] = known("abc"[place], "other")
        assert made_of(compilations, other) != usual
