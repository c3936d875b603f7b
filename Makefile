# batchkv: everything that a developer or a first visitor runs. Works with GNU make 3.81 (macOS).
#
#   make demo ARGS='--kv-scheme affine4'     options for the command that the target runs
#   make venv SET=run                        another set of packages: run, worker or dev

VENV ?= .venv
SET ?= dev
ARGS ?=
# The number of processes that share the test files. Tests also wait, so three keep two cores busy.
# 0 runs all in one process and shows output.
TESTERS ?= 3
PYTHON = $(VENV)/bin/python
# One stamp for each set: a venv of a smaller set does not pass for the developer's.
STAMP = $(VENV)/.batchkv-$(SET)
DEV_STAMP = $(VENV)/.batchkv-dev
LOCKED = pyproject.toml tools/bootstrap.sh $(wildcard requirements/*.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test page parity kernels fuzz chaos soak namespaces clients lint bench wheel-check format lock clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# The stamp is written last, so that an interrupted installation starts again.
$(VENV)/.batchkv-%: $(LOCKED)
	@sh tools/bootstrap.sh '$(VENV)' '$*'
	@touch '$@'

venv: $(STAMP) ## Make .venv with the locked packages (SET=run, worker or dev)
	@echo '$(VENV) is ready ($(SET)): $(VENV)/bin/batchkv --help'

demo: $(DEV_STAMP) ## Answer the quickstart's prompts on this machine, from an empty state
	@sh tools/demo.sh '$(VENV)/bin/batchkv' $(ARGS)

test: $(DEV_STAMP) ## Run the whole suite against a real server (ARGS='tests/producer -k name')
	$(PYTHON) tools/run_tests.py -n '$(TESTERS)' --dist loadfile $(ARGS)

page: $(DEV_STAMP) ## The gateway's page in Chromium, with pictures in build/page (needs Chromium and npm)
	BATCHKV_PAGE=all $(PYTHON) -m pytest -s -n 0 tests/page tests/gateway/page $(ARGS)

parity: $(DEV_STAMP) ## Compare every family of caches under every KV scheme, row by row (ARGS='-k llama')
	BATCHKV_PARITY=all $(PYTHON) -m pytest tests/parity tests/recall tests/worker/kv \
	    tests/worker/engine tests/worker/prefix tests/worker/report $(ARGS)

kernels: $(DEV_STAMP) ## Compile the kernels for GPUs where nvcc, NVRTC and clang are installed (ARGS=metal)
	$(PYTHON) tests/worker/kv/kernels/compile_gpu.py $(ARGS)

fuzz: $(DEV_STAMP) ## Feed random bytes to the readers of lines, jobs, results, blocks, answers (FUZZ_SECONDS=60 each)
	$(PYTHON) tests/fuzz/long.py $(ARGS)

chaos: $(DEV_STAMP) ## Test kills, outages, bad lines and broken caches for long (ARGS='--seed 7', '--only line')
	$(PYTHON) tests/chaos/weather.py $(ARGS)

soak: $(DEV_STAMP) ## A worker under mixed load for half an hour: its memory must not grow (ARGS='--minutes 8')
	$(PYTHON) tests/chaos/soak.py $(ARGS)

namespaces: $(DEV_STAMP) ## A laptop, a gateway and two workers in networks of their own; a kill and a cut link (Linux)
	$(PYTHON) tests/deploy/namespaces.py $(ARGS)

clients: $(DEV_STAMP) ## Install openai, litellm, inspect_ai, lm-eval, each apart, and use the gateway (ARGS='--only openai')
	$(PYTHON) tests/clients/run.py $(ARGS)

lint: $(DEV_STAMP) ## ruff, mypy, the tree's own rules, and the built wheel without MLX
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) tools/check_tree.py
	$(PYTHON) tools/check_wheel.py

bench: $(DEV_STAMP) ## Run every benchmark, one after the other, into bench-results/ (ARGS=--quick)
	BATCHKV_BENCH=all $(PYTHON) -m pytest -q -n 0 tests/test_bench_product.py
	$(PYTHON) tools/bench.py $(ARGS)

wheel-check: $(DEV_STAMP) ## Install the built wheel alone, without MLX, and use it
	$(PYTHON) tools/check_wheel.py

format: $(DEV_STAMP) ## Put every file into the project's format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lock: ## Regenerate requirements/*.txt with uv (ARGS=--upgrade)
	@sh tools/lock.sh $(ARGS)

clean: ## Delete caches and build results; .venv stays
	rm -rf build dist bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find worker gateway producer cache_store tests tools deploy -name __pycache__ -type d -prune \
	    -exec rm -rf {} +

distclean: clean ## clean, and delete .venv
	rm -rf '$(VENV)'
