"""Liger-Kernel's functions as providers, a file for each op, for ``tinyllama check``."""
