"""What kernels take of a chip: occupancy by the makers' tables, and a revision that takes more."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import Done, refused, tinyllama
from tinyllama.harness.kernels.resources import CHIPS, Occupancy, Resources

KIB = 1024


@pytest.mark.parametrize(
    ("chip", "registers", "warps", "shared", "resident", "limit"),
    [
        # sm_90: 4 partitions of 16 warps and 512 rows; 228 KiB; 32 programs.
        ("sm_90", 32, 4, 0, 16, "warps"),
        ("sm_90", 33, 4, 0, 12, "registers"),  # 40 rows, so 12 programs a partition's four warps
        ("sm_90", 88, 1, 0, 5, "registers"),  # the rest of a partition is of no use to another
        ("sm_90", 0, 1, 0, 8, "programs"),  # 32 programs of one warp
        ("sm_90", 32, 8, 100 * KIB, 4, "shared memory"),  # two programs of 8 warps
        ("sm_80", 16, 4, 81 * KIB, 2, "shared memory"),
        ("sm_80", 16, 4, 81 * KIB + 1, 1, "shared memory"),
        # The occupancy table of CDNA 2 and 3 (AMD lab notes, register pressure): 8 waves a SIMD.
        ("gfx942", 64, 4, 0, 8, "warps"),
        ("gfx942", 65, 4, 0, 7, "registers"),
        ("gfx942", 128, 4, 0, 4, "registers"),
        ("gfx90a", 257, 4, 0, 1, "registers"),
        ("gfx90a", 8, 4, 32 * KIB + 1, 1, "shared memory"),
        ("gfx950", 8, 8, 40 * KIB + 1, 6, "shared memory"),
    ],
)
def test_a_unit_holds_what_its_scarcest_part_allows(
    chip: str, registers: int, warps: int, shared: int, resident: float, limit: str
) -> None:
    taken = Resources("kernel", CHIPS[chip], warps, registers, spilled=0, shared=shared)
    assert taken.occupancy == Occupancy(resident, 8 if chip.startswith("gfx") else 16, limit)


def table(path: Path, *options: str | Path) -> Done:
    return tinyllama("kernels", "--op", "rms_norm", "--chip", "gfx942", "--json", path, *options)


@pytest.mark.long
def test_kernels_are_compared_with_another_revision(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert table(before).status == 0
    stored = json.loads(before.read_text())
    first, *others = stored["kernels"]
    assert first["chip"] == "gfx942"
    same = table(after, "--against", before)
    assert (same.status, "no kernel takes more than before" in same.out) == (0, True)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"occupancy": 2 * first["occupancy"]}, "WORSE rms_norm."),
        ({"occupancy": first["occupancy"] / 2}, ""),
        ({"spilled_bytes": -1}, "0 bytes are spilled, before -1"),
        ({"loads": 2 * first["loads"]}, f"load is {first['loads']} B, before"),
        ({"loads": first["loads"] // 2}, ""),
        ({"products": ["mfma bf16"]}, "are none, before mfma bf16"),
        ({"kernel": "gone"}, "MISSING gone on gfx942"),
        ({"op": "rope"}, ""),  # what was not asked for is not missing
    ]
    for values, said in changes:  # the first kernel of the other revision had these values
        before.write_text(json.dumps({**stored, "kernels": [{**first, **values}, *others]}))
        done = table(after, "--against", before)
        assert (done.status, said in done.out) == (bool(said), True), values


KERNEL = {
    **dict.fromkeys(("registers", "spilled_bytes", "shared_bytes", "num_warps"), 0),
    **{"op": "rms_norm", "kernel": "kernel", "chip": "gfx942", "case": "triton-N1D128-bf16"},
    **{"launch": 1, "occupancy": 8, "limited_by": "warps"},
    **{"loads": 16, "stores": 16, "products": []},
}
OF_NORM = "--op rms_norm --chip gfx942 --against OLD"


@pytest.mark.parametrize(
    ("options", "table", "named"),
    [
        ("--op nobody", {}, "--op 'nobody'"),
        ("--op qkv", {}, "--chip"),
        ("--chip sm_1", {}, "--chip 'sm_1'"),
        ("--against nothing.json", {}, "nothing.json"),
        (OF_NORM, {"triton": "3.0.0"}, "triton 3.0.0"),
        (OF_NORM, {"kernels": [{}]}, "is no table of this command"),
        (OF_NORM.replace("rms_norm", "silu_mul"), {}, "silu_mul on gfx942"),
        ("--chip sm_90 --against OLD", {}, "any op on sm_90"),
    ],
)
def test_what_cannot_be_compiled_or_compared_is_refused(
    options: str, table: dict[str, Any], named: str, tmp_path: Path
) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"triton": version("triton"), "kernels": [KERNEL], **table}))
    assert named in refused("kernels", *options.replace("OLD", str(old)).split())
