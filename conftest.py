pytest_plugins = [
    "tinyllama.harness.plugin",
    "tinyllama.harness.benchmarks",
    "tinyllama.harness.gate.plugin",
]
