"""Searching configurations on a device: each one right, all by turns, the fastest kept.

For one case of one provider: note which keys of which spaces it asks for; then, space by space,
force each configuration in turn, hold its results to the same rule as any other, and time
forward and backward on the device's clock with cold caches, all configurations by turns. A
configuration that does not compile or is not right is left out, and named.

A choice must beat the one that is in force by more than `MARGIN`, or that one stays: tables do not
change with the noise. Among those that are as fast within it, one that spills fewer registers is
preferred: another compiler may spill more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.evaluate import Inputs, evaluate, make_inputs
from tinyllama.harness.kernels.configs import SPACES, Config, Key, Space, asked, key_text
from tinyllama.harness.kernels.launch import launched
from tinyllama.harness.measure.cache import Flush
from tinyllama.harness.measure.clock import Clock, queue_of
from tinyllama.harness.measure.op_contender import ops_of
from tinyllama.harness.measure.rounds import interleaved

SIEVE = 8  # units of the dtype that two configurations may differ by, over the tensor
MARGIN = 0.01
ROUNDS = 10
SURVIVORS = 6  # of a quick first look, that are timed in full


@dataclass
class Search:
    """What a search of one key found: by configuration its seconds and what its kernels spill
    (registers of all kernels of the call, of which one kind is searched), and what went wrong."""

    space: str
    key: dict[str, Key]
    before: Config
    seconds: dict[Config, float] = field(default_factory=dict)
    spilled: dict[Config, int] = field(default_factory=dict)
    failed: dict[Config, str] = field(default_factory=dict)

    @property
    def best(self) -> Config:
        """Of those as fast as the fastest within the margin: what spills least, then the one in
        force, then the fastest."""
        limit = min(self.seconds.values(), default=0.0) * (1 + MARGIN)
        return min(
            (config for config, seconds in self.seconds.items() if seconds <= limit),
            key=lambda one: (self.spilled.get(one, 0), one != self.before, self.seconds[one]),
            default=self.before,
        )

    @property
    def gain(self) -> float:
        """How many times faster the best is than the one in force before."""
        if not {self.before, self.best} <= set(self.seconds):
            return 1.0
        return self.seconds[self.before] / self.seconds[self.best]


def compiled_ahead(
    package: str, cases: Sequence[OpCase], device: torch.device, workers: int
) -> None:
    """Compile every configuration that `search` will try, several at a time, into triton's
    cache on disk; one that fails here fails again in the search, which says why."""
    tasks: list[tuple[Any, ...]] = []
    precision = torch.get_float32_matmul_precision()
    for case in cases:
        for (name, _), key in _keys(case, device).items():
            where = (case.op.name, case.provider.name, str(case.case), case.dtype)
            tasks += [
                (package, str(device), precision, *where, name, key, config)
                for config in SPACES[name].configs(**key)
            ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(_compile, tasks))


def _compile(task: tuple[Any, ...]) -> None:
    package, device, precision, op, provider, shape, dtype, space, key, config = task
    torch.set_float32_matmul_precision(precision)
    declared = ops_of(package, ())[op]
    case = next(case for case in declared.timed if str(case) == shape)
    with contextlib.suppress(Exception), SPACES[space].force(config, **key):
        evaluate(
            declared,
            declared[provider].call,
            _inputs(OpCase(declared, declared[provider], case, dtype), torch.device(device)),
        )


def _inputs(case: OpCase, device: torch.device) -> Inputs:
    return make_inputs(case.op, case.case, case.dtype, device, drawn_on=device)


def _keys(case: OpCase, device: torch.device) -> dict[tuple[str, str], dict[str, Key]]:
    """What a case asks for, found by running it."""
    with asked() as pairs:
        evaluate(case.op, case.provider.call, _inputs(case, device))
    return pairs


def search(case: OpCase, device: torch.device) -> Iterator[Search]:
    """Search every key that a case asks for; each choice is in force for those after it."""
    inputs = _inputs(case, device)
    with asked() as pairs:
        expected = evaluate(case.op, case.provider.call, inputs)
    for (name, _), key in pairs.items():
        space = SPACES[name]
        found = Search(name, key, space.choose(device, **key))
        _search(space, key, found, case, inputs, expected)
        space.forced[key_text(key)] = found.best
        yield found


def _search(
    space: Space,
    key: dict[str, Key],
    found: Search,
    case: OpCase,
    inputs: Inputs,
    expected: dict[str, torch.Tensor],
) -> None:
    calls = {}
    for config in dict.fromkeys([found.before, *space.configs(**key)]):
        try:
            with space.force(config, **key), launched() as kernels:
                results = evaluate(case.op, case.provider.call, inputs)
            _assert_close(results, expected)
            found.spilled[config] = sum(one.kernel.n_spills for one in kernels)
            calls[config] = _timed(space, key, config, case, inputs)
        except Exception as error:  # a configuration that cannot be compiled, launched or trusted
            found.failed[config] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    quick = {config: call() for config, call in calls.items()}
    kept = sorted(quick, key=quick.__getitem__)[:SURVIVORS]
    if found.before in quick and found.before not in kept:
        kept.append(found.before)
    seconds = interleaved({str(config): calls[config] for config in kept}, ROUNDS)
    found.seconds = {config: statistics.median(seconds[str(config)]) for config in kept}


def _assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A sieve only: `test_compiled` and the suite hold the chosen one to the full rule."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    for name, value in expected.items():
        rounded = tf32 and value.dtype is torch.float32
        unit = 2.0**-10 if rounded else torch.finfo(value.dtype).eps
        error = (results[name].double() - value.double()).norm()
        limit = SIEVE * unit * value.double().norm() + 1e-30
        assert error <= limit, f"{name} differs by {error:.3g}, allowed {limit:.3g}"


def _timed(
    space: Space, key: dict[str, Key], config: Config, case: OpCase, inputs: Inputs
) -> Callable[[], float]:
    """Device seconds of one cold forward and backward in this configuration."""
    device = next(t for t in inputs.args.values() if isinstance(t, torch.Tensor)).device
    clock, flush = Clock(queue_of(device)), Flush(device)
    op = case.op
    args = dict(inputs.args)
    wanted = [args[name].requires_grad_(True) for name in op.differentiable]

    def call() -> None:
        outputs = case.provider.call(*args.values(), **inputs.params)
        if op.differentiable:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.grad(outputs, wanted, list(inputs.upstream.values()))

    def one() -> float:
        with space.force(config, **key):
            return clock.read(call, before=flush).device

    return one


def merged(stored: dict[str, Any], found: Iterable[Search]) -> dict[str, Any]:
    """The spaces of a chip's table with the choices of searches; others keep theirs."""
    spaces = {name: dict(entries) for name, entries in stored.items()}
    for one in found:
        spaces.setdefault(one.space, {})[key_text(one.key)] = one.best.kwargs()
    return {name: dict(sorted(spaces[name].items())) for name in sorted(spaces)}
