# Two commands do everything, set-up included: `make demo` and `make test`.

DIALECT ?= nixl
SANITIZERS ?= address undefined thread
PYTEST_OPTIONS ?=
BENCHMARK_OPTIONS ?=

# Prints the Python to use, after it has installed what is missing.
SYSTEM_PYTHON = ./scripts/system-packages.sh
BIN = .venv/bin
PYTHON_SOURCES = efa_kv connectors examples tests scripts benchmarks
C_SOURCES = $(shell find native -name '*.[ch]' -not -path 'native/third_party/*')

.PHONY: help demo sglang-demo setup-vllm setup-sglang test test-fast test-native test-e2e lint format tidy setup setup-browser setup-e2e benchmarks clean distclean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 24

demo: setup-vllm ## a prefill and a decode server move KV over the fabric; DIALECT=nixl|mooncake
	@PYTHONPATH=examples $(BIN)/python -m vllm_demo --dialect $(DIALECT)

sglang-demo: setup-sglang ## the same with SGLang servers and SGLang's router
	@PYTHONPATH=examples $(BIN)/python -m sglang_demo

test: setup-e2e setup-browser lint test-native ## every test
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-fast: setup lint ## what is quick and needs no model server, in under three minutes
	@scripts/test-native.sh --fast undefined
	$(BIN)/python -m pytest --ignore=tests/e2e -m "not slow" $(PYTEST_OPTIONS)

test-e2e: setup-e2e ## only the tests with model servers
	$(BIN)/python -m pytest tests/e2e $(PYTEST_OPTIONS)

test-native: setup ## the C tests, once per sanitizer
	@scripts/test-native.sh $(SANITIZERS)

lint: setup ## style and types, Python and C
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check --quiet $(PYTHON_SOURCES)
	$(BIN)/mypy
	@$(BIN)/python scripts/readme_settings.py --check
	@$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)

format: setup ## rewrite the sources in the house style
	$(BIN)/ruff check --fix --quiet $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(C_SOURCES)
	$(BIN)/python scripts/readme_settings.py

# Apart from lint, since it takes more than a minute of processor time.
tidy: setup ## clang-tidy over the C core
	@cmake -S native -B build/native/tidy -DEFA_KV_PYTHON=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	@printf '%s\n' $(wildcard native/src/*.c) | xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy --quiet -p build/native/tidy

setup: ## the development environment, .venv
	@python=$$($(SYSTEM_PYTHON)) && $$python scripts/environments.py dev

setup-sglang: ## the environments for the demo with SGLang servers
	@python=$$($(SYSTEM_PYTHON)) && $$python scripts/environments.py dev sglang sglang-router

setup-vllm: ## the environments for the demo with vLLM servers
	@python=$$($(SYSTEM_PYTHON)) && $$python scripts/environments.py dev vllm router

setup-browser: ## a browser for the test of the report's page, where one can be installed
	@scripts/system-browser.sh

setup-e2e: setup-vllm setup-sglang ## the environments for all demos and the tests with model servers

benchmarks: setup ## measure beside other engines, write docs/benchmarks.md; BENCHMARK_OPTIONS=--help
	@python=$$($(SYSTEM_PYTHON)) && $$python scripts/environments.py benchmarks
	$(BIN)/python benchmarks/compare.py $(BENCHMARK_OPTIONS)

clean: ## remove what was built, keep the environments
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

distclean: clean ## remove the environments too
	rm -rf .venv .venv-vllm .venv-router .venv-sglang .venv-sglang-router .venv-benchmarks
