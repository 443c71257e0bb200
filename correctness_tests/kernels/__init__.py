"""What kernels are compiled to, and offsets beyond 32 bits."""
