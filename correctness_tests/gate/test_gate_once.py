"""Kernels are compiled once for a side, and the candidate takes what is the base's too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinyllama.harness.gate.once import OnlyOnce
from tinyllama.harness.machine.worker import TRITON_CACHE


class Compiler:
    """In the place of Triton's: keeps what it compiles in the folder of its cache, and says where
    it did. seconds: that it takes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.compiled: list[str] = []

    def of(self, name: str) -> Callable[[], str]:
        def compile() -> str:
            folder = Path(os.environ[TRITON_CACHE])
            if not (folder / name).exists():
                self.compiled.append(folder.name)
                time.sleep(self.seconds)
                (folder / name).touch()
            return f"{folder.name}/{name}"

        return compile


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRITON_CACHE, "elsewhere")


def test_who_comes_later_waits_and_counts_the_seconds_of_who_compiled(tmp_path: Path) -> None:
    compiler, each = Compiler(0.2), [OnlyOnce(tmp_path / "base") for _ in range(3)]
    began = time.perf_counter()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda one: one.compiled("x", compiler.of("x")), each))
    took = time.perf_counter() - began
    assert found == ["base/x"] * 3
    assert compiler.compiled == ["base"]
    assert sorted(abs(one.more) > 0.1 for one in each) == [False] * 3, "all waited as long"
    late = OnlyOnce(tmp_path / "base")
    late.compiled("x", compiler.of("x"))
    assert 0.15 < late.more < took


def test_the_candidate_takes_what_the_base_compiled_and_the_base_nothing(tmp_path: Path) -> None:
    compiler = Compiler(0.2)
    base = OnlyOnce(tmp_path / "base")
    base.compiled("x", compiler.of("x"))
    candidate = OnlyOnce(tmp_path / "candidate", tmp_path / "base")
    assert candidate.compiled("x", compiler.of("x")) == "base/x"
    assert candidate.more > 0.15, "the seconds of the base"
    assert candidate.compiled("y", compiler.of("y")) == "candidate/y"
    os.environ[TRITON_CACHE] = str(tmp_path / "base")  # in its own process
    assert base.compiled("y", compiler.of("y")) == "base/y"
    assert compiler.compiled == ["base", "candidate", "base"]


def test_what_failed_to_compile_is_tried_by_the_next(tmp_path: Path) -> None:
    compiler, one = Compiler(), OnlyOnce(tmp_path / "base")

    def fails() -> str:
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such"):
        one.compiled("x", fails)
    candidate = OnlyOnce(tmp_path / "candidate", tmp_path / "base")
    assert candidate.compiled("x", compiler.of("x")) == "candidate/x"
