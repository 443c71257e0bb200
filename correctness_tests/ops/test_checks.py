"""The tree's own Triton providers pass the checks that users' files are held to.

Accuracy, bounds and resources are held in test_ops.py and kernels/test_compiled.py, case by case.
Of the other checks those that take a second a provider run always; `make test-checks` runs all.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness import Case, Op, Provider
from tinyllama.harness.check import accuracy
from tinyllama.harness.check.launched import launches_of, with_kernels
from tinyllama.harness.check.names import PLAIN
from tinyllama.harness.check.run import CHECKS, Candidate, Finding, Outcome, Rank, run
from tinyllama.harness.kernels import interpreter  # noqa: F401 (changes what tests change again)
from tinyllama.harness.kernels.configs import SPACES, Config, recorded_keys
from tinyllama.ops import OPS

CPU = torch.device("cpu")
LONG = pytest.mark.timeout(3600)  # seconds, of an interpreter
QUICK = ("races", "program order", "determinism", "second derivative", "compiled", "large offsets")
ELSEWHERE = {*PLAIN[:-1], *accuracy.VARIED, "resources"}  # test_ops.py, kernels/test_compiled.py
SLOW = [name for name in CHECKS if name not in {*QUICK, *ELSEWHERE, "sizes", "configurations"}]
# Of what else has several blocks, less: each program takes its time, and two are several.
LESS = {
    "rms_norm-triton": {"T": 9, "D": 256},
    "add_rms_norm-triton": {"T": 9, "D": 256},
    "silu_mul-triton": {"N": 1},
    "swiglu-naive": {"F": 3},
    "stack-single": {"L": 1},
}
COMPOSITE = ("block", "stack")
# Attention computes in the dtype of its inputs, which the projections choose.
ADVISED = {("attention", "triton", "autocast"): "autocast is ignored"}
TREE = list(with_kernels(op for op in OPS.values() if op.module.startswith("tinyllama.ops.")))
each_provider = pytest.mark.parametrize(
    ("op", "provider"), TREE, ids=[str(provider) for _, provider in TREE]
)


def narrowed(op: Op, cases: Collection[Case], dtypes: Collection[torch.dtype] = ()) -> Op:
    """The op with these cases alone; dtypes: empty for its own."""
    narrow = copy.copy(op)
    narrow.cases, narrow.dtypes = list(cases), tuple(dtypes) or op.dtypes
    return narrow


def programs(op: Op, provider: Provider, case: Case) -> dict[str, int]:
    """The most programs of a launch of each kernel."""
    most: dict[str, int] = {}
    for launch in launches_of(op, provider, case, torch.float32):
        most[launch.identity] = max(most.get(launch.identity, 0), math.prod(launch.grid))
    return most


def tells(op: Op, provider: Provider, case: Case) -> bool:
    """Whether a wrong result would show there: of one key, gradients of q and k are 0."""
    candidate = Candidate(narrowed(op, [case], [torch.float32]), provider, CPU)
    return candidate.tells(candidate.plain_cases()[0])


@functools.cache
def several_blocks(op_name: str, provider_name: str) -> Case:
    """The smallest case that tells and in which most kernels run several programs; where none does,
    the first case with more of its first axis."""
    op = OPS[op_name]
    provider = op[provider_name]
    covered = [case for case in op.cases if provider.supports(case.dims) is None]
    if less := LESS.get(str(provider)):
        covered += [case.resized(**less) for case in covered if less.keys() <= case.dims.keys()]
    covered = [case for case in covered if tells(op, provider, case)]
    by_case = [(programs(op, provider, case), case) for case in covered]
    several = [sum(count > 1 for count in most.values()) for most, _ in by_case]
    if max(several) or not by_case[0][0]:
        best = [pair for pair, count in zip(by_case, several, strict=True) if count == max(several)]
        return min(best, key=lambda pair: sum(pair[0].values()))[1]
    case, axis = covered[0], next(iter(covered[0].dims))
    while max(programs(op, provider, case).values()) < 2:
        case = case.resized(**{axis: 2 * case.dims[axis]})
    return case


def finding(op: Op, provider: Provider, check: str, device: torch.device, **traits: Any) -> Finding:
    (result,) = run(Candidate(op, provider, device, **traits), only=[check])
    return result


def assert_passes(
    op: Op, provider: Provider, check: str, device: torch.device, **traits: Any
) -> None:
    """A check passes, or says why it cannot be made."""
    result = finding(op, provider, check, device, **traits)
    if result.rank is Rank.WARNING:
        assert ADVISED[op.name, provider.name, check] in result.message
    else:
        assert result.outcome in (Outcome.PASSED, Outcome.UNSUPPORTED), (result.case, result)
        assert result.outcome is Outcome.PASSED or result.message


def assert_passes_in_blocks(op: Op, provider: Provider, check: str, device: torch.device) -> None:
    """A case of several blocks in float32; every case in bfloat16 where offsets are large."""
    far = check == "large offsets"
    cases = op.cases if far else [several_blocks(op.name, provider.name)]
    narrow = narrowed(op, cases, [torch.bfloat16 if far else torch.float32])
    assert_passes(narrow, provider, check, device)


@pytest.mark.parametrize("check", QUICK)
@each_provider
def test_a_provider_of_the_tree_passes(
    op: Op, provider: Provider, check: str, device: torch.device
) -> None:
    assert_passes_in_blocks(op, provider, check, device)


@LONG
@pytest.mark.slow("checks that take longer than a second a provider")
@pytest.mark.parametrize("check", SLOW)
@each_provider
def test_a_provider_of_the_tree_passes_what_takes_longer(
    op: Op, provider: Provider, check: str, device: torch.device
) -> None:
    if check == "special values" and op.name in COMPOSITE:
        pytest.skip("layers in a row amplify the roundings of values that nobody declares")
    assert_passes_in_blocks(op, provider, check, device)


@LONG
@pytest.mark.slow("each axis is made as long as ten seconds allow")
@each_provider
def test_a_provider_of_the_tree_is_right_along_each_axis(
    op: Op, provider: Provider, device: torch.device
) -> None:
    assert_passes(op, provider, "sizes", device)


@LONG
@pytest.mark.slow("every case, and the default compiler of torch.compile")
@pytest.mark.parametrize("check", ["races", "program order", "determinism", "compiled"])
@each_provider
def test_a_provider_of_the_tree_passes_on_every_case(
    op: Op, provider: Provider, check: str, device: torch.device
) -> None:
    for case in op.cases:
        if provider.supports(case.dims) is None:
            narrow = narrowed(op, [case], [torch.float32])
            assert_passes(narrow, provider, check, device, backend="inductor")


@LONG
@pytest.mark.slow("every configuration of each kernel")
@each_provider
def test_a_provider_of_the_tree_passes_in_every_configuration(
    op: Op, provider: Provider, device: torch.device
) -> None:
    narrow = narrowed(op, [several_blocks(op.name, provider.name)], [torch.float32])
    for where, forced in configurations(narrow, provider):
        with forced:
            for check in ("outputs", "gradients", "out of bounds", "determinism"):
                result = finding(narrow, provider, check, device)
                assert result.outcome.good, (where, result)


def configurations(
    op: Op, provider: Provider
) -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
    """Each configuration of each space that a provider asks for, and what forces it."""
    with recorded_keys() as pairs:
        finding(op, provider, "outputs", CPU)
    for (name, text), key in dict(pairs).items():
        space = SPACES[name]
        configs: Collection[Config] = space.configs(**key)
        for config in configs:
            yield f"{name} {text}: {config}", space.force(config, **key)
