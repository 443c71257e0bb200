"""A kernel that starts while the one before it ends reads nothing until that one has ended.

Only a GPU has such launches, and a read that comes too early there is wrong now and then.
"""

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from correctness_tests.support.launched import providers
from tinyllama.harness.check.launched import launches_of
from tinyllama.harness.kernels.chips import dependent
from tinyllama.harness.kernels.launch import Kernel, recorded

ACCESSES = {"load", "store", "atomic_add", "atomic_cas", "dot"}
WAITS = {"begin", "wait_for_last"}


def accesses(function: Any) -> bool:
    """Whether a function of kernels reads or writes memory, in itself or in one that it calls."""
    names = function.__code__.co_names
    called = [function.__globals__.get(name) for name in names]
    inner = [kernel.fn for kernel in called if isinstance(kernel, Kernel)]
    return not ACCESSES.isdisjoint(names) or any(map(accesses, inner))


def too_early(kernel: Any) -> str | None:
    """What a kernel does before it waits for the one before it, and may not; None: nothing."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        names = {
            call.attr if isinstance(call, ast.Attribute) else ast.unparse(call) for call in calls
        }
        if names & WAITS and isinstance(statement, ast.Expr):
            return None
        for name in sorted(names):
            inner = kernel.fn.__globals__.get(name)
            if name in ACCESSES or (isinstance(inner, Kernel) and accesses(inner.fn)):
                return f"{name}, in line {statement.lineno}"
    return "it never waits"


def test_nothing_is_accessed_before_the_kernel_before_has_ended() -> None:
    with recorded("sm_90"):
        options = dependent(torch.device("cpu"))
    if not options["PDL"]:
        pytest.skip("this triton has no dependent launch")
    kernels = {}
    for op, provider in providers():
        for case in (*op.cases[:1], *op.timed):
            for dtype, precision in ((torch.bfloat16, "ieee"), (torch.float32, "tf32")):
                if dtype in provider.dtypes and provider.supports(case.dims) is None:
                    for launch in launches_of(
                        op, provider, case, dtype, chip="sm_90", precision=precision
                    ):
                        assert launch.options.get("launch_pdl", False) == launch.arguments.get(
                            "PDL", False
                        ), launch.identity
                        if "launch_pdl" in launch.options:
                            kernels[launch.identity] = launch.kernel
    assert len(kernels) > 12, sorted(kernels)
    assert {name: why for name, kernel in kernels.items() if (why := too_early(kernel))} == {}
