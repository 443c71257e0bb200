"""What kernels take of a chip: occupancy by the makers' tables, and a revision that takes more."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import Done, refused, tinyllama
from tinyllama.harness.kernels.instructions import TILE, Instructions
from tinyllama.harness.kernels.occupancy import occupancy
from tinyllama.harness.kernels.resources import CHIPS, Resources


def taking(chip: str, registers: int, shared: int = 0, num_warps: int = 4) -> Resources:
    copies = Instructions(16, 16)
    return Resources("kernel", CHIPS[chip], num_warps, registers, 0, 0, shared, copies)


@pytest.mark.parametrize(
    ("registers", "waves"),
    [(64, 8), (65, 7), (72, 7), (80, 6), (96, 5), (128, 4), (168, 3), (256, 2), (257, 1), (512, 1)],
)
def test_waves_of_a_simd_by_registers(registers: int, waves: int) -> None:
    """The occupancy table of CDNA 2 and 3 (AMD lab notes, register pressure)."""
    for chip in ("gfx90a", "gfx942"):
        found = occupancy(taking(chip, registers))
        assert found is not None
        assert (found.warps, found.most) == (waves, 8)


# What a line of assembly says: bytes loaded, bytes stored, products, atomics.
PTX: dict[str, tuple[Any, ...]] = {
    "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];": (16, 0),
    "ld.relaxed.gpu.global.b16 %rs1, [ %rd1 ];": (2, 0),
    "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];": (0, 0),
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x10, %r2;": (16, 0),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1];": (TILE, 0),
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1];": (0, TILE),
    "@%p2 st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };": (0, 8),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %r1 };": (0, 0, ("mma tf32",)),
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%r1};": (0, 0, ("wgmma e4m3 e5m2",)),
    "tcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd1;": (0, 0, ("tcgen05 f16",)),
    "atom.global.gpu.acq_rel.add.f32 %r1, [ %rd1 ], %r2;": (0, 0, (), ("add f32",)),
}
AMDGCN: dict[str, tuple[Any, ...]] = {
    "buffer_load_dwordx4 v[2:5], v1, s[12:15], 0 offen": (16, 0),
    "buffer_load_ushort v1, v2, s[0:3], 0 offen": (2, 0),
    "global_load_b128 v[0:3], v4, s[0:1]": (16, 0),
    "s_load_dwordx4 s[0:3], s[4:5], 0x0": (0, 0),
    "global_store_dwordx3 v0, v[2:4], s[8:9]": (0, 12),
    "buffer_store_dword v1, off, s[0:3], 0 offset:4 ; 4-byte Folded Spill": (0, 0),
    "v_mfma_f32_32x32x8bf16_1k a[0:15], v[0:1], v[2:3], 0": (0, 0, ("mfma bf16",)),
    "v_mfma_f32_16x16x32_fp8_bf8 v[0:3], v[4:5], v[6:7], 0": (0, 0, ("mfma fp8 bf8",)),
    "global_atomic_add_f32 v1, v2, s[2:3]": (0, 0, (), ("add_f32",)),
}


@pytest.mark.parametrize(
    ("stage", "line"), [*(("ptx", one) for one in PTX), *(("amdgcn", one) for one in AMDGCN)]
)
def test_an_instruction_is_read_by_its_name(stage: str, line: str) -> None:
    expected = Instructions(*(PTX if stage == "ptx" else AMDGCN)[line])
    assert Instructions.of({stage: f"\n\t{line}\n"}) == expected


def table(path: Path, *options: str | Path) -> Done:
    return tinyllama("kernels", "--op", "rms_norm", "--chip", "gfx942", "--json", path, *options)


@pytest.mark.long
def test_kernels_are_compared_with_another_revision(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert table(before).status == 0
    made = json.loads(before.read_text())
    kernels = made["kernels"]
    assert {row["chip"] for row in kernels} == {"gfx942"}
    assert all(0 < row["occupancy"] <= 8 for row in kernels)
    same = table(after, "--against", before)
    assert (same.status, "no kernel takes more than before" in same.out) == (0, True)
    has, occupied = kernels[0]["instructions"], kernels[0]["occupancy"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"occupancy": 2 * occupied}, "WORSE rms_norm."),
        ({"occupancy": occupied / 2}, ""),
        ({"spilled_bytes": -1}, "0 bytes are spilled, before -1"),
        ({"instructions": {**has, "loads": 2 * has["loads"]}}, f"load is {has['loads']} B, before"),
        ({"instructions": {**has, "loads": has["loads"] // 2}}, ""),
        ({"instructions": {**has, "products": ["mfma bf16"]}}, "are none, before mfma bf16"),
        ({"kernel": "gone"}, "MISSING gone on gfx942"),
        ({"op": "rope"}, ""),  # what was not asked for is not missing
    ]
    for values, said in changes:  # the first kernel of the other revision had these values
        old = [{**kernels[0], **values}, *kernels[1:]]
        before.write_text(json.dumps({**made, "kernels": old}))
        done = table(after, "--against", before)
        assert (done.status, said in done.out) == (bool(said), True), values


KERNEL = {
    "op": "rms_norm",
    "kernel": "kernel",
    "chip": "gfx942",
    "case": "triton-N1D128-bf16",
    "launch": 1,
    **dict.fromkeys(("registers", "spilled_bytes", "shared_bytes", "num_warps"), 0),
    "occupancy": 8,
    "limited_by": "warps",
    "instructions": Instructions(16, 16).to_json(),
}
OF_NORM = "--op rms_norm --chip gfx942 --against OLD"


@pytest.mark.parametrize(
    ("options", "table", "names"),
    [
        ("--op nobody", {}, "--op 'nobody'"),
        ("--op qkv", {}, "--chip"),
        ("--chip sm_1", {}, "--chip 'sm_1'"),
        ("--against nothing.json", {}, "nothing.json"),
        (OF_NORM, {"triton": "3.0.0"}, "triton 3.0.0"),
        (OF_NORM.replace("rms_norm", "silu_mul"), {}, "silu_mul on gfx942"),
        (OF_NORM.replace("--chip", "--op silu_mul --chip"), {}, "silu_mul on gfx942"),
        (OF_NORM.replace("gfx942", "gfx942 --chip sm_90"), {}, "rms_norm on sm_90"),
        ("--chip sm_90 --against OLD", {}, "any op on sm_90"),
    ],
)
def test_what_cannot_be_compiled_or_compared_is_refused(
    options: str, table: dict[str, str], names: str, tmp_path: Path
) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"triton": version("triton"), "kernels": [KERNEL], **table}))
    assert names in refused("kernels", *options.replace("OLD", str(old)).split())
