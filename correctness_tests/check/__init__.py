"""The checks of kernels, tested."""
