"""Kernels in the manner of Triton's tutorials, written anew: the same launch, the same limits."""
