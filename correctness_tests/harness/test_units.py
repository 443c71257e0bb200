"""Overlap and interruptions, each by its definition."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from tinyllama.harness.machine.interrupts import held_interrupts, sigterm_as_interrupt
from tinyllama.harness.measure.overlap import overlap_of


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
