"""Every kernel compiles within every chip's limits, on a machine that has none of them.

What is compiled follows from the declarations: for each provider that launches kernels its
forward and backward are recorded on meta tensors, in its dtypes and precisions, with the
configurations chosen for the chip. `make test` compiles each op's own kernels for its largest case
in bfloat16 for two chips; `make test-slow` all cases, dtypes and chips, and every configuration
that a search may try.
"""

from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")


from correctness_tests.support.launched import (
    KNOWN,
    LIMITS,
    MINOR,
    MODES,
    WHOLLY,
    Planned,
    plan,
    planned,
)
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.kernels import limits
from tinyllama.harness.kernels.configs import SPACES, Config, Key, Space, asked, key_text
from tinyllama.harness.kernels.limits import Known, stale, suggestion, verdict
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking
from tinyllama.harness.plugins.suite import asks_for_slow
from tinyllama.ops import OPS

Asked = tuple[Provider, Op, str, dict[str, Key]]  # who asks, in which mode, for which key

UNMEASURED = f"the limits of its op were not measured with triton {MINOR}"
NONE = pytest.param(None, marks=pytest.mark.skip("nothing is listed for this triton"))


def compilations(ops: Iterable[Op], chips: Iterable[str]) -> list[Compilation]:
    return [one.compilation for one in plan(ops, chips).values() if one.compilation]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "planned" in metafunc.fixturenames:
        slow = pytest.mark.slow("kernels are compiled for more chips, cases and dtypes")
        soon = not asks_for_slow(metafunc.config)
        params = [
            pytest.param(one, id=one.where, marks=[] if one.quick and soon else [slow])
            for one in planned(only_quick=soon).values()
        ]
        if soon:
            params.append(pytest.param(None, id="others", marks=slow))
        for chip, reason in ((chip, lacking(chip)) for chip in CHIPS):
            if reason:
                params.append(pytest.param(None, id=chip, marks=pytest.mark.skip(reason)))
        metafunc.parametrize("planned", params)


def test_compiles_within_the_chips_limits(planned: Planned) -> None:
    if planned.compilation is None:
        assert planned.error is not None
        raise planned.error
    excesses, taken = verdict(planned.compilation, KNOWN)
    entry = suggestion(planned.compilation, taken, MINOR)
    assert not excesses, (
        f"{taken or planned.compilation.kernel}: {'; '.join(excesses)}\n"
        f"Choose another configuration; a spill that must be is listed in the op's {limits.FILE}:\n"
        f"{entry}"
    )


@pytest.mark.long
def test_every_provider_that_launches_kernels_says_so() -> None:
    """What a provider requires decides whether it is compiled here; it may not forget to."""
    for op in OPS.values():
        for provider in op.providers.values():
            says = "triton" in provider.requires
            chip, precision = ("sm_90", "tf32") if provider.borrows else ("gfx942", "ieee")
            where = {"chip": chip, "precision": precision}
            try:
                found = launches_of(op, provider, op.timed[-1], torch.float32, **where)
            except Exception:
                assert not says  # stock code that needs values
            else:
                assert bool(found) == says, f"{provider} launches {len(found)} kernels"


@pytest.mark.slow("the kernels that spill most are compiled")
@pytest.mark.parametrize("entry", KNOWN or [NONE], ids=str)
def test_a_known_limit_is_still_needed(entry: Known) -> None:
    if MINOR not in LIMITS[entry.kernel.partition(".")[0]].measured:
        pytest.skip(UNMEASURED)
    reason = stale(entry, compilations(OPS.values(), [entry.chip]))
    assert reason is None, reason


def spaces_of(ops: Iterable[Op], chip: str) -> dict[str, list[Asked]]:
    """By space, who asks for which of its keys in the largest case, in float32 and bfloat16."""
    found: dict[str, list[Asked]] = {}
    seen = set()
    for op in ops:
        for provider in op.providers.values():
            for mode in ("bf16", "fp32") if "triton" in provider.requires else ():
                with asked() as pairs:
                    recorded_of(provider, op, chip, mode)
                for pair, key in pairs.items():
                    if pair not in seen:
                        found.setdefault(pair[0], []).append((provider, op, mode, key))
                    seen.add(pair)
    return found


def recorded_of(provider: Provider, op: Op, chip: str, mode: str) -> list[Compilation]:
    dtype, precision = MODES[mode]
    case = op.timed[-1] if op.timed else op.cases[0]
    launches = launches_of(op, provider, case, dtype, chip=chip, precision=precision)
    return [compilation(launch, chip) for launch in launches]


def unfit(space: Space, chip: str, ops: Iterable[Op]) -> dict[str, str]:
    """The space's configurations that pass a limit of a chip, and which."""
    found, done = {}, {}
    for provider, op, mode, key in spaces_of(ops, chip).get(space.name, ()):
        for config in space.configs(**key):
            with space.force(config, **key):
                launched = recorded_of(provider, op, chip, mode)
            for one in launched:
                if one.key not in done:
                    done[one.key] = verdict(one, ())[0]
                if done[one.key] and uses(one, config):
                    found[f"{key_text(key)}: {config}"] = "; ".join(done[one.key])
    return found


def uses(one: Compilation, config: Config) -> bool:
    """Whether this kernel is launched in this configuration (others are launched beside it)."""
    constants = dict(config.constants)
    if constants and constants.keys().isdisjoint(one.traits):  # of another space
        return False
    return all(one.traits.get(name, value) == value for name, value in config.kwargs().items())


def declared_for(space: Space) -> limits.Limits:
    """The limits of the op whose folder the space is declared in."""
    owners = [name for name, op in OPS.items() if op.folder == space.tables.parent]
    return LIMITS[owners[0]] if owners else limits.Limits()


def assert_listed(found: dict[str, str], space: Space, chip: str, declared: limits.Limits) -> None:
    compiler = {config: why for config, why in found.items() if "does not compile" in why}
    assert not compiler, compiler
    listed = [
        entry.count
        for entry in declared.unfit
        if (entry.space, entry.chip, entry.triton) == (space.name, chip, MINOR)
    ]
    lines = "\n".join(f"{config}: {why}" for config, why in found.items())
    assert len(found) == sum(listed), f"{len(found)} do not fit, listed are {listed}\n{lines}"


@pytest.mark.slow("every configuration that a search may try is compiled")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chip", WHOLLY)
@pytest.mark.parametrize("space", SPACES.values(), ids=lambda space: space.name)
def test_configurations_that_do_not_fit_are_listed(space: Space, chip: str) -> None:
    declared = declared_for(space)
    if reason := lacking(chip) or (UNMEASURED if MINOR not in declared.measured else None):
        pytest.skip(reason)
    assert_listed(unfit(space, chip, OPS.values()), space, chip, declared)
