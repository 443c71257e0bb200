"""The reference in float64, and what makes it useless as an oracle."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tinyllama.harness.check.compare import near, norm_of_finite
from tinyllama.harness.check.evaluate import Inputs
from tinyllama.harness.kernels.bounds import author_line
from tinyllama.harness.machine.errors import UsageError
from tinyllama.harness.machine.modes import DispatchMode
from tinyllama.testing.call import Call, Results, Tensors, name_of

GIVE = "give oracle=, a function that computes the same in the dtype of its inputs"
SAME = 1e-9  # of the size of results: runs in float64 that are no more apart are alike


class StaysInDouble(DispatchMode):
    """While active, notes the author's line that first rounds float64 to a narrower dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.rounded and not _makes_new_values(func):
            before = {one.dtype for one in tree_leaves((args, kwargs)) if _is_float(one)}
            narrow = [one.dtype for one in tree_leaves(result) if _is_float(one)]
            narrow = [dtype for dtype in narrow if dtype.itemsize < 8]
            if narrow and torch.float64 in before:
                dtype = str(narrow[0]).removeprefix("torch.")
                self.rounded = f"{author_line() or 'torch: '}rounds float64 to {dtype}"
        return result


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _makes_new_values(func: Any) -> bool:
    """Whether an op takes no more than the shape of its input: ``empty_like``, ``new_zeros``."""
    name = str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else ""
    return name.startswith("new_") or name.endswith("_like")


def results_in_double(call: Call, function: Callable[..., Any], inputs: Inputs) -> Results:
    """Results for these inputs in float64, by a function that may serve as the oracle.

    Raises UsageError where it leaves float64, cannot run in it, or gives other results each time.
    """
    mode, name = StaysInDouble(), name_of(function)
    try:
        with mode:
            results = call.run(function, inputs.double(), double=True)
    except Exception as error:
        if mode.rounded:
            raise UsageError(f"{mode.rounded} in {name}, the oracle: {GIVE}") from error
        raise UsageError(
            f"{name}, the oracle, does not run in float64 on these tensors "
            f"({type(error).__name__}: {error}): {GIVE}; tensors that it takes from elsewhere "
            "must be arguments"
        ) from error
    if mode.rounded:
        raise UsageError(f"{mode.rounded} in {name}, the oracle: {GIVE}")
    for result, tensor in results.tensors.items():
        if tensor.is_floating_point() and tensor.dtype is not torch.float64:
            raise UsageError(
                f"{result} of {name}, the oracle, is {tensor.dtype}, not float64: {GIVE}"
            )
    again = call.run(function, inputs.double(), double=True)
    if not alike(results.tensors, again.tensors):
        raise UsageError(
            f"{name}, the reference, is random: two runs on the same inputs differ; make it take "
            "its random values as an argument"
        )
    return results


def alike(results: Tensors, others: Tensors) -> bool:
    """Whether results in float64 differ by no more than the order of sums explains."""
    size = max((norm_of_finite(one) for one in results.values()), default=0.0)
    return all(near(others[name], one, SAME, SAME * size) for name, one in results.items())
