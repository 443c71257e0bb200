"""What perf_tests measures, tested."""
