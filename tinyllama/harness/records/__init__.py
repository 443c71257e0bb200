"""Records of measurements, the targets and verdicts on them, and their history."""
