"""Kernels keep the instructions that they are recorded to have: wide accesses, matrix products.

The compilations are those of `correctness_tests/kernels/test_compiled.py`; none is made a second
time, and what `make test` leaves to `make test-slow` there it leaves here. Each op's folder has its
record, ``instructions.toml``. A kernel that is not recorded for this triton is listed among the
skipped tests; test_compiled.py holds it to the limits of the chips. So is one whose record is of
other code, and which is therefore compiled in each run.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import (
    AVAILABLE,
    FOLDERS,
    MINOR,
    held,
    is_recorded_so,
    planned,
    recorded_kernels,
)
from tinyllama.harness.correct.launched import WHOLLY
from tinyllama.harness.kernels.instruction_record import (
    FILE,
    Difference,
    Key,
    Record,
    key_of,
    load,
    text_of,
    together,
)
from tinyllama.harness.kernels.instructions import TILE, Instructions, of_amdgcn, of_ptx
from tinyllama.harness.kernels.launch import jit, recorded, tl
from tinyllama.harness.kernels.resources import Compilation, compilation, lacking
from tinyllama.harness.plugins.suite import asks_for_slow

ANEW = "python -m tools.record_instructions"
STALE = f"as recorded, but made of other code now, so that every run compiles it: {ANEW}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        slow = pytest.mark.slow("every kernel is compiled, whatever is recorded")
        soon: set[str] = set()
        if not asks_for_slow(metafunc.config):
            every = planned(only_quick=True).values()
            soon = {one.compilation.key for one in every if one.quick and one.compilation}
        params = [
            pytest.param(
                key, id="-".join(key), marks=[] if {one.key for one in every} <= soon else [slow]
            )
            for key, every in held().items()
        ]
        for chip in WHOLLY:
            if reason := lacking(chip):
                params.append(pytest.param(None, id=chip, marks=pytest.mark.skip(reason)))
        metafunc.parametrize("key", params)


def test_instructions_are_those_recorded(key: Key, pytestconfig: pytest.Config) -> None:
    if key not in recorded_kernels().get(MINOR, {}):
        pytest.skip(f"not recorded for triton {MINOR}, held to the chips' limits alone: {ANEW}")
    if asks_for_slow(pytestconfig) or not is_recorded_so(key):
        reason = unlike(key, held()[key], recorded_kernels())
        assert reason is None, reason
    if not is_recorded_so(key):
        pytest.skip(STALE)


def unlike(key: Key, compilations: list[Compilation], record: Record) -> str | None:
    """How a kernel differs from the record, in words; None where it does not."""
    known = record[MINOR][key]
    found = together(one.run().instructions for one in compilations)
    if found == known:
        return None
    return f"{Difference(key, MINOR, known, found)}\nIf this is meant, record it with {ANEW}"


def test_a_kernel_that_is_recorded_of_other_code_is_listed(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    known = [key for key in held() if key in recorded_kernels().get(MINOR, {})]
    if not known:
        pytest.skip(f"nothing is recorded for triton {MINOR}")
    monkeypatch.setattr(f"{__name__}.is_recorded_so", lambda key: False)
    with pytest.raises(pytest.skip.Exception, match="made of other code"):
        test_instructions_are_those_recorded(known[0], pytestconfig)


def test_what_is_recorded_is_launched() -> None:
    gone = {key for key in recorded_kernels().get(MINOR, {}) if key[0] in AVAILABLE} - set(held())
    assert not gone, f"no provider launches {gone} any more: record what there is with {ANEW}"


@pytest.mark.parametrize("op", [op for op, folder in FOLDERS.items() if (folder / FILE).exists()])
def test_a_record_is_as_its_tool_writes_it(op: str) -> None:
    path = FOLDERS[op] / FILE
    assert text_of(load(path, op), op) == path.read_text(encoding="utf-8")


# -- what is compiled is read -----------------------------------------------------------------


@jit
def doubled(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@jit
def added(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@jit
def multiplied(x, y, SIZE: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(x + at)
    tl.store(y + at, tl.dot(a, a, input_precision=PRECISION))


def compiled(kernel: Any, chip: str, *args: Any, **options: Any) -> Compilation:
    if reason := lacking(chip):
        pytest.skip(reason)
    x = torch.empty(1 << 16, dtype=options.pop("dtype", torch.float32), device="meta")
    with recorded(chip) as launches:
        kernel[(1,)](x, x, *args, **options)
    return compilation(launches[0], chip)


@pytest.mark.parametrize("chip", WHOLLY)
def test_a_length_that_is_no_multiple_of_16_narrows_the_accesses(chip: str) -> None:
    aligned, other = (compiled(doubled, chip, n, BLOCK=1024) for n in (1024, 1023))
    assert aligned.run().instructions == Instructions(16, 16)
    assert other.run().instructions == Instructions(4, 4)
    key = key_of(aligned)
    assert key == key_of(other) == (chip, "test_instructions.doubled, fp32")
    record = {MINOR: {key: Instructions(16, 16)}}
    assert unlike(key, [aligned], record) is None
    assert unlike(key, [aligned, other], record) == (
        f"test_instructions.doubled, fp32 on {chip}, triton {MINOR}: "
        "its widest load is 4 B, before 16 B; its widest store is 4 B, before 16 B\n"
        "  recorded: loads 16 B, stores 16 B, products none, atomics none\n"
        "  found:    loads 4 B, stores 4 B, products none, atomics none\n"
        f"If this is meant, record it with {ANEW}"
    )
    wider = unlike(key, [aligned], {MINOR: {key: Instructions(8, 16)}})
    assert "other than recorded" in str(wider)


@pytest.mark.parametrize("chip", WHOLLY)
def test_an_atomic_is_seen(chip: str) -> None:
    one = compiled(added, chip, 1024, BLOCK=1024)
    found = one.run().instructions
    assert len(found.atomics) == 1
    assert "add" in found.atomics[0]
    reason = unlike(key_of(one), [one], {MINOR: {key_of(one): replace(found, atomics=())}})
    assert f"it has atomics that were not there: {found.atomics[0]}" in str(reason)


@pytest.mark.parametrize(
    ("chip", "dtype", "precision", "products"),
    [
        ("gfx942", torch.bfloat16, "ieee", ("mfma bf16",)),
        ("gfx942", torch.float32, "ieee", ("mfma f32",)),
        ("sm_90", torch.bfloat16, "ieee", ("wgmma bf16",)),
        ("sm_90", torch.float32, "tf32", ("wgmma tf32",)),
        ("sm_90", torch.float32, "ieee", ()),
    ],
)
def test_the_precision_of_a_product_decides_its_instruction(
    chip: str, dtype: torch.dtype, precision: str, products: tuple[str, ...]
) -> None:
    size = 64 if products else 16  # sums of scalar products are unrolled
    one = compiled(multiplied, chip, SIZE=size, PRECISION=precision, dtype=dtype)
    assert one.run().instructions.products == products


# -- samples of assembly ----------------------------------------------------------------------

PTX = {
    "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];": Instructions(16, 0),
    "ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd1, %rd2 }, [ %rd3 ];": Instructions(16, 0),
    "ld.global.v8.b32 { %r1 }, [ %rd1 ];": Instructions(32, 0),
    "ld.relaxed.gpu.global.b16 %rs1, [ %rd1 ];": Instructions(2, 0),
    "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];": Instructions(0, 0),
    "ld.param.b64 %rd1, [kernel_param_0];": Instructions(0, 0),
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x10, %r2;": Instructions(16, 0),
    "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x4, %r2;": Instructions(4, 0),
    "cp.async.commit_group;": Instructions(0, 0),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1];": Instructions(TILE, 0),
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1];": Instructions(0, TILE),
    "cp.async.bulk.commit_group;": Instructions(0, 0),
    "@%p2 st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };": Instructions(0, 8),
    "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};": Instructions(0, 0),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %r1 };": Instructions(
        0, 0, ("mma tf32",)
    ),
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1};": Instructions(
        0, 0, ("wgmma bf16",)
    ),
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%r1};": Instructions(
        0, 0, ("wgmma e4m3 e5m2",)
    ),
    "wgmma.fence.sync.aligned;": Instructions(0, 0),
    "tcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd1;": Instructions(0, 0, ("tcgen05 f16",)),
    "atom.global.gpu.acq_rel.add.f32 %r1, [ %rd1 ], %r2;": Instructions(0, 0, (), ("add f32",)),
    "red.relaxed.gpu.global.add.noftz.bf16x2 [%rd1], %r1;": Instructions(0, 0, (), ("add bf16x2",)),
    "atom.shared.add.f32 %r1, [%r2], %r3;": Instructions(0, 0),
}
AMDGCN = {
    "buffer_load_dwordx4 v[2:5], v1, s[12:15], 0 offen": Instructions(16, 0),
    "buffer_load_dword v85, s[24:27], 0 offen lds": Instructions(4, 0),
    "global_load_lds_dwordx4 v[0:1], off": Instructions(16, 0),
    "buffer_load_ushort v1, v2, s[0:3], 0 offen": Instructions(2, 0),
    "global_load_ubyte_d16_hi v1, v2, s[0:1]": Instructions(1, 0),
    "global_load_b128 v[0:3], v4, s[0:1]": Instructions(16, 0),
    "s_load_dwordx4 s[0:3], s[4:5], 0x0": Instructions(0, 0),
    "ds_read_b128 v[0:3], v4": Instructions(0, 0),
    "global_store_dwordx3 v0, v[2:4], s[8:9]": Instructions(0, 12),
    "global_store_short_d16_hi v0, v1, s[2:3]": Instructions(0, 2),
    "scratch_store_dwordx4 off, v[0:3], s32": Instructions(0, 0),
    "buffer_store_dword v1, off, s[0:3], 0 offset:4 ; 4-byte Folded Spill": Instructions(0, 0),
    "v_mfma_f32_32x32x8_bf16 v[16:31], v[32:33], v[74:75], 0": Instructions(0, 0, ("mfma bf16",)),
    "v_mfma_f32_32x32x8bf16_1k a[0:15], v[0:1], v[2:3], 0": Instructions(0, 0, ("mfma bf16",)),
    "v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], 0": Instructions(0, 0, ("mfma xf32",)),
    "v_mfma_f32_16x16x32_fp8_bf8 v[0:3], v[4:5], v[6:7], 0": Instructions(0, 0, ("mfma fp8 bf8",)),
    "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], 0": Instructions(0, 0, ("mfma f16",)),
    "v_fma_f32 v0, v1, v2, v3": Instructions(0, 0),
    "global_atomic_add_f32 v1, v2, s[2:3]": Instructions(0, 0, (), ("add_f32",)),
}


@pytest.mark.parametrize("line", PTX)
def test_a_line_of_ptx(line: str) -> None:
    assert of_ptx(f"$L__BB0_1:\n\t{line}\n") == PTX[line]


@pytest.mark.parametrize("line", AMDGCN)
def test_a_line_of_amdgcn(line: str) -> None:
    assert of_amdgcn(f".LBB0_1:\n\t{line}\n") == AMDGCN[line]


def test_the_widest_access_and_every_product_of_a_kernel_count() -> None:
    of = {of_ptx: PTX, of_amdgcn: AMDGCN}
    whole = [read("".join(f"\t{line}\n" for line in samples)) for read, samples in of.items()]
    assert [(one.loads, one.stores) for one in whole] == [(TILE, TILE), (16, 12)]
    assert whole[0].products == ("mma tf32", "tcgen05 f16", "wgmma bf16", "wgmma e4m3 e5m2")
    assert whole[1].products == ("mfma bf16", "mfma f16", "mfma fp8 bf8", "mfma xf32")


def test_an_access_of_unknown_width_is_no_access_of_none() -> None:
    with pytest.raises(RuntimeError, match="the width of an access 'format_xyz' is unknown"):
        of_amdgcn("\tbuffer_load_format_xyz v[0:2], v3, s[0:3], 0\n")


# -- the record -------------------------------------------------------------------------------

MATRIX = Instructions(16, 8, ("mfma bf16",))


def test_compilations_of_a_kernel_are_held_to_the_least_of_them() -> None:
    other = Instructions(8, 16, ("mfma f16",), ("add_f32",))
    both = Instructions(8, 8, ("mfma bf16", "mfma f16"), ("add_f32",))
    assert together([MATRIX, other]) == both
    assert together([MATRIX, MATRIX]) == MATRIX
    assert together([MATRIX, Instructions(16, 16)]).products == ("mfma bf16", "none")
    assert together([Instructions(16, 16), Instructions(16, 4)]) == Instructions(16, 4)


def test_what_is_worse_than_before_is_said_and_a_gain_is_not() -> None:
    assert MATRIX.worse(MATRIX) == []
    assert replace(MATRIX, stores=16, products=("mfma bf16", "mfma f16")).worse(MATRIX) == []
    assert replace(MATRIX, loads=8).worse(MATRIX) == ["its widest load is 8 B, before 16 B"]
    assert replace(MATRIX, stores=0).worse(MATRIX) == ["its widest store is none, before 8 B"]
    assert replace(MATRIX, products=("mfma f32",)).worse(MATRIX) == [
        "its products are mfma f32, before mfma bf16"
    ]
    assert replace(MATRIX, atomics=("add_f32",)).worse(MATRIX) == [
        "it has atomics that were not there: add_f32"
    ]


def test_recording_keeps_other_versions_and_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import record_instructions as tool

    one = compiled(doubled, "gfx942", 1024, BLOCK=1024)
    stale = {("gfx942", "gone"): MATRIX, ("sm_90", "kept"): MATRIX}
    monkeypatch.setattr(tool, "lacking", lambda chip: "no ptxas" if chip == "sm_90" else None)
    found = {key_of(one): Instructions(16, 16)}
    older: Record = {"3.0": {("sm_90", "other"): MATRIX}}
    assert tool.updated({**older, MINOR: stale}, found) == {
        **older,
        MINOR: {**found, ("sm_90", "kept"): MATRIX},
    }
