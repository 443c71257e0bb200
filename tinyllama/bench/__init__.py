"""What perf_tests times: workloads, steps, peers, ops and the floor."""
