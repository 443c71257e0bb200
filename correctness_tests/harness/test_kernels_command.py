"""What kernels take of a chip: occupancy by the makers' tables, and a revision that takes more."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from correctness_tests.support.commands import Done, printed, refused, tinyllama
from tinyllama.cli import kernels as kernels_command
from tinyllama.harness.kernels.instructions import Instructions
from tinyllama.harness.kernels.occupancy import UNITS, occupancy
from tinyllama.harness.kernels.resources import CHIPS, Compilation, Resources


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


@pytest.mark.parametrize(
    ("chips", "warps", "programs", "shared", "reserved"),
    [
        (["gfx90a", "gfx942"], 32, None, 65536, 0),
        (["gfx950"], 32, None, 163840, 0),
        (["sm_80"], 64, 32, 167936, 1024),
        (["sm_90", "sm_100"], 64, 32, 233472, 1024),
    ],
)
def test_units_hold_what_their_manuals_say(
    chips: list[str], warps: int, programs: int | None, shared: int, reserved: int
) -> None:
    """Of a whole unit: warps, blocks, bytes of shared memory, and of these each block's own."""
    for chip in chips:
        unit = UNITS[chip]
        assert (unit.warps * 4, unit.programs) == (warps, programs)
        assert (unit.shared, unit.reserved) == (shared, reserved)
        assert CHIPS[chip].shared == shared - reserved, "what one block may have"


def test_a_chip_that_is_not_described_has_none() -> None:
    assert set(CHIPS) - set(UNITS) == {"gfx908"}
    assert occupancy(taking("gfx908", 64)) is None


def table(path: Path, *options: str | Path) -> Done:
    return tinyllama("kernels", "--op", "rms_norm", "--chip", "gfx942", "--json", path, *options)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "nobody"], "--op 'nobody' does not exist: use one of"),
        (["--op", "qkv"], "no kernel of qkv compiles for gfx942, sm_90: choose with"),
        (["--chip", "sm_1"], "--chip 'sm_1' does not exist: use one of"),
        (["--against", "nothing.json"], "--against 'nothing.json' is no table of this command"),
    ],
)
def test_bad_values(options: list[str], message: str) -> None:
    assert message in refused("kernels", *options)


def test_a_table_of_another_triton_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"triton": "3.0.0", "kernels": []}))
    line = refused("kernels", "--op", "rms_norm", "--against", str(old))
    assert "made with triton 3.0.0" in line


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


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ("--op silu_mul --chip gfx942", "silu_mul on gfx942"),
        ("--op rms_norm --op silu_mul --chip gfx942", "silu_mul on gfx942"),
        ("--op rms_norm --chip sm_90", "rms_norm on sm_90"),
        ("--op rms_norm --chip gfx942 --chip sm_90", "rms_norm on sm_90"),
        ("--chip sm_90", "any op on sm_90"),
    ],
)
def test_a_table_without_what_is_asked_for_is_refused_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, absent: str
) -> None:
    def no_compiling(*_: Any) -> Any:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(kernels_command, "_rows", no_compiling)
    old = tmp_path / "old.json"
    for kernels in ([KERNEL], []):
        old.write_text(json.dumps({"triton": kernels_command._triton(), "kernels": kernels}))
        line = refused("kernels", *options.split(), "--against", str(old))
        if kernels:
            assert f"--against '{old}' has no kernel of {absent}: make it with --json" in line


def test_products_in_tf32_are_shown_where_they_are_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chip without tf32, and a kernel without products, give no row of it."""
    monkeypatch.setattr(Compilation, "run", lambda self: taking(self.chip.name, 64))
    path = tmp_path / "now.json"
    for op, chip, kinds in (
        ("attention", "sm_90", {"bf16", "fp32", "tf32"}),
        ("attention", "gfx90a", {"bf16", "fp32"}),
        ("rms_norm", "sm_90", {"bf16", "fp32"}),
    ):
        printed("kernels", "--op", op, "--chip", chip, "--json", path)
        rows = json.loads(path.read_text())["kernels"]
        assert {row["case"].rpartition("-")[2] for row in rows} == kinds
        places = [(row["case"], row["kernel"], row["launch"]) for row in rows]
        assert len(set(places)) == len(places)
