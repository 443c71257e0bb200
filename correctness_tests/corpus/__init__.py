"""Kernels whose verdict is known: right ones, and wrong ones that are edits of the right ones.

Each file of `ops` declares one op with a right kernel; below a line ``# variants`` it lists what
becomes of the file with a few edits (`variants.wrong`, `variants.right`). `test_corpus` runs each
wrong variant until a check finds it; ``make corpus`` runs every check on the right ones (`matrix`).
"""
