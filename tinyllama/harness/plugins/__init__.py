"""Every pytest hook of the harness, and nothing else."""
