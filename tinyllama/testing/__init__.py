"""Accuracy of kernels in any test, without a declaration, an option or a plugin.

    import torch

    from tinyllama.testing import assert_accurate, kernel_cases


    def softmax(x, dim):  # the candidate: any function or module, with Triton kernels or without
        return torch.exp(x - torch.logsumexp(x.float(), dim, keepdim=True)).to(x.dtype)


    @kernel_cases("N D")
    def test_softmax(case):
        assert_accurate(softmax, torch.softmax, *case.tensors, dim=-1)


    assert_accurate(softmax, torch.softmax, torch.randn(4, 67), dim=-1)

Outputs and gradients may be as far from the reference in float64 as rounding explains, which is
measured in each call: no tolerance is asked for. Tensors on a GPU run the compiled kernels; tensors
on the CPU run them in an interpreter, which also names an access out of bounds and its line.
"""

from tinyllama.testing.accurate import assert_accurate
from tinyllama.testing.parametrized import KernelCase, kernel_cases

__all__ = ["KernelCase", "assert_accurate", "kernel_cases"]
