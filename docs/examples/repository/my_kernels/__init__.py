"""Two kernels with their declarations; importing the package imports neither."""
