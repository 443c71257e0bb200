"""Whether a result is right: inputs, comparison with float64, cases, named checks."""
