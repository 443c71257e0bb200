"""A search for the fastest configuration of each kernel of a case, on a device.

For one case of one provider, the search records which keys of which spaces the case asks for. For
each key it sets each configuration in turn, compares its results with those of the current one, and
times forward and backward on the device's clock with cold caches, the configurations alternately. A
configuration that does not compile, or whose results differ, is reported and not timed.

The current configuration is kept unless another one is faster by more than `MARGIN`, so that tables
do not change with the noise. Among those that are equally fast within the margin, one that spills
fewer registers is chosen, because another compiler may spill more.
"""

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import Inputs, evaluate, make_inputs
from tinyllama.harness.declare.autograd import several
from tinyllama.harness.kernels.configs import (
    FORCED,
    SPACES,
    Config,
    Key,
    Space,
    key_text,
    recorded_keys,
)
from tinyllama.harness.kernels.launch import launched
from tinyllama.harness.measure.cache import flush_of
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.harness.measure.op_contender import Timed, ops_of
from tinyllama.harness.measure.rounds import interleaved

SIEVE = 8  # units of the dtype by which the results of two configurations may differ
MARGIN = 0.01
ROUNDS = 10
SURVIVORS = 6  # the fastest in one reading; only these are timed in full


@dataclass
class Search:
    """What a search of one key found, by configuration: seconds; registers that the kernels of the
    call spill; and why it was not timed."""

    space: str
    key: dict[str, Key]
    before: Config
    seconds: dict[Config, float] = field(default_factory=dict)
    spilled: dict[Config, int] = field(default_factory=dict)
    failed: dict[Config, str] = field(default_factory=dict)

    @property
    def best(self) -> Config:
        """Of those as fast as the fastest within the margin: the one that spills least, then the
        one in force, then the fastest."""
        limit = min(self.seconds.values(), default=0.0) * (1 + MARGIN)
        return min(
            (config for config, seconds in self.seconds.items() if seconds <= limit),
            key=lambda config: (
                self.spilled.get(config, 0),
                config != self.before,
                self.seconds[config],
            ),
            default=self.before,
        )

    @property
    def gain(self) -> float:
        """How many times faster the best is than the one that was in force."""
        if not {self.before, self.best} <= set(self.seconds):
            return 1.0
        return self.seconds[self.before] / self.seconds[self.best]


class _Compilation(NamedTuple):
    """A configuration to compile, as another process reads it. precision: of float32 products."""

    package: str
    device: torch.device
    precision: str
    timed: Timed
    space: str
    key: dict[str, Key]
    config: Config


def compiled_ahead(
    package: str, cases: Sequence[OpCase], device: torch.device, workers: int
) -> None:
    """Compile every configuration that `search` will try, several at a time, into triton's
    cache on disk. One that fails here fails again in the search, which gives the reason."""
    precision = torch.get_float32_matmul_precision()
    tasks = [
        _Compilation(package, device, precision, Timed.of(case), space, key, config)
        for case in cases
        for (space, _), key in _Subject.of(case, device).keys.items()
        for config in SPACES[space].configs(**key)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(_compile, tasks))


def _compile(task: _Compilation) -> None:
    torch.set_float32_matmul_precision(task.precision)
    op = ops_of(task.package, ())[task.timed.op]
    case = task.timed.case_of(op, op[task.timed.provider])
    with contextlib.suppress(Exception), SPACES[task.space].force(task.config, **task.key):
        _Subject.of(case, task.device)


class _Subject(NamedTuple):
    """A case whose configurations are searched: inputs, results in the configurations in force, and
    the keys of the spaces that it asks for, by space and key."""

    case: OpCase
    inputs: Inputs
    results: dict[str, torch.Tensor]
    keys: dict[tuple[str, str], dict[str, Key]]

    @classmethod
    def of(cls, case: OpCase, device: torch.device) -> "_Subject":
        inputs = make_inputs(case.op, case.case, case.dtype, device, drawn_on=device)
        with recorded_keys() as keys:
            return cls(case, inputs, evaluate(case.op, case.provider.call, inputs), keys)


def search(case: OpCase, device: torch.device) -> Iterator[Search]:
    """Search every key that a case asks for; each choice is in force for those after it."""
    subject = _Subject.of(case, device)
    for (name, _), key in subject.keys.items():
        space = SPACES[name]
        of_key = Search(name, key, space.choose(device, **key))
        _try_all(space, of_key, subject)
        FORCED[space.name, key_text(key)] = of_key.best
        yield of_key


def _try_all(space: Space, search: Search, subject: _Subject) -> None:
    """Try each configuration of a space for the key of a search, and note there how it did."""
    case, key = subject.case, search.key
    calls = {}
    for config in dict.fromkeys([search.before, *space.configs(**key)]):
        try:
            with space.force(config, **key), launched() as kernels:
                results = evaluate(case.op, case.provider.call, subject.inputs)
            _assert_close(results, subject.results)
            search.spilled[config] = sum(launch.kernel.n_spills for launch in kernels)
            calls[config] = _timed(space, key, config, subject)
        except Exception as error:  # a configuration that cannot be compiled, launched or trusted
            search.failed[config] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    quick = {config: call() for config, call in calls.items()}
    chosen = sorted(quick, key=quick.__getitem__)[:SURVIVORS]
    if search.before in quick and search.before not in chosen:
        chosen.append(search.before)
    seconds = interleaved({str(config): calls[config] for config in chosen}, ROUNDS)
    search.seconds = {config: statistics.median(seconds[str(config)]) for config in chosen}


def _assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A coarse test: `test_compiled` and the suite apply the full rule to the chosen one."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    for name, value in expected.items():
        rounded = tf32 and value.dtype is torch.float32
        unit = 2.0**-10 if rounded else torch.finfo(value.dtype).eps
        error = (results[name].double() - value.double()).norm()
        limit = SIEVE * unit * value.double().norm() + 1e-30
        assert error <= limit, f"{name} differs by {error:.3g}, allowed {limit:.3g}"


def _timed(
    space: Space, key: dict[str, Key], config: Config, subject: _Subject
) -> Callable[[], float]:
    """Device seconds of one cold forward and backward in this configuration."""
    case, inputs = subject.case, subject.inputs
    device = next(t for t in inputs.args.values() if isinstance(t, torch.Tensor)).device
    clock, flush = Clock(queue_of(device)), flush_of(device)
    op = case.op
    args = dict(inputs.args)
    leaves = [args[name].requires_grad_(True) for name in op.differentiable]

    def call() -> None:
        outputs = case.provider.call(*args.values(), **inputs.params)
        if op.differentiable:
            torch.autograd.grad(several(outputs), leaves, list(inputs.upstream.values()))

    def seconds() -> float:
        with space.force(config, **key):
            return clock.read(call, before=flush).device

    return seconds


def merged(stored: dict[str, Any], searches: Iterable[Search]) -> dict[str, Any]:
    """The spaces of a chip's table with the choices of searches; other choices stay."""
    spaces = {name: dict(entries) for name, entries in stored.items()}
    for search in searches:
        spaces.setdefault(search.space, {})[key_text(search.key)] = search.best.kwargs()
    return {name: dict(sorted(spaces[name].items())) for name in sorted(spaces)}
