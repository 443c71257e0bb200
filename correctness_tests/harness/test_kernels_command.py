"""What kernels take of a chip: occupancy by the makers' tables, and a revision that takes more."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import Done, refused, tinyllama
from tinyllama.harness.kernels.instructions import Instructions
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
