"""The checks find what they claim to find: right implementations, changed in one thing.

Each saboteur must be found by a check that it names, in a result that it names; one that only
raises is not found. Where that is possible it is tried as the reference too, which independent code
must then contradict.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from correctness_tests.support.launched import tree_ops
from correctness_tests.support.narrowed import narrowed
from correctness_tests.support.saboteurs import EAGER, Saboteur, everyone
from correctness_tests.support.tried import finding
from tinyllama.harness import Op, Provider
from tinyllama.harness.correct.cases import OpCase, References, elements
from tinyllama.harness.correct.checks import CHECKS, Candidate, Finding, Outcome, run
from tinyllama.harness.correct.checks.calls import REPEATS
from tinyllama.harness.correct.checks.finding import leaves
from tinyllama.harness.correct.evaluate import Inputs, make_inputs
from tinyllama.harness.correct.reference import disagreements
from tinyllama.harness.kernels.launch import jit, tl
from tinyllama.ops import OPS

ALL = list(everyone())


def representatives(saboteurs: Iterable[Saboteur]) -> set[str]:
    """A fault that fits any op is put on the smallest one that has one output, and on the smallest
    one that has several: it is one of the call, whatever is computed. Faults of one op or of one
    result are all here."""
    found: dict[tuple[str, bool] | str, str] = {}
    for one in sorted(saboteurs, key=lambda one: elements(one.op, one.op.cases[0])):
        several = len(one.op.outputs) > 1
        found.setdefault((one.fault, several) if one.of_calling else str(one), str(one))
    return set(found.values())


SOON = representatives(ALL)
EVERY_OP = pytest.mark.slow("faults of a call on every op that they fit")
LANES = [
    pytest.param(one, id=str(one), marks=[] if str(one) in SOON else [EVERY_OP]) for one in ALL
]
REFERENCES = [saboteur for saboteur in ALL if saboteur.reference]


@pytest.fixture(scope="module", autouse=True)
def _each_reference_once() -> Iterator[None]:
    """Most saboteurs of an op are tried on the same inputs, and compared with the same results."""
    compute, known = OpCase.references, dict[bytes, References]()

    def references(case: OpCase, inputs: Inputs, **draws: int) -> References:
        key = digest_of(case.op, inputs) + repr(draws).encode()
        if key not in known:
            known[key] = compute(case, inputs, **draws)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpCase, "references", references)
        yield


def digest_of(op: Op, inputs: Inputs) -> bytes:
    found = hashlib.sha256(
        f"{op.name} {op.differentiable} {inputs.params} {inputs.wanted}".encode()
    )
    for named in (inputs.args, inputs.upstream, *inputs.fresh):
        for one in leaves({name: value for name, value in named.items() if value is not None}):
            found.update(f"{list(named)} {one.dtype} {one.shape} {one.stride()}".encode())
            found.update(one.double().numpy().tobytes())
    return found.digest()


def found_by(saboteur: Saboteur) -> list[Finding]:
    candidate = Candidate(saboteur.op, saboteur.provider())
    return list(run(candidate, only=saboteur.checks))


@pytest.mark.parametrize("saboteur", LANES)
def test_a_saboteur_is_found_by_its_check(saboteur: Saboteur) -> None:
    findings = found_by(saboteur)
    failed = [one for one in findings if one.outcome is Outcome.FAILED]
    assert failed, f"{saboteur} passes: {findings}"
    assert any(saboteur.result in one.message for one in failed), failed
    assert all(one.message for one in failed)
    assert any(one.case for one in failed), "no case is named"


@pytest.mark.parametrize("saboteur", REFERENCES, ids=str)
def test_a_reference_is_contradicted_by_independent_code(saboteur: Saboteur) -> None:
    op = saboteur.op
    if not op.independents and op.name not in {one.name for one in tree_ops()}:
        pytest.skip("this op of an --ops file declares no independent code")
    right = op.providers["eager"]
    op.providers["eager"] = Provider(op.name, "eager", saboteur.make(), dtypes=op.dtypes)
    try:
        assert contradicted(saboteur), f"{saboteur} as a reference goes unnoticed"
    finally:
        op.providers["eager"] = right


def contradicted(saboteur: Saboteur) -> str | None:
    """The first disagreement about a result that the saboteur spoils."""
    op = saboteur.op
    for case in op.cases:
        for extreme in (None, *op.extremes):
            inputs = make_inputs(op, case, torch.float64, extreme=extreme)
            for source in op.independents:
                try:
                    found = disagreements(op, source, inputs)
                except AssertionError as error:
                    found = [str(error)]
                if named := [text for text in found if saboteur.result in text]:
                    return named[0]
    return None


SLOW = pytest.mark.slow("references through every check: kernels of these ops pass them, too")
# One of each kind: a function of one row, in place, with integers, and of no arithmetic.
QUICK = ("rms_norm", "adamw", "cross_entropy", "transpose")
EACH = [
    pytest.param(op, id=name, marks=[] if name in QUICK else [SLOW]) for name, op in OPS.items()
]


@pytest.mark.parametrize("op", EACH, ids=list(OPS))
def test_what_is_right_passes_every_check(op: Op) -> None:
    """No false alarm: the machinery finds nothing wrong with the reference itself. On its other
    shapes it is held to its own bound in test_ops.py, and to independent code in
    test_references.py."""
    quick = tuple(check for check in CHECKS if check != "sizes")  # test_sizes.py
    op = narrowed(op, op.cases[:1])
    right = Saboteur(op, "none", lambda: EAGER[op.name], quick)
    wrong = [one for one in found_by(right) if not one.outcome.good]
    assert not wrong
    assert contradicted(right) is None


def finding_of(check: str, call: Callable[..., torch.Tensor]) -> Finding:
    """What a check finds in a provider of rms_norm whose kernels are interpreted."""
    op = OPS["rms_norm"]
    return finding(op, call, check, dtypes=op.dtypes, requires=("triton",))


def test_other_bits_in_the_last_repeat_alone_are_found() -> None:
    """Most runs of a race are right."""
    calls: list[None] = []

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append(None)
        y = EAGER["rms_norm"](x, weight, eps)
        return y * (1 + torch.finfo(y.dtype).eps) if len(calls) == REPEATS["cpu"] else y

    finding = finding_of("determinism", call)
    assert REPEATS["cpu"] >= 3
    assert finding.outcome is Outcome.FAILED, finding
    assert "in repeat 2" in finding.message


def test_each_check_finds_some_saboteur() -> None:
    """A check that nothing fails would prove nothing; in `make test`, and by each fault."""
    soon = [saboteur for saboteur in ALL if str(saboteur) in SOON]
    assert {one.fault for one in soon} == {one.fault for one in ALL}
    used = {check for saboteur in soon for check in saboteur.checks}
    # test_programs.py, test_program_order.py, test_sizes.py, test_check_configurations.py,
    # test_special_values.py
    of_programs = {"races", "large offsets", "program order", "sizes", "configurations"}
    elsewhere = {"special values", "captured", "side stream", "resources"}  # on a GPU; below
    elsewhere |= of_programs
    assert set(CHECKS) - used == elsewhere


@jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@jit
def reading_beyond(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Right, but for what the last program reads and does not use."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at), mask=at < n)


@pytest.mark.parametrize(("kernel", "found"), [(reading_beyond, True), (copy_kernel, False)])
def test_a_load_beyond_a_buffer_is_found(kernel: Any, found: bool) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        block = 2 ** x.numel().bit_length()
        kernel[(1,)](x.detach().contiguous(), torch.empty(x.shape), x.numel(), BLOCK=block)
        return EAGER["rms_norm"](x, weight, eps)

    finding = finding_of("out of bounds", call)
    assert (finding.outcome is Outcome.FAILED) is found, finding
    assert ("behind the end of x, a buffer" in finding.message) is found


@pytest.mark.parametrize(("warps", "outcome"), [(4, Outcome.PASSED), (32, Outcome.FAILED)])
def test_a_kernel_that_no_chip_can_run_is_found(warps: int, outcome: Outcome) -> None:
    """32 waves of 64 are more threads than a program may have."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        copy_kernel[(1,)](x.detach(), torch.empty_like(x), x.numel(), BLOCK=64, num_warps=warps)
        return EAGER["rms_norm"](x, weight, eps)

    finding = finding_of("resources", call)
    assert finding.outcome is outcome, finding
    assert ("threads" in finding.message) is (outcome is Outcome.FAILED)
