"""The workshop, tested: each stage's fault is found by its check, and the fix passes it."""
