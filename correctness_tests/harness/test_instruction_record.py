"""Which compilations instructions are recorded of, what the digest of a record depends on, and how
records are written and read."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tinyllama.harness.correct.launched import held_kernels
from tinyllama.harness.kernels import instruction_record
from tinyllama.harness.kernels.instruction_record import Record, key_of, load, made_of, text_of
from tinyllama.harness.kernels.instructions import Instructions
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


# -- the files ---------------------------------------------------------------------------------

RECORD: Record = {
    "3.9": {
        ("gfx942", "op.kernel, bf16 fp32"): Instructions(16, 8, ("mfma bf16",)),
        ("sm_90", "op.kernel, fp32 tf32"): Instructions(16, 4, ("wgmma tf32",), ("add f32",)),
    },
    "3.10": {("sm_90", "op.kernel, fp32"): Instructions(16, 16)},
}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "instructions.toml"
    path.write_text(text_of(RECORD, "op"), encoding="utf-8")
    assert load(path, "op") == RECORD
    assert list(load(path, "op")) == ["3.9", "3.10"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", r"instructions\.toml: "),
        ('["3.9".gfx943]\n"a" = { loads = 4, stores = 4 }', "gfx943, a: no such chip: use one of"),
        ('["3.9".sm_90]\n"a" = { loads = 4 }', r"sm_90, a: unknown \[\], missing \['stores'\]"),
        ('["3.9".sm_90]\n"a" = { loads = 4, stores = 4, mma = 1 }', r"unknown \['mma'\]"),
    ],
)
def test_a_malformed_record_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "instructions.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(path, "op")


def test_records_of_ops_are_one_by_version_of_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"a": {"3.6": {"a.k": 1}, "3.7": {"a.k": 2}}, "b": {"3.7": {"b.k": 3}}, "c": {}}
    monkeypatch.setattr(instruction_record, "load", lambda path, op: held[op])
    for op in "abc":
        (tmp_path / op).mkdir()
        (tmp_path / op / instruction_record.FILE).touch()
    folders = {op: tmp_path / op for op in "abcd"}
    found: Any = instruction_record.load_all(folders)
    assert found == {
        "3.6": {"a.k": 1},
        "3.7": {"a.k": 2, "b.k": 3},
    }
