"""The compile gate sees what passes a limit, and compiles what a launch on that chip would."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.limits import Known, load, stale, suggestion, triton_minor, verdict
from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import (
    CHIPS,
    Compilation,
    compilation,
    compile_launch,
    lacking,
)

# -- the gate is seen to fail -----------------------------------------------------------------


@jit
def product(a, b, c, K, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, BLOCK)[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, DEPTH)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, DEPTH):
        left = tl.load(a + m * K + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * BLOCK + n)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(c + m * BLOCK + n, sums)


@jit
def centred(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, a - tl.sum(a, 0) / n, mask=at < n)


@jit
def refused(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(BLOCK < 16, "blocks of at most 16")
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def one(kernel: Any, *args: Any, chip: str, **options: Any) -> Compilation:
    if reason := lacking(chip):
        pytest.skip(reason)
    with recorded(chip) as launches:
        kernel[(1,)](*args, **options)
    return compilation(launches[0], chip)


def of_product(chip: str) -> Compilation:
    """A product that holds 96 KB (or less, where a copy needs no buffer of its own)."""
    a = torch.empty(128, 1024, dtype=torch.bfloat16, device="meta")
    return one(product, a, a, a, 1024, chip=chip, BLOCK=128, DEPTH=64, num_warps=8, num_stages=4)


def of_centred(chip: str, block: int, warps: int) -> Compilation:
    x = torch.empty(1 << 16, device="meta")
    return one(centred, x, x, 1 << 16, chip=chip, BLOCK=block, num_warps=warps)


@pytest.mark.parametrize(("chip", "fits"), [("gfx942", False), ("gfx90a", False), ("sm_90", True)])
def test_96_kilobytes_of_shared_memory_are_too_much_where_there_are_64(
    chip: str, fits: bool
) -> None:
    excesses, taken = verdict(of_product(chip), [])
    assert taken is not None
    assert taken.shared >= 96 * 1024
    assert excesses == ([] if fits else ["98,304 bytes of shared memory, limit 65,536"])


@pytest.mark.parametrize(("chip", "fits"), [("gfx942", False), ("sm_90", True)])
def test_32_warps_are_too_many_where_a_wave_has_64_threads(chip: str, fits: bool) -> None:
    excesses, taken = verdict(of_centred(chip, 4096, 32), [])
    assert taken is not None
    assert (taken.num_warps, taken.threads) == (32, 1024 if fits else 2048)
    assert excesses == ([] if fits else ["32 warps of 64 threads, limit 1024 threads"])


@pytest.mark.parametrize("chip", ["gfx942", "sm_90"])
def test_a_spill_is_seen_and_may_be_listed_but_not_grow(chip: str) -> None:
    kernel, fine = of_centred(chip, 32768, 1), of_centred(chip, 1024, 4)
    excesses, taken = verdict(kernel, [])
    assert taken is not None
    assert excesses == [f"{taken.spilled:,} bytes a thread are spilled, allowed 0"]
    assert verdict(fine, [])[0] == []

    def entry(spilled: int, **when: object) -> Known:
        return Known("test_resources.centred", chip, triton_minor(), when, "a test", spilled)

    exact = entry(taken.spilled, BLOCK=32768, x="*fp32")
    assert verdict(kernel, [exact])[0] == []
    for other in (entry(taken.spilled - 1), entry(taken.spilled, BLOCK=512)):
        assert verdict(kernel, [other])[0] != []
    assert stale(exact, [kernel, fine]) is None
    assert "lower it" in str(stale(entry(taken.spilled + 1), [kernel, fine]))
    assert "no provider launches this" in str(stale(exact, [fine]))


def test_what_does_not_compile_is_said_and_may_be_listed() -> None:
    kernel = one(refused, torch.empty(32, device="meta"), chip="gfx942", BLOCK=32)
    ((reason,), _) = verdict(kernel, [])
    assert reason.startswith("does not compile: ")
    fails = Known("test_resources.refused", "gfx942", triton_minor(), {}, "a test")
    assert verdict(kernel, [fails]) == ([], None)
    compiles = one(refused, torch.empty(32, device="meta"), chip="gfx942", BLOCK=8)
    assert "it compiles now" in str(stale(fails, [compiles]))


# -- what is compiled is what a launch compiles -----------------------------------------------


def test_arguments_are_specialised_as_triton_does() -> None:
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    by_size = {n: one(centred, x, x, n, chip="sm_90", BLOCK=16) for n in (1, 16, 17, 19, 32, 2**31)}
    kinds = [compiled.traits["n"] for compiled in by_size.values()]
    assert kinds == [1, "i32", "i32", "i32", "i32", "i64"]
    keys = {n: compiled.key for n, compiled in by_size.items()}
    assert keys[16] == keys[32] != keys[17] == keys[19]
    assert by_size[16].traits["x"] == "*bf16"
    others = [one(centred, x, x, 16, chip="sm_90", BLOCK=16, num_warps=2)]
    others += [one(centred, x, x, 16, chip="gfx942", BLOCK=16)]
    assert len({keys[16], *(other.key for other in others)}) == 3


def test_an_optional_tensor_is_a_constant_none() -> None:
    x = torch.empty(64, device="meta")
    assert one(maybe_shifted, x, None, chip="sm_90", BLOCK=64).traits["shift"] is None
    assert verdict(one(maybe_shifted, x, x, chip="sm_90", BLOCK=64), [])[0] == []


@jit
def maybe_shifted(x, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    if shift is not None:
        a += tl.load(shift + at)
    tl.store(x + at, a)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_compiles_for_every_chip(chip: str) -> None:
    x = torch.empty(1000, dtype=torch.bfloat16, device="meta")
    taken = one(centred, x, x, 1000, chip=chip, BLOCK=256, num_warps=4).run()
    assert taken.excesses() == []
    assert taken.wave == (32 if chip.startswith("sm_") else 64)
    assert taken.threads == 4 * taken.wave
    assert 4 < taken.registers < 64
    assert 0 < taken.shared < 1024


def test_an_unknown_chip_or_option_is_refused() -> None:
    x = torch.empty(64, device="meta")
    with recorded() as launches:
        centred[(1,)](x, x, 64, BLOCK=64)
    with pytest.raises(ValueError, match=r"'sm_75': use one of gfx908, .*, sm_100"):
        compile_launch(launches[0], "sm_75")
    with pytest.raises(ValueError, match=r"centred: triton knows no option num_wraps"):
        one(centred, x, x, 64, chip="sm_90", BLOCK=64, num_wraps=2)


# -- the list of known limits -----------------------------------------------------------------

ENTRY = """
[[known]]
kernel = "_backward"
chip = "gfx942"
triton = "3.9"
when = { HEAD = 128, q = "*fp32" }
spilled = 64
why = "the tile of the gradients"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "limits.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_suggested_entry_allows_what_was_measured(tmp_path: Path) -> None:
    kernel = of_centred("gfx942", 32768, 1)
    text = suggestion(kernel, verdict(kernel, [])[1], "3.9").replace('why = ""', 'why = "a test"')
    (entry,) = load(written(tmp_path, f'measured = ["3.9"]\n{text}'), "test_resources").entries
    assert verdict(kernel, [entry])[0] == []
    other = of_centred("gfx942", 16384, 1)
    assert verdict(other, [entry]) == verdict(other, [])


def test_limits_are_read_by_version(tmp_path: Path) -> None:
    older = ENTRY.replace("3.9", "3.3").replace("spilled = 64\n", "")
    limits = load(written(tmp_path, f'measured = ["3.3", "3.6", "3.9"]\n{ENTRY}{older}'), "op")
    new, old = limits.entries
    assert (new.kernel, new.spilled, old.spilled) == ("op._backward", 64, None)
    assert limits.of("3.9") == [new]
    assert limits.of("3.6") == []
    assert limits.of("3.8") == [new, old]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("known = ", ""),
        (ENTRY, "triton 3.9: this triton is not in measured: add it"),
        (ENTRY.replace("gfx942", "gfx943"), "no such chip: use one of gfx908,"),
        (ENTRY.replace("why", "reason"), "unexpected keyword argument 'reason'"),
        (ENTRY.replace("the tile of the gradients", " "), "say why"),
    ],
)
def test_a_wrong_list_is_refused_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    if message and "measured" not in message:
        text = f'measured = ["3.9"]\n{text}'
    with pytest.raises(ValueError, match=rf"limits\.toml: .*{message}"):
        load(written(tmp_path, text), "attention")
