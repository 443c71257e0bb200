pytest_plugins = [
    "tinyllama.suites.entry",
    "tinyllama.harness.plugins.suite",
    "tinyllama.harness.plugins.benchmarks",
    "tinyllama.harness.plugins.gpu_benchmark",
]
