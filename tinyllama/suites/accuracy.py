"""Every provider of every op is as accurate as eager, in outputs and in every gradient.

The cases follow from the declarations: shapes, dtypes, memory layouts of inputs and of upstream
gradients, extreme values, and absent upstream gradients. Inputs must stay as they were, memory
that a provider asks for holds NaN until it is written, and nothing is accessed out of bounds.
"""

from collections.abc import Callable, Iterable

import pytest
import torch

from tinyllama.harness.check import reference
from tinyllama.harness.check.candidate import Candidate
from tinyllama.harness.check.cases import OpCase, References, full_cases, op_cases
from tinyllama.harness.check.compare import SLACK
from tinyllama.harness.check.guards import GuardedMemory, PoisonedMemory
from tinyllama.harness.declare.op import Op
from tinyllama.harness.machine.device import cannot
from tinyllama.harness.plugins.suite import asks_for_slow, worker_device
from tinyllama.suites.selection import SELECTION

CASES: dict[str, Callable[[Iterable[Op]], Iterable[OpCase]]] = {
    "case": op_cases,
    "combination": full_cases,
}
Included = Callable[[OpCase], bool]
Slow = Callable[[OpCase], str | None]


def assert_accurate(case: OpCase, device: torch.device, seed: int) -> None:
    """Hold a case of a provider to eager's own error and to its memory, and eager to the op's
    independent code; skipped where the device cannot run it."""
    for capability in case.provider.requires:
        reason = cannot(capability, device)
        if reason:
            pytest.skip(f"{case.provider.name}: {reason}")
    candidate, guards = Candidate(case.op, case.provider, device, seed), GuardedMemory()
    inputs = case.inputs(device, seed)
    results = candidate.results(inputs, PoisonedMemory(), guards)
    wrong = [f"out of bounds: {text}" for text in guards.broken()]
    references = shared_references(case, device, seed)
    slack = SLACK * case.provider.slack_in(case.dtype)
    comparisons = case.judge(results, inputs, slack=slack, references=references)
    assert comparisons, "nothing was compared"
    wrong += [str(comparison) for comparison in comparisons if not comparison.passed]
    wrong += [text for _, text in reference.faults(case, seed)]
    assert not wrong, "\n".join([str(case), *wrong])


KEPT = 4  # the plain case of a shape, and those of which another part is needed
_RECENT: list[tuple[tuple[OpCase, torch.device, int], References]] = []  # the last used comes last


def shared_references(case: OpCase, device: torch.device, seed: int) -> References:
    """The references of a case: computed once for all providers, whose cases follow each other, and
    for all layouts of the same values."""
    dense = case.of_equal_values()
    key = dense, device, seed
    entry = next((entry for entry in _RECENT if entry[0] == key), None)
    if entry is None:
        entry = key, dense.references(dense.inputs(device, seed))
    else:
        _RECENT.remove(entry)
    _RECENT[:] = [*_RECENT[1 - KEPT :], entry]
    return entry[1].asked_for(case.wanted)


def parametrize_cases(
    metafunc: pytest.Metafunc, ops: Iterable[Op], included: Included, slow: Slow = lambda case: None
) -> None:
    """The cases of ``ops`` that are ``included``; one that stands for all combinations where
    slow tests are left out. slow: why a case is one of these, or None."""
    for name in CASES.keys() & set(metafunc.fixturenames):
        if name == "combination" and not asks_for_slow(metafunc.config):
            metafunc.parametrize(name, [pytest.param(None, id="all")])
        else:
            metafunc.parametrize(name, params(filter(included, CASES[name](ops)), slow))


def params(cases: Iterable[OpCase], slow: Slow) -> list:
    """Every case; those that a provider does not support are skipped with its reason, and of the
    others the first one of each provider is quick."""
    parameters, begun = [], set()
    for case in cases:
        reason, provider = case.unsupported(), str(case.provider)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        if not reason and provider not in begun:
            begun.add(provider)
            marks = [pytest.mark.quick]
        elif not reason and (why := slow(case)):
            marks = [pytest.mark.slow(why)]
        parameters.append(pytest.param(case, id=str(case), marks=marks))
    return parameters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    selection = metafunc.config.stash[SELECTION]
    parametrize_cases(
        metafunc, selection.ops, lambda case: case.provider in selection.providers[case.op.name]
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Not that of a repository's own conftest."""
    return worker_device(request.config)


def test_is_as_accurate_as_eager(case: OpCase, device: torch.device, seed: int) -> None:
    assert_accurate(case, device, seed)


@pytest.mark.slow("every combination of shape, values and layouts")
def test_is_as_accurate_in_combination(
    combination: OpCase, device: torch.device, seed: int
) -> None:
    assert_accurate(combination, device, seed)
