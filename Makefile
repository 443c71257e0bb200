# Any Python from 3.10 on; in a ROCm or CUDA container the one that has torch, which is then kept.
PYTHON ?= python3
PYTHON310 ?= python3.10

RUN := .venv/bin/python -m
# The tests start hundreds of processes: each module is compiled once, not in each of them.
export PYTHONDONTWRITEBYTECODE =
# Stealing keeps the tests of a file in one process, where they share what is made once.
# One worker more than processors: some tests wait for processes and clocks.
WORKERS := -n $(shell expr $$(nproc) + 1) --dist worksteal
# Made again when one of these changes, or with another PYTHON.
SET_UP_FROM := pyproject.toml tools/set_up.py $(wildcard constraints/*)
SET_UP := .venv/made-by$(subst /,-,-$(PYTHON))

.PHONY: help test test-all quick test-slow test-checks test-tools test-processes bench bench-full mutants corpus sanitize lint floor clean bootstrap

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

test: bootstrap ## the correctness tests, but for the corpus and those that take long
	$(RUN) pytest correctness_tests $(WORKERS) -m "not long" --ignore correctness_tests/corpus

test-all: bootstrap ## all of these, as CI does
	$(RUN) pytest correctness_tests $(WORKERS)

QUICK := ops/test_ops.py ops/test_references.py check/test_compare.py project/test_imports.py

quick: bootstrap ## under a minute: each provider's first case, the references, the comparison
	$(RUN) pytest $(addprefix correctness_tests/,$(QUICK)) -m quick -q

test-slow: bootstrap ## the slow correctness tests, which `test-all` leaves out
	$(RUN) pytest correctness_tests $(WORKERS) -m slow

test-checks: bootstrap ## our kernels through our checks: every case, every configuration, inductor
	$(RUN) pytest correctness_tests/ops/test_checks.py $(WORKERS) -m slow

test-tools: bootstrap ## the tests of tools/, and of a new op in a copy of this tree
	$(RUN) pytest tools/tests $(WORKERS)

PROCESSES := $(addprefix gate/test_gate_,command.py certify_command.py) $(addprefix project/test_,cli.py extras.py readme.py) \
	$(addprefix harness/test_,plugin.py lost_gpu.py declarations.py)

test-processes: bootstrap ## the tests that start gates, workers of pytest or training runs
	$(RUN) pytest $(addprefix correctness_tests/,$(PROCESSES)) $(WORKERS) -m slow

bench: ONLY_GROUPS := --groups short
bench: ## a short training run, then the performance tests of a few groups: the ladder and a page
bench-full: ## the same with every group that this device takes
bench bench-full: bootstrap
	@$(RUN) tinyllama train --tier v2 --preset tiny --seq-len 64 --num-steps 200 --data README.md; \
	trained=$$?; \
	$(RUN) pytest perf_tests -q $(ONLY_GROUPS) --record --results-dir build/results; \
	timed=$$?; \
	$(RUN) tinyllama report --results-dir build/results --html build/report.html; \
	for status in $$trained $$timed $$?; do \
		[ $$status = 0 ] || { echo "$@: not all was measured and met (status $$status)"; exit $$status; }; \
	done

mutants: bootstrap ## changed kernels: does a check fail? (hours; make mutants ONLY=rope,adamw)
	$(RUN) tools.mutants --only "$(ONLY)" --jobs $$(nproc)

corpus: bootstrap ## every check on every variant of the corpus, and its table (20 minutes)
	$(RUN) correctness_tests.corpus.matrix --jobs $$(nproc) --record

sanitize: bootstrap ## the kernels under compute-sanitizer (needs a GPU and the CUDA toolkit)
	$(RUN) tools.sanitize

lint: bootstrap ## style, formatting, types and workflows
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	.venv/bin/zizmor --offline --quiet .github

floor: .venv-floor/made ## the core tests on the oldest supported Python, torch and triton
	.venv-floor/bin/python -m pytest -n auto -m "not slow" \
		$(addprefix correctness_tests/,ops/test_ops.py \
			$(addprefix model/,test_gradients.py test_tiers.py test_model.py) kernels/test_compiled.py \
			$(addprefix harness/,test_interpreter.py test_kernels.py test_configs.py) kernels/test_resources.py)

clean: ## remove what the other targets made
	rm -rf .venv .venv-floor build report.html *.egg-info .pytest_cache .benchmarks .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

bootstrap: $(SET_UP)

$(SET_UP): $(SET_UP_FROM)
	$(PYTHON) tools/set_up.py .venv test,peers,report,sensors,dev
	touch $@

.venv-floor/made: $(SET_UP_FROM)
	$(PYTHON310) tools/set_up.py .venv-floor test,peers constraints/floor.txt
	touch $@
