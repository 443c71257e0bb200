"""FlashAttention's gradient of a query with one key is the rounding of a sum; eager's is zero."""

import runpy

from correctness_tests.support.commands import ROOT
from tinyllama.harness import Op
from tinyllama.harness.check.run import Candidate, Outcome, run


def test_gradients_pass_where_the_op_declares_its_terms_and_are_reported_where_not() -> None:
    op: Op = runpy.run_path(str(ROOT / "docs/examples/causal_attention.py"))["causal_attention"]
    (declared,) = run(Candidate(op, op["flash"]), ("gradients",))
    assert declared.outcome is Outcome.PASSED, declared.message
    op.magnitudes = None
    (undeclared,) = run(Candidate(op, op["flash"]), ("gradients",))
    assert undeclared.outcome is Outcome.FAILED
    assert "if terms of a sum cancel in this row, declare their magnitude" in undeclared.message
