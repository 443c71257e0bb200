"""Every kernel compiles within every chip's limits, on a machine that has none of them.

What is compiled follows from the declarations: for each provider that launches kernels its
forward and backward are recorded on meta tensors, in its dtypes and precisions, with the
configurations chosen for the chip. `make test` looks at the cases that a GPU times for two chips,
and for the others at each op's own kernels for the largest case in bfloat16. Cooperative kernels
take seconds each: there in bfloat16 for two chips. What Triton would get as when the op's
instructions were recorded is not compiled again (`is_recorded_so`): the record is made of kernels
within their limits. `make test-slow` compiles that, the rest, all cases, and every configuration
that a search may try.
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import KNOWN, LIMITS, MINOR, is_recorded_so, planned
from tinyllama.harness.correct import launched as module
from tinyllama.harness.correct.launched import (
    MODES,
    WHOLLY,
    Planned,
    cases_of,
    launches_of,
    plan,
    plan_of,
)
from tinyllama.harness.declare.op import Op, Provider
from tinyllama.harness.declare.specs import Case, Tensor
from tinyllama.harness.kernels import limits
from tinyllama.harness.kernels.configs import SPACES, Config, Key, Space, asked, key_text
from tinyllama.harness.kernels.instruction_record import key_of
from tinyllama.harness.kernels.launch import jit, tl
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
        slow = pytest.mark.slow(
            "kernels are compiled that are recorded, or of more chips and cases"
        )
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


@pytest.fixture
def trusted(pytestconfig: pytest.Config) -> bool:
    """Whether a kernel that is what was recorded need not be compiled again."""
    return not asks_for_slow(pytestconfig)


def test_compiles_within_the_chips_limits(planned: Planned, trusted: bool) -> None:
    if planned.compilation is None:
        assert planned.error is not None
        raise planned.error
    if trusted and planned.held and is_recorded_so(key_of(planned.compilation)):
        return
    excesses, taken = verdict(planned.compilation, KNOWN)
    entry = suggestion(planned.compilation, taken, MINOR)
    assert not excesses, (
        f"{taken or planned.compilation.kernel}: {'; '.join(excesses)}\n"
        f"Choose another configuration; a spill that must be is listed in the op's {limits.FILE}:\n"
        f"{entry}"
    )


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


def test_every_chip_is_compiled_for() -> None:
    chips = {chip for chip in CHIPS if not lacking(chip)}
    assert {one.chip.name for one in compilations([OPS["rms_norm"]], CHIPS)} == chips
    quick = planned(only_quick=True).values()
    assert {one.compilation.chip.name for one in quick if one.compilation} == chips - {"gfx908"}


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


# -- launches of a provider -------------------------------------------------------------------


@jit
def scaled(x, y, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


FITS, TOO_WIDE = Config(BLOCK=128, num_warps=2), Config(BLOCK=4096, num_warps=32)


@pytest.fixture
def space() -> Iterator[Space]:
    yield Space("toy", default=lambda N: FITS, configs=lambda N: [FITS, TOO_WIDE])
    del SPACES["toy"]


@pytest.fixture
def op(space: Space) -> Op:
    """y = x / 2, from a provider with one kernel for forward and backward."""
    op = Op("toy", inputs={"x": Tensor("N", grad=True)}, outputs={"y": "N"}, cases=[Case(N=100)])
    op.reference(lambda x: x / 2)

    class Halved:
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            y, config = torch.empty_like(x), space.choose(x.device, N=x.numel())
            scaled[(1,)](x, y, x.numel(), 0.5, **config.kwargs())
            return y

        @staticmethod
        def backward(grads: Any, kept: Any, saved: Any, needs: set[str]) -> Any:
            return {"x": Halved.forward(grads[0])}

    op.provider("triton", requires=("triton",))(Halved)
    return op


def test_forward_and_backward_are_recorded_from_the_declaration(op: Op) -> None:
    found = launches_of(op, op["triton"], op.cases[0], torch.bfloat16, chip="gfx942")
    assert [launch.kernel for launch in found] == [scaled, scaled]
    assert {launch.arguments["x"].device.type for launch in found} == {"meta"}
    planned = list(plan_of(op["triton"], op, ["gfx942"]))
    assert {p.where for p in planned} == {
        f"toy-triton-N100-{mode}-gfx942-test_compiled.scaled" for mode in MODES
    }
    assert len({p.compilation.key for p in planned if p.compilation}) == 3  # tf32 is fp32 here


def test_a_provider_that_cannot_be_recorded_fails_its_own_test_only(op: Op) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("on meta tensors")

    provider = Provider("toy", "broken", fails, op.dtypes, requires=("triton",))
    planned = list(plan_of(provider, op, ["sm_90"]))
    assert planned
    with pytest.raises(KeyError):
        test_compiles_within_the_chips_limits(planned[0], trusted=False)


def test_the_precision_of_products_is_put_back(op: Op) -> None:
    before = torch.get_float32_matmul_precision()
    seen: list[str] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return x

    spy = Provider("toy", "spy", noted, op.dtypes)
    for precision in ("ieee", "tf32"):
        launches_of(op, spy, op.cases[0], torch.float32, chip="sm_90", precision=precision)
    assert seen == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == before


def test_configurations_that_do_not_fit_are_found_on_the_chip_where_they_do_not(
    op: Op, space: Space
) -> None:
    assert unfit(space, "sm_90", [op]) == {}
    found = unfit(space, "gfx942", [op])
    assert list(found) == [f"N=100: {TOO_WIDE}"]
    assert found[f"N=100: {TOO_WIDE}"] == "32 warps of 64 threads, limit 1024 threads"
    with pytest.raises(AssertionError, match="1 do not fit, listed are"):
        assert_listed(found, space, "gfx942", declared_for(space))


def test_of_other_chips_the_largest_case_alone_is_compiled_in_the_fast_lane() -> None:
    op = OPS["rms_norm"]
    assert len(op.timed) > 2

    def quick(mode: str) -> list[bool]:
        found = list(cases_of(op, op.providers["triton"], "sm_100", mode))
        assert [case for case, _, _ in found] == op.timed
        assert all(held == now for _, now, held in found), "what is compiled is recorded"
        return [now for _, now, _ in found]

    assert quick("bf16") == [*[False] * (len(op.timed) - 1), True]
    assert not any(quick("fp16"))


@pytest.mark.parametrize("chip", WHOLLY)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires", [("triton",), ("triton", "cooperative")])
def test_what_is_compiled_for_the_two_chips_and_when(
    chip: str, mode: str, requires: tuple[str, ...]
) -> None:
    """Each case as (quick, held): a CPU times the first of several, and cooperative kernels take
    seconds."""
    quick = mode == "bf16" or "cooperative" not in requires
    timed = (False, False) if mode == "fp16" else (quick, True)
    provider: Any = SimpleNamespace(requires=requires)
    for names in (["a"], ["a", "b"], ["a", "b", "c"]):
        op: Any = SimpleNamespace(timed=names, cases=["other"])
        found: list[Any] = list(cases_of(op, provider, chip, mode))
        first = timed if len(names) == 1 else (False, False)
        expected = [first, *[timed] * (len(names) - 1), (False, False)]
        assert found == [
            (name, *one) for name, one in zip([*names, "other"], expected, strict=True)
        ]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("chip", ["sm_90", "gfx942", "sm_100", "gfx908"])
def test_on_other_chips_a_kernel_counts_with_its_own_op_alone(
    chip: str, held: bool, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, launches = OPS["rms_norm"], ["rms_norm.rows", "silu_mul.rows", "rms_norm_other.rows"]
    monkeypatch.setattr(module, "cases_of", lambda *given: [(op.timed[0], quick, held)])
    monkeypatch.setattr(module, "launches_of", lambda *given, **options: launches)
    monkeypatch.setattr(
        module, "compilation", lambda launch, chip: SimpleNamespace(kernel=launch, key=launch)
    )
    found = list(plan_of(op["triton"], op, [chip]))
    assert found
    for one in found:
        counts = chip in WHOLLY or one.where.endswith("-rms_norm.rows")
        assert (one.quick, one.held) == (quick and counts, held and counts)
    only = list(plan_of(op["triton"], op, [chip], only_quick=True))
    assert only == (found if quick or held else [])
