"""The workshop: one model with one thing broken at a time, and what shows it (docs/workshop)."""
