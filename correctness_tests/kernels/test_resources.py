"""The compile gate sees what passes a limit, and compiles what a launch on that chip would."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import (
    CHIPS,
    Compilation,
    compilation,
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


def compilation_of(kernel: Any, *args: Any, chip: str, **options: Any) -> Compilation:
    if reason := lacking(chip):
        pytest.skip(reason)
    with recorded(chip) as launches:
        kernel[(1,)](*args, **options)
    return compilation(launches[0], chip)


def of_product(chip: str) -> Compilation:
    """A product that holds 96 KB (or less, where a copy needs no buffer of its own)."""
    a = torch.empty(128, 1024, dtype=torch.bfloat16, device="meta")
    return compilation_of(
        product, a, a, a, 1024, chip=chip, BLOCK=128, DEPTH=64, num_warps=8, num_stages=4
    )


def of_centred(chip: str, block: int, warps: int) -> Compilation:
    x = torch.empty(1 << 16, device="meta")
    return compilation_of(centred, x, x, 1 << 16, chip=chip, BLOCK=block, num_warps=warps)


@pytest.mark.parametrize(("chip", "fits"), [("gfx942", False), ("gfx90a", False), ("sm_90", True)])
def test_96_kilobytes_of_shared_memory_are_too_much_where_there_are_64(
    chip: str, fits: bool
) -> None:
    excesses, taken = of_product(chip).verdict()
    assert taken is not None
    assert taken.shared >= 96 * 1024
    assert excesses == ([] if fits else ["98,304 bytes of shared memory, limit 65,536"])


@pytest.mark.parametrize(("chip", "fits"), [("gfx942", False), ("sm_90", True)])
def test_32_warps_are_too_many_where_a_wave_has_64_threads(chip: str, fits: bool) -> None:
    excesses, taken = of_centred(chip, 4096, 32).verdict()
    assert taken is not None
    assert (taken.num_warps, taken.threads) == (32, 1024 if fits else 2048)
    assert excesses == ([] if fits else ["32 warps of 64 threads, limit 1024 threads"])


@pytest.mark.parametrize("chip", ["gfx942", "sm_90"])
def test_a_spill_is_seen_and_may_be_allowed_but_not_grow(chip: str) -> None:
    kernel = of_centred(chip, 32768, 1)
    excesses, taken = kernel.verdict()
    assert taken is not None
    assert excesses == [f"{taken.spilled:,} bytes a thread are spilled, allowed 0"]
    assert kernel.verdict(spilled=taken.spilled)[0] == []
    assert kernel.verdict(spilled=taken.spilled - 1)[0] != []
    assert of_centred(chip, 1024, 4).verdict()[0] == []


def test_what_does_not_compile_is_an_excess() -> None:
    kernel = compilation_of(refused, torch.empty(32, device="meta"), chip="gfx942", BLOCK=32)
    ((reason,), taken) = kernel.verdict()
    assert reason.startswith("does not compile: ")
    assert taken is None


# -- what is compiled is what a launch compiles -----------------------------------------------


def test_arguments_are_specialised_as_triton_does() -> None:
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    by_size = {
        n: compilation_of(centred, x, x, n, chip="sm_90", BLOCK=16)
        for n in (1, 16, 17, 19, 32, 2**31)
    }
    kinds = [compiled.traits["n"] for compiled in by_size.values()]
    assert kinds == [1, "i32", "i32", "i32", "i32", "i64"]
    keys = {n: compiled.key for n, compiled in by_size.items()}
    assert keys[16] == keys[32] != keys[17] == keys[19]
    assert by_size[16].traits["x"] == "*bf16"
    others = [compilation_of(centred, x, x, 16, chip="sm_90", BLOCK=16, num_warps=2)]
    others += [compilation_of(centred, x, x, 16, chip="gfx942", BLOCK=16)]
    assert len({keys[16], *(other.key for other in others)}) == 3


def test_an_optional_tensor_that_is_absent_is_a_constant() -> None:
    x = torch.empty(64, device="meta")
    assert compilation_of(maybe_shifted, x, None, chip="sm_90", BLOCK=64).traits["shift"] is None
    assert compilation_of(maybe_shifted, x, x, chip="sm_90", BLOCK=64).verdict()[0] == []


@jit
def maybe_shifted(x, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    if shift is not None:
        a += tl.load(shift + at)
    tl.store(x + at, a)


@jit
def squared(a, squares, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, BLOCK)[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    tile = tl.load(a + m * BLOCK + n)
    tl.store(squares + m * BLOCK + n, tl.dot(tile, tile).to(tl.bfloat16))


@pytest.mark.parametrize(
    ("chip", "family"),
    [("sm_80", "mma"), ("sm_90", "wgmma"), ("gfx90a", "mfma"), ("gfx942", "mfma")],
)
def test_widths_and_matrix_instructions_are_read(chip: str, family: str) -> None:
    a = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    taken = compilation_of(squared, a, a, chip=chip, BLOCK=64).run()
    assert taken.loads == 16
    assert taken.stores in (8, 16)
    assert taken.products == (f"{family} bf16",)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_compiles_for_every_chip(chip: str) -> None:
    x = torch.empty(1000, dtype=torch.bfloat16, device="meta")
    taken = compilation_of(centred, x, x, 1000, chip=chip, BLOCK=256, num_warps=4).run()
    assert taken.excesses() == []
    assert taken.threads == 4 * (32 if chip.startswith("sm_") else 64)
    assert 4 < taken.registers < 64
    assert 0 < taken.shared < 1024


def test_an_unknown_chip_or_option_is_refused() -> None:
    x = torch.empty(64, device="meta")
    with recorded() as launches:
        centred[(1,)](x, x, 64, BLOCK=64)
    with pytest.raises(ValueError, match=r"'sm_75': use one of gfx908, .*, sm_100"):
        compilation(launches[0], "sm_75")
    with pytest.raises(ValueError, match=r"centred: triton knows no option num_wraps"):
        compilation_of(centred, x, x, 64, chip="sm_90", BLOCK=64, num_wraps=2)
