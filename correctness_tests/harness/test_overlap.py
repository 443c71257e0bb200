"""How much of the collectives' time lies under computation."""

from __future__ import annotations

import pytest

from tinyllama.harness.measure.overlap import overlap_of


def test_what_lies_under_other_kernels_is_hidden() -> None:
    """A collective of 4 us, of which 1 us lies under a product; a second one under two kernels."""
    found = overlap_of(
        [
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.0, 4.0),
            ("product_kernel", 3.0, 6.0),
            ("rcclGenericKernel", 10.0, 12.0),
            ("product_kernel", 9.0, 11.0),
            ("copy_kernel", 11.0, 13.0),
            ("Memcpy PtoP (Device -> Device)", 20.0, 21.0),
            ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", 21.0, 22.0),
            ("Memcpy DtoD (Device -> Device)", 21.0, 23.0),
        ]
    )
    assert found.collective == pytest.approx(8e-6)
    assert found.hidden == pytest.approx(4e-6)
    assert found.share == pytest.approx(0.5)


def test_without_a_collective_there_is_no_share() -> None:
    assert overlap_of([("product_kernel", 0.0, 1.0)]).share is None
