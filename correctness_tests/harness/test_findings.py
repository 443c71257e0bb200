"""What findings, declarations and instructions tell: each branch by its definition."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tinyllama.harness import Case, Op, Provider, Tensor
from tinyllama.harness.correct.cases import OpCase
from tinyllama.harness.correct.checks import Candidate, Finding, Outcome, Rank
from tinyllama.harness.correct.checks.finding import UNSAFE, Unsupported, leaves
from tinyllama.harness.correct.compare import SLACK
from tinyllama.harness.declare.specs import Signature, flat
from tinyllama.harness.kernels.instructions import TILE, Instructions, names, width
from tinyllama.harness.kernels.placed import Offered
from tinyllama.harness.kernels.together import EVERY, Watchdog, cooperative, phases

CPU = torch.device("cpu")


# -- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("check", ["outputs", "races"])
@pytest.mark.parametrize("special", [None, Rank.ADVICE])
def test_a_findings_rank_is_that_of_its_check_unless_it_has_another(
    outcome: Outcome, check: str, special: Rank | None
) -> None:
    finding = Finding(check, outcome, "c", "m", "t", special, "cause")
    good = outcome in (Outcome.PASSED, Outcome.UNSUPPORTED)
    assert outcome.good is good
    rank = Rank.UNSAFE if check in UNSAFE else Rank.WRONG
    known = Rank.WRONG if outcome is Outcome.BLOCKED else special or rank
    expected = None if good else known
    assert finding.rank is expected
    plain = finding.as_dict()
    assert plain == {
        "check": check,
        "outcome": outcome.value,
        "case": "c",
        "message": "m",
        "traceback": "t",
        "cause": "cause",
        "rank": expected.value if expected else "",
    }
    back = Finding.of(plain)
    assert back.as_dict() == plain
    assert back.special is expected


def test_what_is_no_finding_is_refused() -> None:
    plain = Finding("outputs", Outcome.PASSED).as_dict()
    with pytest.raises(ValueError, match="'fine' is not a valid Outcome"):
        Finding.of({**plain, "outcome": "fine"})
    with pytest.raises(ValueError, match="'bad' is not a valid Rank"):
        Finding.of({**plain, "rank": "bad"})


op = Op(
    "halved",
    inputs={"x": Tensor("N D", grad=True), "y": Tensor("N D", grad=True)},
    outputs={"z": "N D"},
    cases=[Case(N=5, D=8), Case(N=2, D=3)],
    dtypes=(torch.float32, torch.bfloat16),
)
op.reference(lambda x, y: x * y)


def candidate(**traits: Any) -> Candidate:
    given = {"dtypes": (torch.float32, torch.bfloat16), **traits}
    return Candidate(op, Provider(op.name, "tried", lambda x, y: x * y, **given))


def test_a_candidates_cases_come_from_small_to_large() -> None:
    made = candidate()
    plain = made.plain()
    assert {str(case.case) for case in plain[:2]} == {"N2D3"}
    assert {str(case.case) for case in plain} == {"N2D3", "N5D8"}
    sizes = [case.case.dims["N"] for case in plain]
    assert sizes == sorted(sizes)
    assert made.smallest() == plain[0]
    assert made.smallest(torch.bfloat16).dtype is torch.bfloat16
    varied = [case.varied for case in made.covered()]
    assert varied == sorted(varied)
    assert True in varied
    with pytest.raises(Unsupported, match="covers none of the cases"):
        candidate(supports=lambda dims: "none").smallest()


def test_a_candidate_has_the_ops_dtypes_and_its_own_slack() -> None:
    made = candidate(dtypes=(torch.bfloat16, torch.float16), slack={torch.bfloat16: 2.0})
    assert made.dtypes == [torch.bfloat16]
    assert made.slack == {torch.bfloat16: 2 * SLACK}
    assert candidate().slack == {torch.float32: SLACK, torch.bfloat16: SLACK}
    assert candidate().missing() is None
    for needs in (("gpu", "triton"), ("triton", "gpu")):
        assert candidate(requires=needs).missing() == "no GPU is available to torch"
    assert candidate(requires=("triton",)).interpreted
    assert not candidate().interpreted


def test_another_draw_has_other_values_and_each_case_is_announced() -> None:
    told: list[OpCase] = []
    made = Candidate(op, candidate().provider, announce=told.append)
    case = made.smallest()
    first, again, other = (made.inputs(case, draw) for draw in (0, 0, 1))
    assert torch.equal(first.args["x"], again.args["x"])
    assert not torch.equal(first.args["x"], other.args["x"])
    assert told == [case] * 3


def test_a_seed_and_a_draw_are_added() -> None:
    made = candidate()
    case = made.smallest()
    later = Candidate(op, made.provider, seed=2)
    for name in ("x", "y"):
        expected = made.inputs(case, 3).args[name]
        assert torch.equal(later.inputs(case, 1).args[name], expected)


def test_a_case_tells_where_no_output_is_an_input_or_zero() -> None:
    made = candidate()
    case = made.smallest()
    assert made.tells(case)
    for reference in (lambda x, y: y.clone(), lambda x, y: x * y * 0.0):
        other = copy.copy(op)
        other.providers = {"eager": replace(op["eager"], call=reference)}
        assert not replace(made, op=other).tells(case)


def test_a_shielded_call_changes_nothing_of_the_callers() -> None:
    """Neither what it gets nor an upstream gradient; and a missing gradient stays missing."""
    seen: list[torch.Tensor] = []

    class Changing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.extend((x, y))
            z = x * y
            x.zero_()
            return z

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            given = gradients[0].clone()
            gradients[0].zero_()
            return given, None

    provider = Provider(op.name, "tried", Changing.apply, op.dtypes)
    shielded = Candidate(op, provider).shielded()
    wide = torch.randn(4, 6)[:, ::2]
    x, y = wide.clone().requires_grad_(), wide.requires_grad_()
    before = x.detach().clone()
    (z,) = shielded.provider.call(x, y)
    upstream = torch.ones(4, 3)
    z.backward(upstream)
    assert torch.equal(x, before)
    assert torch.equal(z, before * y)
    assert torch.equal(upstream, torch.ones(4, 3))
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)
    assert y.grad is None
    assert [one.stride() for one in seen] == [(3, 1), (6, 2)], "copies have the same strides"


def test_each_tensor_of_a_list_is_shielded() -> None:
    def call(x: torch.Tensor, y: list[torch.Tensor]) -> torch.Tensor:
        total = x + sum(y)
        for one in (x, *y):
            one.zero_()
        return total

    shielded = Candidate(op, Provider(op.name, "tried", call, op.dtypes)).shielded()
    x, first, last = (torch.full((2,), float(value)) for value in (1, 2, 3))
    (total,) = shielded.provider.call(x, [first, last])
    assert [one.tolist() for one in (total, x, first, last)] == [[6, 6], [1, 1], [2, 2], [3, 3]]


def test_no_gradient_is_asked_of_the_forward_pass_alone() -> None:
    made = candidate()
    every = made.results(made.inputs(made.smallest()))
    assert set(every) == {"z", "grad x", "grad y"}
    forward = made.forward_only()
    assert set(forward.results(forward.inputs(forward.smallest()))) == {"z"}
    assert set(made.op.differentiable) == {"x", "y"}, "the candidate itself is as it was"
    less = made.without_gradients(["y"])
    assert less.provider.frozen == ("y",)


def test_tensors_in_lists_are_leaves_too() -> None:
    a, b, c = (torch.tensor(float(n)) for n in range(3))
    assert list(map(float, leaves({"x": [a, b], "y": c}))) == [0, 1, 2]


# -- declarations ---------------------------------------------------------------------------------


def test_a_case_is_told_by_its_sizes_and_parameters() -> None:
    case = Case(why="w", params={"eps": 0.5, "causal": True}, N=(3, 1), D=8)
    assert str(case) == "N3x1D8,eps=0.5,causal=True"
    assert str(Case(D=8)) == "D8"
    other = case.resized(D=9, E=2)
    assert str(other) == "N3x1D9E2,eps=0.5,causal=True"
    assert (other.why, other.params, other.values) == ("w", case.params, case.values)
    assert str(case) == "N3x1D8,eps=0.5,causal=True"


LED = Signature("op", {}, {}, leading=("B", "T"))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 3, 4), [("B", 2), ("T", 3), ("D", 4)]),
        ((4,), [("B", ()), ("T", ()), ("D", 4)]),
        ((5, 4), [("B", (5,)), ("T", ()), ("D", 4)]),
        ((2, 3, 5, 4), [("B", (2, 3, 5)), ("T", ()), ("D", 4)]),
        ((), None),
    ],
)
def test_leading_axes_may_be_any_number(shape: tuple[int, ...], sizes: Any) -> None:
    found = LED.sizes_of(Tensor("B T D"), shape)
    assert found == sizes
    if found is not None:
        assert flat(size for _, size in found) == shape


def test_other_axes_have_their_number() -> None:
    assert LED.sizes_of(Tensor("D"), (4,)) == [("D", 4)]
    assert LED.sizes_of(Tensor("D"), (3, 4)) is None
    assert LED.sizes_of(Tensor("T B D"), (4,)) is None
    assert LED.sizes_of(Tensor("B D"), (3, 3, 4)) is None
    assert Signature("op", {}, {}).sizes_of(Tensor("B T D"), (3, 4)) is None
    given = {"B": (2, 3), "T": (), "N": (4, 5), "D": 6}
    assert LED.numbers(given) == {"B": 6, "T": 1, "N": (4, 5), "D": 6}


def test_what_a_tensor_is_declared_as() -> None:
    first = torch.zeros(2, dtype=torch.bfloat16)
    fixed, free = Tensor("N", dtype=torch.int64), Tensor("N")
    assert (fixed.floating, free.floating) == (False, True)
    assert Tensor("N", dtype=torch.float64).floating
    assert fixed.dtype_beside(first) is torch.int64
    assert free.dtype_beside(first) is torch.bfloat16
    asked = Tensor("N", dtype=torch.int64, dtype_of=lambda x: torch.float16)
    assert asked.dtype_beside(first) is torch.float16
    assert Tensor("B T D").axes == ("B", "T", "D")
    assert Tensor("").axes == ()


# -- instructions, barriers, memory that is offered -----------------------------------------------


def test_what_a_kernel_lost_is_told_and_a_gain_is_not() -> None:
    before = Instructions(16, TILE, ("mma bf16", "wgmma bf16"), ("add f32",))
    assert before.worse(before) == []
    assert Instructions(TILE, TILE, (*before.products, "mma tf32"), ()).worse(before) == []
    after = Instructions(8, 16, ("mma bf16",), ("add f32", "max s32", "cas b32"))
    assert after.worse(before) == [
        "its widest load is 8 B, before 16 B",
        "its widest store is 16 B, before a tile",
        "its products are mma bf16, before wgmma bf16",
        "it has atomics that were not there: cas b32, max s32",
    ]
    assert str(Instructions(0, 4)) == "loads none, stores 4 B, products none, atomics none"
    assert [width(one) for one in (0, 1, TILE)] == ["none", "1 B", "a tile"]
    assert [names(one) for one in ([], ["a"], ["a", "b"])] == ["none", "a", "a, b"]
    stored = before.to_json()
    assert set(stored) == {"loads", "stores", "products", "atomics"}
    listed = {n: list(one) if isinstance(one, tuple) else one for n, one in stored.items()}
    assert Instructions.from_json(listed) == before


PTX = {
    "ld.global.b32 ": (4, 0, (), ()),
    "ld.global.L1::evict_last.v4.b32 ": (16, 0, (), ()),
    "ld.relaxed.gpu.global.b64 ": (8, 0, (), ()),
    "st.global.v2.b16 ": (0, 4, (), ()),
    "ld.shared.v4.b32 ": (0, 0, (), ()),
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;": (16, 0, (), ()),
    "cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 4;": (4, 0, (), ()),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier ": (TILE, 0, (), ()),
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group ": (0, TILE, (), ()),
    "cp.reduce.async.bulk.global.shared::cta.add ": (0, TILE, (), ("bulk",)),
    "cp.async.bulk.commit_group;": (0, 0, (), ()),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ": (0, 0, ("mma bf16",), ()),
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.e4m3.e5m2 ": (0, 0, ("wgmma e4m3 e5m2",), ()),
    "tcgen05.mma.cta_group::1.kind::f16 ": (0, 0, ("tcgen05 f16",), ()),
    "atom.global.gpu.acq_rel.add.f32 ": (0, 0, (), ("add f32",)),
    "red.relaxed.gpu.global.add.noftz.bf16 ": (0, 0, (), ("add bf16",)),
    "atom.global.gpu.cas.b32 ": (0, 0, (), ("cas b32",)),
    "atom.shared.add.u32 ": (0, 0, (), ()),
}
AMDGCN = {
    "\tglobal_load_dwordx4 v[0:3]": (16, 0, (), ()),
    "\tglobal_load_dword v0": (4, 0, (), ()),
    "\tbuffer_load_ushort v0": (2, 0, (), ()),
    "\tbuffer_store_byte v0": (0, 1, (), ()),
    "\tflat_store_b128 v0": (0, 16, (), ()),
    "\tglobal_load_u8 v0": (1, 0, (), ()),
    "\tbuffer_store_dword v0, off ; 4-byte Folded Spill": (0, 0, (), ()),
    "\tglobal_atomic_add_f32 v0": (0, 0, (), ("add_f32",)),
    "\tv_mfma_f32_16x16x16_bf16 a": (0, 0, ("mfma bf16",), ()),
    "\tv_mfma_f32_32x32x8_bf16_1k a": (0, 0, ("mfma bf16",), ()),
    "\tv_mfma_f32_16x16x32_fp8_bf8 a": (0, 0, ("mfma fp8 bf8",), ()),
}


@pytest.mark.parametrize(
    ("stage", "text"), [*(("ptx", t) for t in PTX), *(("amdgcn", t) for t in AMDGCN)]
)
def test_an_instruction_is_read_by_its_name(stage: str, text: str) -> None:
    loads, stores, products, atomics = (PTX if stage == "ptx" else AMDGCN)[text]
    found = Instructions.of({stage: f"\n{text}\n"})
    assert found == Instructions(loads, stores, products, atomics)


def test_the_widest_of_several_counts() -> None:
    text = "ld.global.b32 \nld.global.v4.b32 \nld.global.b16 \nst.global.b64 \nst.global.b8 \n"
    assert Instructions.of({"ptx": text}) == Instructions(16, 8)
    with pytest.raises(RuntimeError, match="the width of an access 'lds' is unknown: add it to"):
        Instructions.of({"amdgcn": "\tbuffer_load_lds v0\n"})


def test_phases_are_launches_of_their_own_where_programs_cannot_wait() -> None:
    gpu = torch.device("cuda", 0)
    assert list(phases(CPU, 3)) == [0, 1, 2]
    assert list(phases(gpu, 3)) == [EVERY] == [-1]
    assert cooperative(CPU) == {}
    assert cooperative(gpu) == {"launch_cooperative_grid": True}


def test_a_watchdog_tells_a_fault_once() -> None:
    watchdog = Watchdog(lambda code: f"barrier {code}")
    assert watchdog.spins == 2**22
    assert watchdog.fault(CPU) is None
    status = watchdog.status(CPU)
    assert watchdog.status(CPU) is status
    assert (status.dtype, status.tolist()) == (torch.int32, [0])
    watchdog.check(CPU)
    status.fill_(3)
    with pytest.raises(RuntimeError, match=r"^barrier 3$"):
        watchdog.check(CPU)
    assert status.tolist() == [0]
    watchdog.check(CPU)


def test_memory_is_offered_for_views_of_its_master_and_for_a_while() -> None:
    offered = Offered()
    master, other = torch.arange(12.0), torch.arange(12.0)
    copy = master.bfloat16()
    view = master[4:10].view(2, 3).T
    with offered(master, copy):
        for dtype in (None, torch.bfloat16):
            found = offered.of(view, dtype)
            assert found is not None
            assert (found.data_ptr(), found.stride()) == (copy[4:].data_ptr(), view.stride())
            assert torch.equal(found, view.bfloat16())
        assert offered.of(view, torch.float16) is None
        assert offered.of(other[4:10]) is None
        assert offered.of(master.view(torch.int32)[4:10]) is None
        with offered(other, other):
            assert offered.of(other[1:3]) is not None
            assert offered.of(view) is not None
        assert offered.of(other[1:3]) is None
    assert offered.of(view) is None
