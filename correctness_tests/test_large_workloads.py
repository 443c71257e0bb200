"""Models that fill a card: what is compared there, and how the longest sequence is found."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from perf_tests import test_longest as longest
from perf_tests.measure import CONTENDERS
from perf_tests.workloads import not_beside
from tinyllama.harness.worker import WorkerError


@pytest.mark.parametrize(
    ("limit", "enough", "expected"),
    [(60_000, math.inf, 59_392), (55_000, math.inf, 53_248), (90_000, 30_000, 29_696)],
    ids=["as predicted", "less than predicted", "no more than enough"],
)
def test_the_longest_sequence_is_the_last_that_fits(
    monkeypatch: pytest.MonkeyPatch, limit: int, enough: float, expected: int
) -> None:
    """A card on which 60,000 tokens are predicted to fit, and ``limit`` do."""
    tried = []

    def measured(contender: object, device: object, length: int, verify: bool = False) -> dict:
        tried.append((length, verify))
        if length > limit:
            raise WorkerError("out of memory")
        return {"seq_len": length, "peak_bytes": 10**9 + 10**6 * length}

    total = (10**9 + 10**6 * 60_000) / longest.ROOM
    monkeypatch.setattr(longest, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    found = longest._longest(longest.SELECTIVE, torch.device("cuda"), enough)
    assert found["seq_len"] == expected
    assert found["bytes_per_token"] == 10**6
    assert tried[:2] == [(4096, True), (16384, False)]
    if not any(length > limit for length, _ in tried):
        return
    assert tried[-2][0] > limit >= expected


def test_a_length_that_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(contender: object, device: object, length: int, verify: bool = False) -> dict:
        tried.append(length)
        if len(tried) > 2:
            raise WorkerError("out of memory")
        return {"seq_len": length, "peak_bytes": 10**9 + 10**6 * length}

    tried: list[int] = []
    monkeypatch.setattr(longest, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 30 * 10**9))
    with pytest.raises(WorkerError, match="out of memory"):
        longest._longest(longest.SELECTIVE, torch.device("cuda"), math.inf)


def test_a_large_workload_compares_what_fits_beside_each_other() -> None:
    cuda = torch.device("cuda")
    for name in ("v1", "v2", "hf-eager", "compile"):
        contender = next(one for one in CONTENDERS if one.name == name)
        assert "v3, hf-compile, floor are compared" in str(contender.cannot(cuda, "large-bf16"))
    assert not_beside("v1", "small-bf16") is None
    assert [name for name in ("v3", "hf-compile", "floor") if not_beside(name, "large-bf16")] == []
