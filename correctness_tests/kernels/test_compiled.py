"""Every kernel compiles within every chip's limits, on a machine that has none of them.

What is compiled follows from the declarations: for each provider that launches kernels its
forward and backward are recorded on meta tensors, in its dtypes and precisions, with the
configurations chosen for the chip. `make test` compiles each op's own kernels for its largest case
in bfloat16 for two chips; `make test-slow` all cases, dtypes and chips.
"""

import functools

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import WHOLLY
from correctness_tests.support.limits import FILE, Known, of_op, stale, triton_minor, verdict
from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.launched import launches_of, with_kernels
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.kernels.resources import CHIPS, Compilation, compilation, lacking
from tinyllama.ops import OPS

MODES = [
    (torch.bfloat16, "ieee"),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float16, "ieee"),
]
MINOR = triton_minor()
LIMITS = {op.name: of_op(op.name, op.folder) for op in OPS.values()}
KNOWN = [entry for limits in LIMITS.values() for entry in limits.of(MINOR)]
NONE = pytest.param(None, marks=pytest.mark.skip("nothing is listed for this triton"))
PROVIDERS = [pytest.param(*pair, id=str(pair[1])) for pair in with_kernels(OPS.values())]
each_provider = pytest.mark.parametrize(("op", "provider"), PROVIDERS)


def compilations(
    op: Op, provider: Provider, chip: str, *, largest: bool = False
) -> list[Compilation]:
    """Each distinct one that the cases ask for; largest: those of the op's own kernels alone, in
    its largest case in bfloat16."""
    if reason := lacking(chip):
        pytest.skip(reason)
    cases = op.timed[-1:] if largest else [*op.timed, *(op.cases if chip in WHOLLY else ())]
    distinct: dict[str, Compilation] = {}
    for dtype, precision in MODES[: 1 if largest else None]:
        for case in cases:
            if OpCase(op, provider, case, dtype).unsupported() is None:
                launches = launches_of(op, provider, case, dtype, chip=chip, precision=precision)
                for launch in launches:
                    compiled = compilation(launch, chip)
                    if compiled.kernel.startswith(f"{op.name}.") or not largest:
                        distinct.setdefault(compiled.key, compiled)
    return list(distinct.values())


def assert_within_limits(compiled: list[Compilation]) -> None:
    """Fail for what does not compile, or passes a limit that no entry of the op's file allows."""
    for each in compiled:
        excesses, taken = verdict(each, KNOWN)
        assert not excesses, (
            f"{taken or each.kernel}: {'; '.join(excesses)}\n"
            f"Choose another configuration; a spill that must be is listed in the op's {FILE}"
        )


@each_provider
@pytest.mark.parametrize("chip", WHOLLY)
def test_largest_case_compiles_within_the_chips_limits(
    op: Op, provider: Provider, chip: str
) -> None:
    assert_within_limits(compilations(op, provider, chip, largest=True))


@pytest.mark.timeout(3600)
@pytest.mark.slow("kernels are compiled for more chips, cases and dtypes")
@each_provider
@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_compiles_within_the_chips_limits(op: Op, provider: Provider, chip: str) -> None:
    assert_within_limits(compilations(op, provider, chip))


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


@functools.cache
def all_compilations(chip: str) -> list[Compilation]:
    pairs = with_kernels(OPS.values())
    return [each for op, provider in pairs for each in compilations(op, provider, chip)]


@pytest.mark.slow("the kernels that spill most are compiled")
@pytest.mark.parametrize("entry", KNOWN or [NONE], ids=str)
def test_a_known_limit_is_still_needed(entry: Known) -> None:
    if MINOR not in LIMITS[entry.kernel.partition(".")[0]].measured:
        pytest.skip(f"the limits of its op were not measured with triton {MINOR}")
    reason = stale(entry, all_compilations(entry.chip))
    assert reason is None, reason
