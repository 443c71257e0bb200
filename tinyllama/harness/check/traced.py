"""What torch's compiler makes of a function: its custom ops, another dtype, and other sizes."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import copied, evaluate
from tinyllama.harness.check.finding import Candidate, Problem, Rank
from tinyllama.harness.machine.modes import DispatchMode

TORCHS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor"}


class _Called(DispatchMode):
    """Keeps copies of the arguments of each custom op's first call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in TORCHS and func not in self.calls:
            self.calls[func] = tree_map(_kept, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _kept(value: Any) -> Any:
    return copied(value.detach()) if isinstance(value, torch.Tensor) else value


def custom_ops(candidate: Candidate, case: OpCase) -> Problem:
    """What `torch.library.opcheck` says of the custom ops that a call makes, in each dtype: whether
    what they declare to the compiler is what they give, and change."""
    for dtype in candidate.dtypes:
        one = replace(case, dtype=dtype)
        if one.unsupported() is not None:
            continue
        called = _Called()
        with called:
            candidate.results(candidate.inputs(one))
        for op, (args, named) in called.calls.items():
            tests = ("test_schema", "test_faketensor")
            found = torch.library.opcheck(op, args, named, test_utils=tests, raise_exception=False)
            failed = [f"{test}: {said}" for test, said in found.items() if said != "SUCCESS"]
            if failed:
                return one, f"opcheck of {op}: {failed[0].partition(chr(10))[0]}"
    return None


def of_other_sizes(candidate: Candidate, case: OpCase) -> Problem:
    """What is wrong in another dtype, and where one compiled function is called with other sizes:
    the declared result of a custom op may hold for the first call alone. That such code does not
    compile is advice."""
    others = [one for one in reversed(candidate.dtypes) if one is not case.dtype][:1]
    plain = [one for one in candidate.plain() if one.dtype is case.dtype]
    sizes = [one for one in plain if _alike(one, case)][:1]
    for one in [*(replace(case, dtype=dtype) for dtype in others), *sizes]:
        if one.unsupported() is not None:
            continue
        dynamic = one in sizes
        torch.compiler.reset()
        call = torch.compile(
            candidate.provider.call, fullgraph=True, dynamic=dynamic, backend=candidate.backend
        )
        own = candidate.provider
        try:
            for given in (case, one) if dynamic else (one,):
                inputs = candidate.inputs(given)
                results = evaluate(
                    candidate.op, call, inputs, own.overwrites, dtypes=own.output_dtypes
                )
                if wrong := candidate.wrong(given, results, inputs):
                    what = "compiled for any size: " if dynamic else ""
                    return given, f"{what}{wrong[0]}"
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            text = str(error).strip().partition(chr(10))[0]
            if dynamic:
                return one, f"not compiled for any size: {text}", Rank.WARNING
            return one, f"not one graph: {text}"
        finally:
            torch.compiler.reset()
    return None


def _alike(one: OpCase, other: OpCase) -> bool:
    """Whether they differ in sizes alone, and in none of 0 or 1, of which the compiler makes
    constants."""
    pairs = [(size, other.case.dims[axis]) for axis, size in one.case.dims.items()]
    if one.case.params != other.case.params or any(type(a) is not type(b) for a, b in pairs):
        return False
    return all(a == b or (isinstance(a, int) and min(a, b) > 1) for a, b in pairs) and any(
        a != b for a, b in pairs
    )
