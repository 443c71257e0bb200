"""Every kernel compiles within every chip's limits, on a machine that has none of them.

What is compiled follows from the declarations: for each provider that launches kernels its
forward and backward are recorded on meta tensors, in its dtypes and precisions, with the
configurations chosen for the chip. `make test` compiles each op's own kernels for its largest case
in bfloat16 for two chips; `make test-slow` all cases, dtypes and chips.
"""

from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")


from correctness_tests.support import limits
from correctness_tests.support.launched import (
    KNOWN,
    LIMITS,
    MINOR,
    Planned,
    plan,
    planned,
)
from correctness_tests.support.limits import Known, stale, verdict
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.declare.op import Op
from tinyllama.harness.kernels.resources import CHIPS, Compilation, lacking
from tinyllama.harness.plugins.suite import asks_for_slow
from tinyllama.ops import OPS

UNMEASURED = f"the limits of its op were not measured with triton {MINOR}"
NONE = pytest.param(None, marks=pytest.mark.skip("nothing is listed for this triton"))


def compilations(ops: Iterable[Op], chips: Iterable[str]) -> list[Compilation]:
    return [each.compilation for each in plan(ops, chips).values() if each.compilation]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "planned" in metafunc.fixturenames:
        slow = pytest.mark.slow("kernels are compiled for more chips, cases and dtypes")
        soon = not asks_for_slow(metafunc.config)
        params = [
            pytest.param(each, id=each.where, marks=[] if each.quick and soon else [slow])
            for each in planned(only_quick=soon).values()
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
    assert not excesses, (
        f"{taken or planned.compilation.kernel}: {'; '.join(excesses)}\n"
        f"Choose another configuration; a spill that must be is listed in the op's {limits.FILE}"
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
                launches = launches_of(op, provider, op.timed[-1], torch.float32, **where)
            except Exception:
                assert not says  # stock code that needs values
            else:
                assert bool(launches) == says, f"{provider} launches {len(launches)} kernels"


@pytest.mark.slow("the kernels that spill most are compiled")
@pytest.mark.parametrize("entry", KNOWN or [NONE], ids=str)
def test_a_known_limit_is_still_needed(entry: Known) -> None:
    if MINOR not in LIMITS[entry.kernel.partition(".")[0]].measured:
        pytest.skip(UNMEASURED)
    if reason := lacking(entry.chip):
        pytest.skip(reason)
    reason = stale(entry, compilations(OPS.values(), [entry.chip]))
    assert reason is None, reason
