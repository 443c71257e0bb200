"""Kernels of other projects run without a GPU: what they ask of one is answered, and no more."""

import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language.extra.libdevice", reason="triton is missing")

from correctness_tests.support.commands import python
from correctness_tests.support.own_repository import write_files
from tinyllama.harness.kernels import jit, tl
from tinyllama.harness.kernels.interpreter_values import stock

libdevice = pytest.importorskip("triton.language.extra.libdevice")
erf, cast = libdevice.erf, tl.cast  # by names of their own
X = torch.linspace(0.1, 3, 40)


@jit
def library_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = cast(tl.load(x + at, mask=at < n, other=1.0), tl.float32)
    tl.store(y + at, libdevice.rsqrt(value) + libdevice.pow(value, 2.0) + erf(value), mask=at < n)


@jit
def unknown_kernel(x):  # type: ignore[no-untyped-def]
    tl.store(x, libdevice.cyl_bessel_i0(tl.load(x)))


def test_functions_of_libdevice_are_computed_under_any_name() -> None:
    y = torch.empty_like(X)
    library_kernel[(1,)](X, y, X.numel(), BLOCK=64)
    torch.testing.assert_close(y, X.rsqrt() + X.square() + X.erf())
    assert libdevice.rsqrt(1.0) is None, "it is to be put back"
    with pytest.raises(stock.InterpreterError, match="cyl_bessel_i0f is not interpreted"):
        unknown_kernel[(1,)](X.clone())


PACKAGE = {
    "heavy/__init__.py": "raise RuntimeError('no GPU')",
    "heavy/kernels/__init__.py": "raise RuntimeError('no GPU')",
    "heavy/kernels/one.py": """
        import torch, triton, triton.language as tl
        from absent.tools import factor, unused

        @triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"])
        @triton.heuristics({"WHOLE": lambda args: args["n"] % args["BLOCK"] == 0})
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
            tl.store(x, tl.load(x) * BLOCK + WHOLE)

        def scaled(x):
            properties = torch.cuda.get_device_properties(x.device)
            assert properties.multi_processor_count == 2
            assert torch.cuda.get_device_capability() == (0, 0)
            with torch.cuda.device(x.device):
                kernel[lambda meta: (32 // meta["BLOCK"] // 2,)](x, n=32)
            return x * factor
    """,
}
IMPORTED = """
    import torch
    from tinyllama.harness.kernels.foreign import foreign

    with foreign(hollow=["heavy", "heavy.kernels"], instead={"absent.tools": {"factor": 10}}):
        from heavy.kernels import one
    print(one.scaled(torch.ones(1)).item(), torch.cuda.is_available())
    for wrong in (one.unused, lambda: foreign(hollow=["nowhere"]).__enter__()):
        try:
            wrong()
        except (NotImplementedError, ModuleNotFoundError) as error:
            print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers itself")
def test_a_module_is_imported_and_called_without_a_gpu_or_its_package(tmp_path: Path) -> None:
    """Its questions about a GPU are answered; ``autotune`` takes the first configuration."""
    done = python("-c", textwrap.dedent(IMPORTED), cwd=write_files(tmp_path, PACKAGE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "170.0 False",
        "absent.tools.unused is not imported: `foreign` stands for absent.tools",
        "no package 'nowhere': install it",
    ]
