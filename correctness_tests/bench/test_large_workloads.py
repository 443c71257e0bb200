"""Models that fill a card: what is compared there, and how the longest sequence is found."""

import contextlib
import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from tinyllama.bench import longest
from tinyllama.bench.contender import Contender
from tinyllama.bench.measure import CONTENDERS
from tinyllama.bench.workloads import not_beside
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.records.entries import LongestEntry


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

    def measured(contender: object, device: object, length: int) -> dict:
        tried.append(length)
        if length > limit:
            raise WorkerError("out of memory")
        return {"seconds": 1.0}

    total = peak(60_000) / longest.ROOM
    monkeypatch.setattr(longest, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    found = longest._longest(ENTRY, longest.SELECTIVE, torch.device("cuda"), PEAKS, enough)
    assert found.seq_len == tried[-1] == expected
    assert found.bytes_per_token == 10**6
    assert all(length > limit for length in tried[:-1])


def peak(tokens: int) -> int:
    return 10**9 + 10**6 * tokens


ENTRY = LongestEntry(
    name="x", workload="large", precision="bf16", contender="x", role="tier", batch_size=1
)
PEAKS = [peak(tokens) for tokens in longest.SHORTER]


def test_a_length_that_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(contender: object, device: object, length: int) -> dict:
        raise WorkerError("out of memory")

    monkeypatch.setattr(longest, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 30 * 10**9))
    with pytest.raises(WorkerError, match="out of memory"):
        longest._longest(ENTRY, longest.SELECTIVE, torch.device("cuda"), PEAKS, math.inf)


class MadeUpWorker(contextlib.AbstractContextManager):
    """Of a contender; it cannot make what is named ``broken``, nor verify ``wrong``."""

    seen: ClassVar[list[tuple[str, int, str]]] = []

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name

    def make(self, key: str, factory: str, seq_len: int, **arguments: object) -> None:
        self.tokens = seq_len
        if self.name == "broken":
            raise WorkerError("does not compile")

    def call(self, key: str, method: str) -> dict:
        self.seen.append((self.name, self.tokens, method))
        if (self.name, method) == ("wrong", "verify"):
            raise WorkerError("a gradient is absent")
        return {"peak_bytes": peak(self.tokens)}

    def drop(self, key: str) -> None:
        self.seen.append((self.name, self.tokens, "drop"))

    def close(self) -> None:
        self.seen.append((self.name, self.tokens, "end"))

    def __exit__(self, *_: object) -> None:
        self.close()


def test_shorter_lengths_are_measured_and_the_first_is_verified_when_all_have_their_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Contender, "worker", lambda one: MadeUpWorker(one))
    monkeypatch.setattr(MadeUpWorker, "seen", [])
    named = [replace(longest.COMPILED, name=name) for name in ("right", "broken", "wrong")]
    found = longest._grown(named, torch.device("cuda"))
    assert found["right"] == PEAKS
    assert [str(found[name]) for name in ("broken", "wrong")] == [
        "does not compile",
        "a gradient is absent",
    ]
    seen = MadeUpWorker.seen
    verified = [(name, tokens) for name, tokens, what in seen if what == "verify"]
    assert verified == [("right", longest.SHORTER[0]), ("wrong", longest.SHORTER[0])]
    last_peak = max(i for i, (*_, what) in enumerate(seen) if what == "memory")
    assert last_peak < min(i for i, (*_, what) in enumerate(seen) if what == "verify")
    ended = {one for one in seen if one[2] == "end"}
    assert len(ended) == 2 * len(named), "no process is left"


def test_a_large_workload_compares_what_fits_beside_each_other() -> None:
    cuda = torch.device("cuda")
    for name in ("v1", "v3", "hf-eager", "compile"):
        contender = next(one for one in CONTENDERS if one.name == name)
        assert "v4, hf-compile, floor are compared" in str(contender.cannot(cuda, "large-bf16"))
    assert not_beside("v1", "small-bf16") is None
    assert [name for name in ("v4", "hf-compile", "floor") if not_beside(name, "large-bf16")] == []
