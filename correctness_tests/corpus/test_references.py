"""A wrong reference is not believed: independent code contradicts it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.corpus.variants import Loaded, Variant, variants
from tinyllama.harness import Op
from tinyllama.harness.check.cases import elements
from tinyllama.harness.check.evaluate import ContractError, make_inputs
from tinyllama.harness.check.reference import disagreements

WRONG = [pytest.param(each, id=str(each)) for each in variants() if each.as_reference]


@pytest.mark.parametrize("variant", WRONG)
def test_independent_code_contradicts_a_wrong_reference(variant: Variant, tmp_path: Path) -> None:
    with Loaded(variant, tmp_path) as candidate:
        op = candidate.op
        op.providers["eager"] = replace(op["eager"], call=candidate.provider.call)
        assert any(variant.result in text for text in contradictions(op))


def contradictions(op: Op) -> Iterator[str]:
    """What independent code says against an op's reference, in each case, small ones first."""
    for extreme in (None, *op.extremes):
        for case in sorted(op.cases, key=lambda case: elements(op, case)):
            inputs = make_inputs(op, case, torch.float64, extreme=extreme)
            for source in op.independents:
                try:
                    yield from disagreements(op, source, inputs)
                except ContractError as error:  # a result is missing
                    yield str(error)
