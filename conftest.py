pytest_plugins = ["tinyllama.harness.plugin", "tinyllama.harness.benchmarks"]
