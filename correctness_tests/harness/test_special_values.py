"""What the check `special values` says where it cannot be made."""

from correctness_tests.support.tried import finding, small
from tinyllama.harness import Tensor
from tinyllama.harness.check.run import Outcome
from tinyllama.harness.declare.values import uniform


def test_the_reason_is_said_where_no_input_may_have_any_value() -> None:
    domain = {"x": Tensor("N D", values=uniform(1.0, 2.0))}
    root = small("root", lambda x: (x - 1).sqrt(), domain, {"y": "N D"})
    result = finding(root, root["eager"].call, "special values")
    assert result.outcome is Outcome.UNSUPPORTED
    assert result.message == "no input may have any value, and no parameter another one"
