"""Settings of a session: saved runs, cards, the terminal, seeds, and the clock of gpu_benchmark.

Each by itself; sessions as a whole are in test_saved_runs.py, test_plugin.py, test_spread.py and
test_gpu_benchmark.py.
"""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tinyllama.harness.gate.watch import BusyError
from tinyllama.harness.measure.clock import NotQueuedError
from tinyllama.harness.plugins import card, gpu_benchmark, showing, suite
from tinyllama.harness.plugins.card import Card
from tinyllama.harness.plugins.gpu_benchmark import DeviceTimer, GpuBenchmark, Point
from tinyllama.harness.plugins.saved_runs import MISSES, SavedRuns

GPUS = [torch.device("cuda", index) for index in range(3)]


# -- saved runs of pytest-benchmark ------------------------------------------------------------


def saved(asked: Any, thresholds: Any = None, *args: str) -> Any:
    closing: list[Any] = []
    option = SimpleNamespace(
        benchmark_compare=asked, benchmark_compare_fail=thresholds, benchmark_storage="here"
    )
    config: Any = SimpleNamespace(
        option=option, invocation_params=SimpleNamespace(args=args), add_cleanup=closing.append
    )
    before = list(warnings.filters)
    try:
        found = SavedRuns(config)
        found.pytest_sessionstart(SimpleNamespace(config=config))  # type: ignore[arg-type]
    finally:
        while closing:
            closing.pop()()
        assert list(warnings.filters) == before, "filters of this session stay in it"
    return found


def test_a_session_that_compares_with_no_saved_run_says_so() -> None:
    assert saved([]).lines() == []
    assert saved(True).lines() == ["no run that pytest-benchmark saved is shown beside this one"]
    for asked, thresholds, option in (
        ("0001", None, "--benchmark-compare '0001'"),
        ("0001", ["min:5%"], "--benchmark-compare-fail"),
        (True, ["min:5%"], "--benchmark-compare-fail"),
    ):
        with pytest.raises(pytest.UsageError) as caught:
            saved(asked, thresholds, "--benchmark-compare-fail=min:5%")
        assert str(caught.value) == (
            f"{option}: no saved run is found in here: save one with --benchmark-autosave"
        )
    with pytest.raises(pytest.UsageError, match="goes with --benchmark-compare: add it"):
        saved([], ["min:5%"])
    with pytest.raises(pytest.UsageError, match="is given 2 times: give it all expressions"):
        saved(True, ["a", "b"], "--benchmark-compare-fail=a", "x", "--benchmark-compare-fail=b")


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("0001", True),
        ("Linux-3/0001", True),
        ("a/b/c", False),
        ("", False),
        ("{tmp}", False),
        ("{tmp}/saved.json", True),
        ("{tmp}/test_one.py", False),
    ],
)
def test_what_names_no_saved_run_is_refused(name: str, fits: bool, tmp_path: Path) -> None:
    for file in ("saved.json", "test_one.py"):
        (tmp_path / file).write_text("")
    named = name.format(tmp=tmp_path)
    message = "no saved run is found" if fits else f"{named!r} names no saved run: give a number"
    with pytest.raises(pytest.UsageError, match=message):
        saved(named)


@pytest.mark.parametrize("thresholds", [[], ["min:5%"]])
def test_what_the_saved_run_has_not_is_said(thresholds: list[str]) -> None:
    found: Any = object.__new__(SavedRuns)
    found.asked, found.thresholds, found.loaded = True, thresholds, []

    def benchmarks(*names: str) -> Any:
        return SimpleNamespace(benchmarks=[SimpleNamespace(fullname=name) for name in names])

    def runs(*several: str) -> list[dict[str, Any]]:
        return [{"benchmarks": [{"fullname": n} for n in names]} for names in several]

    rest = [MISSES] if thresholds else []
    for run in runs("ab", "e"):
        found.pytest_benchmark_compare_machine_info(benchmarks("a", "d", "c"), run)
    said = "1 benchmarks compared with saved runs; 2 not saved, such as c"
    assert found.lines() == [f"{said}; 2 saved and not measured, such as b", *rest]
    found.session = benchmarks("a", "b", "e")
    assert found.lines() == ["3 benchmarks compared with saved runs", *rest]


# -- cards, and the terminal -------------------------------------------------------------------


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPUs that are held; `busy`: those that another process has."""
    found = SimpleNamespace(held=[], waits=[], busy=set())

    @contextlib.contextmanager
    def lock(device: torch.device, wait: float, waiting: Any) -> Iterator[None]:
        found.waits.append(wait)
        if device in found.busy and not wait:
            raise BusyError("busy")
        found.held.append(device)
        yield
        found.held.remove(device)

    monkeypatch.setattr(card, "device_lock", lock)
    return found


def test_a_gpu_is_held_once_until_the_session_ends(locks: Any) -> None:
    held = Card()
    for device in (torch.device("cpu"), GPUS[0], GPUS[0], GPUS[1]):
        held.hold(device)
    assert (locks.held, locks.waits) == (GPUS[:2], [180.0, 180.0])
    held.release()
    assert locks.held == []
    held.hold(GPUS[0])
    assert locks.held == [GPUS[0]], "a card that was released is held again"


@pytest.mark.parametrize(("busy", "taken"), [([], 0), ([0, 1], 2), ([0, 1, 2], 0)])
def test_of_several_gpus_the_first_that_is_free_is_held(
    busy: list[int], taken: int, locks: Any
) -> None:
    locks.busy = {GPUS[index] for index in busy}
    assert Card().hold_one_of(GPUS) == GPUS[taken]
    assert locks.held == [GPUS[taken]]
    tried = min(len(busy) + 1, 3)
    assert locks.waits == [0] * tried + ([180.0] if len(busy) == 3 else [])


def test_gpus_are_those_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert card.gpus() == GPUS


@pytest.mark.parametrize("terminal", [False, True])
def test_a_session_without_tests_shows_its_progress_on_its_terminal(terminal: bool) -> None:
    told: list[Any] = []
    reporter = SimpleNamespace(
        isatty=terminal,
        write_line=lambda line: told.append(line[9:]),
        flush=lambda: told.append("flushed"),
        rewrite=lambda text, erase: told.append((text, erase)),
    )
    manager = SimpleNamespace(get_plugin=lambda name: reporter)
    showing.of_session(SimpleNamespace(pluginmanager=manager)).line("one")  # type: ignore[arg-type]
    assert told == [*([("", True)] if terminal else []), "one", "flushed"]
    nothing = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: None))
    showing.of_session(nothing).line("one")  # type: ignore[arg-type]


def test_a_copy_of_the_output_is_closed_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(os, "close", close := Mock(wraps=os.close))
        progress = showing.beside_tests()
        progress.line("one")
        del progress
        monkeypatch.undo()
    close.assert_called_once()
    assert os.read(read, 100).decode().strip().endswith("one")
    os.close(read)


# -- the device, seeds, and what is left out ---------------------------------------------------


def a_config(**options: Any) -> Any:
    defaults = {"device": None, "soak_seeds": 0, "soak_base": None, "markexpr": ""}
    return SimpleNamespace(option=SimpleNamespace(**{**defaults, **options}), stash={})


def test_a_soak_draws_its_first_seed_or_takes_that_of_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suite.secrets, "randbelow", draw := Mock(return_value=77))
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    for options, base in (
        ({}, 0),
        ({"soak_seeds": 1}, 77),
        ({"soak_seeds": 1, "soak_base": 5}, 5),
        ({"soak_base": 0}, 0),
    ):
        config = a_config(**options)
        suite.pytest_configure(config)
        assert (config.option.soak_base, config.stash) == (base, {suite.LEFT_OUT: Counter()})
    draw.assert_called_once_with(10**6)
    with pytest.raises(pytest.UsageError, match="--soak-seeds is -1: use 0 or more"):
        suite.pytest_configure(a_config(soak_seeds=-1))


@pytest.mark.parametrize(("cores", "count", "threads"), [(16, 4, 4), (2, 3, 1), (None, 1, 1)])
def test_workers_share_the_cores(
    cores: int | None, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    specs = [SimpleNamespace(env={"OTHER": "1"}) for _ in range(count)]
    suite.pytest_xdist_setupnodes(specs)
    assert [one.env for one in specs] == [{"OTHER": "1", "OMP_NUM_THREADS": str(threads)}] * count


@pytest.mark.parametrize(
    ("default", "worker", "index"),
    [("cpu", "gw1", None), ("cuda", "", None), ("cuda", "gw1", 1), ("cuda", "gw13", 1)],
)
def test_each_worker_has_its_own_gpu(
    default: str, worker: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    expected = torch.device(default) if index is None else torch.device(default, index)
    assert suite.worker_device(a_config()) == expected
    assert suite.worker_device(a_config(device="cpu")) == torch.device("cpu")
    with pytest.raises(pytest.UsageError, match="'nonsense' is unknown: use cpu, cuda or cuda:N"):
        suite.worker_device(a_config(device="nonsense"))
    with pytest.raises(pytest.UsageError, match="'cuda:3' is not there: torch sees 3 GPUs; use"):
        suite.worker_device(a_config(device="cuda:3"))


def test_a_tests_seeds_are_those_of_the_soak() -> None:
    for options, seeds in (({}, [0]), ({"soak_seeds": 3, "soak_base": 5}, [5, 6, 7])):
        told: list[Any] = []
        for names in (["seed"], ["other"]):
            metafunc = SimpleNamespace(
                fixturenames=names,
                config=a_config(**options),
                definition=None,
                parametrize=lambda *given, **named: told.append((*given, named)),  # noqa: B023
            )
            suite.pytest_generate_tests(metafunc)  # type: ignore[arg-type]
        named = {"ids": [f"seed{n}" for n in seeds], "scope": "session"}
        assert told == [("seed", seeds, named)]


def test_only_tests_of_a_suite_of_ours_are_changed(tmp_path: Path) -> None:
    config = a_config()
    here = SimpleNamespace(path=tmp_path / "test_a.py")
    assert suite.covers(config, here)  # type: ignore[arg-type]
    config.stash[suite.OWN] = tmp_path
    assert suite.covers(config, here)  # type: ignore[arg-type]
    config.stash[suite.OWN] = tmp_path / "other"
    assert not suite.covers(config, here)  # type: ignore[arg-type]
    assert suite._reason_to_deselect(config, here) is None  # type: ignore[arg-type]


def test_the_summary_has_a_section_that_counts_each_reason() -> None:
    told: list[Any] = []
    tuples = [("f", 1, "Skipped: no card")] * 3
    reporter = SimpleNamespace(
        stats={
            "skipped": [
                *(SimpleNamespace(longrepr=one) for one in tuples),
                SimpleNamespace(longrepr="text"),
            ]
        },
        section=lambda title: told.append(f"== {title}"),
        line=told.append,
    )
    config = a_config()
    config.stash[suite.LEFT_OUT] = Counter({"slow": 2})
    suite.pytest_terminal_summary(reporter, config)
    assert told == [
        "== left out",
        "6 cases left out",
        "     3  no card",
        "     2  slow",
        "     1  text",
    ]
    assert config.stash[suite.LEFT_OUT] == {"slow": 2}


# -- gpu_benchmark -----------------------------------------------------------------------------


def test_a_call_is_warmed_up_and_the_device_kept_busy_four_times_as_long() -> None:
    for spin, expected in ((0.1, 2.0), (3.0, 3.0)):
        hosts = [0.1, 0.5, 0.2, 0.3, 0.4, 9.0]
        read: list[Any] = []

        def one(call: Any, before: Any) -> Any:
            read.append((call, before))  # noqa: B023
            return SimpleNamespace(host=hosts[len(read) - 1])  # noqa: B023

        timer: Any = object.__new__(DeviceTimer)
        timer.clock = SimpleNamespace(spin_seconds=spin, read=one)
        timer.prepare("call", "before")
        assert read == [("call", "before")] * 5
        assert timer.clock.spin_seconds == expected
    assert (gpu_benchmark.ROUNDS, gpu_benchmark.WARM_UP, gpu_benchmark.MARGIN) == (30, 5, 4.0)


@pytest.mark.parametrize(("device", "seconds"), [(0.5, 0.4), (0.1, 0.0), (0.05, 0.0)])
def test_a_time_is_the_device_s_without_the_clock_s_own(device: float, seconds: float) -> None:
    reading = SimpleNamespace(device=device, host=0.002, queued=True)
    point: Any = object.__new__(Point)
    point.clock = SimpleNamespace(overhead=0.1)
    point.stamp = SimpleNamespace(since=lambda earlier: reading)
    assert point - SimpleNamespace(stamp=None) == pytest.approx(seconds)
    reading.queued = False
    with pytest.raises(NotQueuedError, match=r"^enqueueing took 2\.00 ms, and the device had"):
        point - SimpleNamespace(stamp=None)


@pytest.mark.parametrize("enabled", [False, True])
def test_each_round_has_copies_of_its_tensors(enabled: bool) -> None:
    told: list[str] = []
    queue = SimpleNamespace(synchronize=lambda: told.append("waited"))
    timer = SimpleNamespace(clock=SimpleNamespace(queue=queue), prepare=None)
    given = torch.arange(6.0).view(2, 3).T.requires_grad_()
    seen: list[Any] = []

    def prepare(call: Any, before: Any) -> None:
        for _ in range(2):
            before()
            call()

    def pedantic(function: Any, setup: Any, rounds: int, warmup_rounds: int) -> str:
        told.append(f"{rounds} and {warmup_rounds}")
        args, kwargs = setup()
        function(*args, **kwargs)
        return "result"

    def work(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    timer.prepare = prepare
    fixture = SimpleNamespace(enabled=enabled, pedantic=pedantic, extra_info="theirs")
    made = GpuBenchmark(fixture, timer, lambda: told.append("flushed"))  # type: ignore[arg-type]
    assert made(work, given, [given, 1], named={"a": given}) == "result"
    assert made.extra_info == "theirs"
    once = ["flushed", "waited"]
    assert told == [*once * 2 * enabled, "30 and 5", *once]
    places = set()
    for (first, (inner, one)), kwargs in seen:
        for copy in (first, inner, kwargs["named"]["a"]):
            assert torch.equal(copy, given)
            assert (copy.stride(), copy.requires_grad) == (given.stride(), True)
            places.add(copy.data_ptr())
        assert one == 1
    assert given.data_ptr() not in places
