"""Both sides of a gate, answering from a script: a whole comparison in milliseconds.

    script = Script("a", "b")
    script.slower("a", device_seconds=1.03)
    script.on(BASE, "turn", WorkerError("it died"), launch=3)
    assert script.run()["a"].outcome is Outcome.SLOWER

The pairs and the session are those of the gate; of a worker only the answers are made up. Unless a
test says otherwise, all benchmarks exist and are right on both sides, run different code, and take
the same time but for noise.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from tinyllama.harness.gate.benchmarks import ON_CPU, ON_GPU, Benchmark, Registered
from tinyllama.harness.gate.calibrate import Block, Noise
from tinyllama.harness.gate.device_guard import BusyError
from tinyllama.harness.gate.metric import ALL_WORK, DEVICE, HOST
from tinyllama.harness.gate.pair import BASE, CANDIDATE, Effort, Pair, Tree
from tinyllama.harness.gate.schedule import close_pairs, open_all
from tinyllama.harness.gate.session import Session
from tinyllama.harness.gate.setting import Affected, Setting
from tinyllama.harness.gate.verification import Proof
from tinyllama.harness.gate.waivers import Waiver, Waivers
from tinyllama.harness.machine.worker import WorkerError
from tinyllama.harness.measure.op_contender import Timed
from tinyllama.harness.measure.right_results import WrongResultError
from tinyllama.harness.records.verdict import Outcome, Verdict, worst

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIDES = (BASE, CANDIDATE)


REGISTERED = Registered("ops")
VERSIONS = {"torch": "3.1", "triton": "4.2"}
COUNTS = {"peak_bytes": 1000, "kernels": 3, "copies": 1, "host_syncs": 2}
QUIET = 0.002  # between blocks: 3% is found, and equal sides are told in a few
SECONDS = {DEVICE: 5e-6, HOST: 1e-4}  # of a call of the base


@dataclass(frozen=True)
class Rule:
    """What a side answers to a method. launch: only of the pair with that number, from 1."""

    side: str
    method: str
    answer: Any
    benchmark: str | None
    launch: int | None
    when: Callable[[], bool]


class Watching:
    """Tells one after the other of some reasons, then none. busy: why the device cannot be held, or
    is not idle, by the name of the method."""

    def __init__(self, *reasons: str | None, **busy: str) -> None:
        self.reasons, self.busy = list(reasons), busy
        self.pids: list[Sequence[int]] = []
        self.asked: list[str] = []

    def hold(self) -> None:
        self._ask("hold")

    def wait_until_idle(self) -> None:
        self._ask("wait_until_idle")

    def _ask(self, method: str) -> None:
        self.asked.append(method)
        if method in self.busy:
            raise BusyError(self.busy[method])

    def during(self, pids: Sequence[int]) -> str | None:
        self.pids.append(pids)
        return self.reasons.pop(0) if self.reasons else None


class Script:
    """What both sides answer, and the comparison of them. noise: of a block, its deviation."""

    def __init__(
        self, *names: str, device: torch.device = GPU, noise: float = QUIET, seed: int = 0
    ) -> None:
        self.device, self.noise = device, noise
        self.random: dict[str, np.random.Generator] = {}  # by benchmark: pairs ask in any order
        self.seed = seed
        self.names = {side: list(names or ("a",)) for side in SIDES}
        slowdowns = ON_CPU if device.type == "cpu" else ON_GPU
        self.slowdowns = {side: dict(slowdowns) for side in SIDES}
        self.identity: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
        self.ratios: dict[tuple[str, str], float] = {}
        self.works: dict[tuple[str, str], float] = {}  # of all work beside the figure
        self.edited_ops: set[str] = set()  # benchmarks of which an own file differs
        self.untimed: dict[str, str] = {}  # why a benchmark has no time here
        self.rules: list[Rule] = []
        self.sources: dict[str, dict[str, tuple[str, str]]] = {side: {} for side in SIDES}
        self.states: dict[tuple[str, str], dict[str, float]] = {}  # of one benchmark
        self.factories: set[str] = set()  # benchmarks of something else than an op
        self.further: set[str] = set()  # benchmarks of cases between the smallest and the largest
        self.bars: dict[tuple[str, str], float] = {}  # on a layout, of one benchmark
        self.accepted: list[Waiver] = []
        self.accepted_by_base: list[Waiver] = []
        self.watch = Watching()
        self.launches = 0
        self.requests: list[
            tuple[int, str, str, tuple[Any, ...]]
        ] = []  # launch, side, method, args
        self.said: list[str] = []
        self.session: Session
        self.verdicts: list[Verdict] = []

    # -- what is scripted -------------------------------------------------------------------

    def on(
        self,
        side: str,
        method: str,
        answer: Any,
        benchmark: str | None = None,
        *,
        launch: int | None = None,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        """Answer so; raise what is an exception, ask what can be called. The last rule counts."""
        self.rules.insert(0, Rule(side, method, answer, benchmark, launch, when))

    def slower(self, benchmark: str, **ratios: float) -> None:
        """How many times longer the candidate takes, by metric."""
        self.ratios |= {(benchmark, metric): ratio for metric, ratio in ratios.items()}

    def hidden(self, benchmark: str, **ratios: float) -> None:
        """How many times as much all work the candidate's calls are as what their figure says."""
        self.works |= {(benchmark, metric): ratio for metric, ratio in ratios.items()}

    def alike(self, benchmark: str, *, host_only: bool = False) -> None:
        """The same source on both sides; host_only: but for the bodies of kernels, and those are
        compiled to the same."""
        for side in SIDES:
            self.sources[side][benchmark] = side if host_only else "same", "same"
        if host_only:
            for side in SIDES:
                self.on(side, "compiled", ["code"], benchmark)

    def counts(self, benchmark: str, **more: int) -> None:
        """How many more of something the candidate counts than the base."""
        counted = {name: n + more.get(name, 0) for name, n in COUNTS.items()}
        self.on(CANDIDATE, "counted", counted, benchmark)

    def accept(self, benchmark: str, metric: Any, amount: float) -> None:
        self.accepted.append(Waiver(benchmark, "why", "9.0", metric, amount))

    @property
    def confirming(self) -> bool:
        return any("confirmed" in line for line in self.said)

    @property
    def confirmed(self) -> bool:
        states = self.session.compared.values()
        return any(state.again and not state.unconfirmed for state in states)

    # -- the comparison ---------------------------------------------------------------------

    def run(self, **changes: Any) -> dict[str, Verdict]:
        """The verdicts by name, of which each is there once."""
        self.session = Session(self.setting(**changes))
        self.verdicts = self.session.run()
        verdicts = {verdict.name: verdict for verdict in self.verdicts}
        assert len(verdicts) == len(self.verdicts), self.verdicts
        return verdicts

    def ends(self, outcome: Outcome, *said: str, name: str = "a", **changes: Any) -> Verdict:
        """Run. So it is with one, and with the status; all of this is said of it. Where one of
        several benchmarks is meant, the others are the same."""
        verdict = self.run(**changes)[name]
        assert verdict.outcome is outcome, verdict
        assert all(text in verdict.text for text in said), verdict
        assert self.status == outcome.status, self.verdicts
        other_verdicts = [
            other_verdict for other_verdict in self.verdicts if other_verdict is not verdict
        ]
        assert name not in self.session.compared or {o.outcome for o in other_verdicts} <= {
            Outcome.SAME
        }
        return verdict

    @property
    def status(self) -> int:
        """With which pytest would end."""
        return worst(verdict.outcome for verdict in self.verdicts).status

    def setting(self, **changes: Any) -> Setting:
        defaults: dict[str, Any] = {
            "base": _tree(BASE),
            "candidate": _tree(CANDIDATE),
            "device": self.device,
            "noise": Noise("a device"),
            "accepted": Waivers(
                Path("accepted.toml"), tuple(self.accepted), tuple(self.accepted_by_base)
            ),
            "guard": self.watch,
            "affected": self.affected,
            "effort": self.effort,
            "say": self.said.append,
            "pairs": self.pairs,
        }
        return Setting(**{**defaults, **changes})

    @contextmanager
    def pairs(
        self, trees: Sequence[Tree], device: torch.device, count: int = 1
    ) -> Iterator[list[Pair]]:
        """In the place of `opened`."""
        pairs: list[Pair] = [ScriptedPair(self, trees, device) for _ in range(count)]
        try:
            open_all(pairs)
            yield pairs
        finally:
            close_pairs(pairs)

    @property
    def effort(self) -> Effort:
        return replace(Effort.on(self.device), pairs=2, repeated=2)

    def affected(self, benchmarks: Sequence[Benchmark]) -> dict[str, Affected]:
        """What differs by the sources of both sides."""
        affected = {}
        for name in (benchmark.name for benchmark in benchmarks):
            base, candidate = (self.sources[s].get(name, (s, s)) for s in SIDES)
            if base[0] != candidate[0]:
                affected[name] = Affected(
                    "f.py differs", base[1] != candidate[1], name in self.edited_ops
                )
        return affected

    # -- what a side answers ----------------------------------------------------------------

    def answer(self, worker: "ScriptedWorker", method: str, args: tuple[Any, ...]) -> Any:
        self.requests.append((worker.launch, worker.tree.name, method, args))
        benchmark = args[0] if args else None
        for rule in self.rules:
            if (
                (rule.side, rule.method) == (worker.tree.name, method)
                and rule.benchmark in (None, benchmark)
                and rule.launch in (None, worker.launch)
                and rule.when()
            ):
                if isinstance(rule.answer, BaseException):
                    raise rule.answer
                answer = rule.answer(benchmark) if callable(rule.answer) else rule.answer
                return times(answer) if method == "turn" else answer
        return getattr(self, f"_{method}", lambda *_: None)(worker, *args)

    def _identity(self, worker: "ScriptedWorker") -> dict[str, Any]:
        defaults: dict[str, Any] = {"python": "3.14 /usr", "versions": VERSIONS}
        defaults |= {"device": "a device", "import_seconds": 1.0}
        root = str(worker.tree.root.resolve())
        return {"root": root, **defaults, **self.identity[worker.tree.name]}

    def _benchmarks(self, worker: "ScriptedWorker") -> list[Benchmark]:
        side, benchmarks = worker.tree.name, []
        for name in self.names[side]:
            stated = self.states.get(
                (side, name), {**self.slowdowns[side], **worker.tree.slowdowns}
            )
            timed = Timed(name, "eager", 0, "bf16")
            if bar := self.bars.get((side, name), 0.0):
                timed = replace(timed, op=name.removesuffix("-strided"), layout="strided")
            benchmark = Benchmark(name, timed, f"ops.{name}", stated, layout_bar=bar)
            factory = "a:step" if name in self.factories else ""
            if why := self.untimed.get(name, ""):
                benchmark = replace(benchmark, slowdowns={}, untimed=why)
            benchmarks.append(replace(benchmark, factory=factory, further=name in self.further))
        return benchmarks

    def _declarations(self, worker: "ScriptedWorker") -> dict[str, str]:
        return {}

    def _begin(self, worker: "ScriptedWorker", name: str, metrics: Sequence[str]) -> float:
        return 3.0

    def _inputs(self, worker: "ScriptedWorker", name: str) -> int:
        return 7

    def _counted(self, worker: "ScriptedWorker", name: str) -> dict[str, int]:
        return {} if self.device.type == "cpu" else COUNTS

    def _compiled(self, worker: "ScriptedWorker", name: str) -> list[str]:
        return [] if self.device.type == "cpu" else [f"code of the {worker.tree.name}"]

    def _verify(self, worker: "ScriptedWorker", name: str, seed: int = 0) -> dict[str, Proof]:
        return {"y": proof()}

    _proofs = _reference = _verify

    def _turn(
        self, worker: "ScriptedWorker", name: str, seed: int, call_number: int | None
    ) -> dict[str, float]:
        metrics = self.slowdowns[CANDIDATE]
        if self.device.type != "cpu" and DEVICE in metrics:
            return {DEVICE: self._seconds(worker, name, DEVICE)}
        return self._readings(worker, name, *metrics)

    def _row(self, worker: "ScriptedWorker", name: str, seed: int) -> dict[str, float]:
        readings = self._readings(worker, name, *self.slowdowns[CANDIDATE])
        return {reading: value for reading, value in readings.items() if reading != DEVICE}

    def _readings(self, worker: "ScriptedWorker", name: str, *metrics: str) -> dict[str, float]:
        figures = {metric: self._seconds(worker, name, metric) for metric in metrics}
        return figures | {ALL_WORK + metric: self._work(worker, name, metric) for metric in metrics}

    def _seconds(self, worker: "ScriptedWorker", name: str, metric: str) -> float:
        return SECONDS[metric] * self._factor(worker, name, metric)

    def _work(self, worker: "ScriptedWorker", name: str, metric: str) -> float:
        more = 1.0 if worker.tree.name == BASE else self.works.get((name, metric), 1.0)
        return more * self._seconds(worker, name, metric)

    def _factor(self, worker: "ScriptedWorker", name: str, metric: str) -> float:
        if worker.tree.name == BASE:
            return 1.0
        if (name, metric) not in worker.shifts:  # drawn once for a launch
            if name not in self.random:
                self.random[name] = np.random.default_rng([self.seed, crc32(name.encode())])
            worker.shifts[name, metric] = self.random[name].normal(0.0, self.noise)
        return self.ratios.get((name, metric), 1.0) * math.exp(worker.shifts[name, metric])

    def _profiles(
        self, worker: "ScriptedWorker", name: str, times: int
    ) -> list[dict[str, tuple[int, float]]]:
        ratio = 1.0 if worker.tree.name == BASE else self.ratios.get((name, DEVICE), 1.0)
        took = SECONDS[DEVICE] * ratio
        return [{f"{name}_kernel": (1, took), "fill": (2, 1e-6)}] * times


class ScriptedWorker:
    """In the place of a `Worker`."""

    def __init__(self, script: Script, tree: Tree, launch: int) -> None:
        self.script, self.tree, self.launch = script, tree, launch
        self.pid = 1000 + 2 * launch + SIDES.index(tree.name)
        self.shifts: dict[tuple[str, str], float] = {}

    def make(self, key: str, factory: str, *, timeout: float, **arguments: Any) -> None:
        self.script.answer(self, "make", ())

    def call(self, key: str, method: str, *args: Any, timeout: float) -> Any:
        return self.script.answer(self, method, args)

    def stop(self) -> None:
        self.script.requests.append((self.launch, self.tree.name, "stop", ()))

    def resume(self) -> None:
        self.script.requests.append((self.launch, self.tree.name, "resume", ()))

    def hang_up(self) -> None:
        pass

    def kill(self) -> None:
        self.script.requests.append((self.launch, self.tree.name, "kill", ()))

    def close(self) -> None:
        self.script.requests.append((self.launch, self.tree.name, "close", ()))


class ScriptedPair(Pair):
    """A `Pair` of scripted workers."""

    def __init__(self, script: Script, *args: Any) -> None:
        self.script = script
        super().__init__(*args)

    def started(self, tree: Tree) -> Any:
        self.script.launches += tree.name == BASE
        self.script.answer(
            worker := ScriptedWorker(self.script, tree, self.script.launches), "start", ()
        )
        return worker


def times(seconds: Mapping[str, float]) -> dict[str, float]:
    """A turn in which all work is what the figures say, unless it says otherwise itself."""
    return {
        **{ALL_WORK + metric: seconds[metric] for metric in (DEVICE, HOST) if metric in seconds},
        **seconds,
    }


def proof(**changes: Any) -> Proof:
    """Of a result that is right."""
    right = Proof((4, 1), (4, 1), True, (1.0,) * 8, (1.0,) * 8, 0.1, 1.0, 1.0, 0.01)
    return replace(right, **changes)


def outcomes(verdicts: Mapping[str, Verdict]) -> dict[str, Outcome]:
    return {name: verdict.outcome for name, verdict in verdicts.items()}


def _tree(name: str) -> Tree:
    return Tree(name, Path(f"/trees/{name}"), "python", f"the {name}", Path("/caches"), REGISTERED)


# -- what devices and workers are made to say ---------------------------------------------------


def history(*names: str, spread: float = QUIET, blocks: int = 40) -> Noise:
    """That of a device on which equal sides differ by so much from block to block."""
    noise = Noise("a device")
    for number in range(blocks):
        value = spread if number % 2 else -spread
        statistics = {name: {DEVICE: value, HOST: value} for name in names}
        date = f"2030-01-01T00:00:{number:02}Z"
        noise.blocks.append(Block(date, "c0ffee", dict(VERSIONS), 16, statistics))
    return noise


def wrong(benchmark: str = "a") -> WorkerError:
    """What a worker says of a wrong result."""
    types = [f"{WrongResultError.__module__}.{WrongResultError.__qualname__}"]
    return WorkerError(f"WrongResultError: {benchmark}-eager: y: error 1 > 0.1", types=types)


def died() -> WorkerError:
    """What is said of a process that ended."""
    return WorkerError("the process of a side ended with status -11")


def hung() -> WorkerError:
    """What is said of a process that did not answer in time, and was ended."""
    return WorkerError("a side did not answer call in 60 s")
