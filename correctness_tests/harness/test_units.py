"""Occupancy, overlap and interruptions, each by its definition."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton")

from tinyllama.harness.kernels.occupancy import Occupancy, occupancy
from tinyllama.harness.machine.interrupts import held_interrupts, sigterm_as_interrupt
from tinyllama.harness.measure.overlap import overlap_of

# -- occupancy ------------------------------------------------------------------------------------


@dataclass
class Chip:
    name: str


@dataclass
class Taken:
    """Of `Resources`, what occupancy reads."""

    chip: Chip
    registers: int
    num_warps: int
    shared: int


@pytest.mark.parametrize(
    ("chip", "registers", "warps", "shared", "resident", "limit"),
    [
        # sm_90: 4 partitions of 16 warps and 512 rows; 228 KiB; 32 programs.
        ("sm_90", 32, 4, 0, 16, "warps"),
        ("sm_90", 33, 4, 0, 12, "registers"),  # 40 rows, so 12 programs a partition's four warps
        ("sm_90", 255, 8, 0, 2, "registers"),
        ("sm_90", 88, 1, 0, 5, "registers"),  # the rest of a partition is of no use to another
        ("sm_90", 0, 1, 0, 8, "programs"),  # 32 programs of one warp
        ("sm_90", 32, 8, 100 * 1024, 4, "shared memory"),  # two programs of 8 warps
        ("sm_90", 16, 4, 113 * 1024, 2, "shared memory"),
        ("sm_90", 16, 4, 113 * 1024 + 1, 1, "shared memory"),
        ("sm_100", 16, 4, 113 * 1024, 2, "shared memory"),
        ("sm_80", 16, 4, 81 * 1024, 2, "shared memory"),
        ("sm_80", 16, 4, 81 * 1024 + 1, 1, "shared memory"),
        ("sm_80", 128, 4, 1024, 4, "registers"),
        # CDNA: 8 waves a SIMD; nothing is reserved for a program.
        ("gfx942", 64, 4, 0, 8, "warps"),
        ("gfx942", 65, 4, 0, 7, "registers"),
        ("gfx942", 8, 4, 32 * 1024, 2, "shared memory"),
        ("gfx90a", 8, 4, 32 * 1024 + 1, 1, "shared memory"),
        ("gfx950", 8, 8, 40 * 1024, 8, "warps"),
        ("gfx950", 8, 8, 40 * 1024 + 1, 6, "shared memory"),
    ],
)
def test_what_a_unit_holds_is_what_its_scarcest_part_allows(
    chip: str, registers: int, warps: int, shared: int, resident: float, limit: str
) -> None:
    found = occupancy(Taken(Chip(chip), registers, warps, shared))  # type: ignore[arg-type]
    most = 8 if chip.startswith("gfx") else 16
    assert found == Occupancy(resident, most, limit)
    assert str(found) == f"{resident:g} of {most} ({limit})"


# -- what a device can do -------------------------------------------------------------------------


# -- ceilings and overlap -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "collective", "hidden"),
    [
        ([], 0, 0),
        ([("gemm", 0, 5)], 0, 0),
        ([("ncclAllReduce", 0, 5)], 5, 0),
        ([("ncclAllReduce", 0, 5), ("gemm", 3, 9)], 5, 2),
        ([("rccl_sum", 0, 5), ("rccl_max", 4, 8), ("gemm", 1, 2), ("add", 7, 9)], 8, 2),
        ([("rcclGenericKernel", 1, 3), ("gemm", 0, 2), ("copy_kernel", 2, 4)], 2, 2),
    ],
)
def test_what_lies_under_computation(
    kernels: list[tuple[str, float, float]], collective: float, hidden: float
) -> None:
    found = overlap_of(kernels)
    assert (found.collective, found.hidden) == pytest.approx((collective * 1e-6, hidden * 1e-6))
    expected = hidden / collective if collective else None
    assert found.share == (None if expected is None else pytest.approx(expected))


# -- where Triton has no Gluon --------------------------------------------------------------------


# -- interruptions --------------------------------------------------------------------------------


def test_interruptions_are_held_until_the_end_and_handlers_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    came: list[int] = []
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in numbers}
    own = [signal.getsignal(one) for one in numbers]
    try:
        for sent in ([], [signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]):
            came.clear()
            with held_interrupts() as held:
                for one in sent:
                    signal.raise_signal(one)
                assert (held, came) == (sent, [])
            assert came == sent[:1], "one ends the program"
            assert [signal.getsignal(one) for one in numbers] == own
        came.clear()
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"), sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
        assert [signal.getsignal(one) for one in numbers] == own
        found: list[Any] = []

        def elsewhere() -> None:
            with held_interrupts() as held, sigterm_as_interrupt():
                found.extend([held, *(signal.getsignal(one) for one in numbers)])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found == [[], *own], "only the main thread receives signals"
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
