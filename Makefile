# SPDX-License-Identifier: Apache-2.0
# Every target makes what it needs first and leaves alone what is there already.

SHELL := bash
.NOTPARALLEL:
.DEFAULT_GOAL := help

# Building models writes nothing but what was built.
export HF_HUB_DISABLE_PROGRESS_BARS := 1

VENVS := dev vllm sglang
DEV := .venv/dev/bin
CODE := $(wildcard openengine_adapters conformance tests scripts benchmarks examples)
SHELL_SCRIPTS := .ci/run $(wildcard scripts/*.sh scripts/*/*.sh docker/*.sh deploy/*.sh)

# Tests on pairs of servers; they have a target of their own.
PAIRS := $(wildcard tests/vllm/test_disaggregation*.py tests/sglang/test_disaggregation*.py)

# What `make test` runs, in this order.  A stage is a target; a new one is a line here.
STAGES := lint
STAGES += test-fast
STAGES += test-mutants
STAGES += $(if $(wildcard tests/vllm),test-vllm)
STAGES += $(if $(wildcard tests/sglang),test-sglang)
STAGES += $(if $(PAIRS),test-disagg)
STAGES += $(if $(wildcard tests/engines),test-engines)
ifneq ($(wildcard conformance/openengine_conformance/__main__.py),)
STAGES += $(if $(wildcard openengine_adapters/reference/__main__.py),conformance-reference conformance-reference-ranks)
STAGES += $(if $(wildcard openengine_adapters/vllm/__main__.py),conformance-vllm conformance-vllm-lora conformance-vllm-ranks)
STAGES += $(if $(wildcard openengine_adapters/sglang/__main__.py),conformance-sglang conformance-sglang-lora conformance-sglang-ranks)
STAGES += conformance-tasks-few
endif

# What `make lint` runs.
LINTS := lint-ruff lint-format lint-types lint-bindings lint-shell
LINTS += $(if $(wildcard scripts/lint_proto.sh),lint-proto)

MUTANTS := tests/conformance/test_mutants.py
SLOW := $(wildcard tests/engines tests/sglang tests/vllm) $(MUTANTS)

# A fixture that starts real engines may take long on a slow machine.
PATIENT := -o faulthandler_timeout=1200

# More arguments for pytest, the conformance suite or the benchmarks: make test-vllm ARGS='-k stop'
ARGS ?=
ENGINE ?= reference

.PHONY: help
help: ## show this
	@awk -F ': .*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Needs Python 3.11; TORCH_CPU_WHEELS tells where pip finds a CPU build of PyTorch if it does not by itself."

.PHONY: demo
demo: venv-vllm ## serve SmolLM2 with vLLM on the CPU and stream an answer from it
	@.venv/vllm/bin/python scripts/setup/build_models.py SmolLM2-135M-Instruct
	@.venv/vllm/bin/python scripts/setup/demo.py

.PHONY: demo-disagg
demo-disagg: models-vllm ## hand a request from a prefill to a decode server on the CPU (ARGS=sglang for SGLang)
	@.venv/vllm/bin/python scripts/setup/demo_disagg.py $(ARGS)

.PHONY: test
test: ## everything: lint, all tests, conformance
	@scripts/setup/stages.sh $(STAGES)

.PHONY: test-fast
test-fast: venv-dev ## the tests that need no engine, minutes
	$(DEV)/python -m pytest tests $(SLOW:%=--ignore=%) $(ARGS)

.PHONY: test-mutants
test-mutants: venv-dev ## that the suite catches every broken server, minutes
	$(DEV)/python -m pytest $(MUTANTS) $(ARGS)

.PHONY: test-vllm
test-vllm: models-vllm ## the tests against the real vLLM
	.venv/vllm/bin/python -m pytest tests/vllm $(PAIRS:%=--ignore=%) $(PATIENT) $(ARGS)

.PHONY: test-sglang
test-sglang: models-sglang ## the tests against the real SGLang
	.venv/sglang/bin/python -m pytest tests/sglang $(PAIRS:%=--ignore=%) $(PATIENT) $(ARGS)

.PHONY: test-disagg
test-disagg: models-vllm models-sglang ## prefill and decode on two real servers of each engine
	.venv/vllm/bin/python -m pytest $(filter tests/vllm/%,$(PAIRS)) $(PATIENT) $(ARGS)
	.venv/sglang/bin/python -m pytest $(filter tests/sglang/%,$(PAIRS)) $(PATIENT) $(ARGS)

.PHONY: test-engines
test-engines: venv-dev models-vllm models-sglang ## the same requests through both engines
	$(DEV)/python -m pytest tests/engines $(PATIENT) $(ARGS)

.PHONY: conformance
conformance: conformance-$(ENGINE) ## the suite against ENGINE=reference|vllm|sglang

CONFORMANCE := $(foreach engine,reference vllm sglang,conformance-$(engine) conformance-$(engine)-ranks)
CONFORMANCE += conformance-vllm-lora conformance-sglang-lora

# conformance-ENGINE, or conformance-ENGINE-KIND for a server that is set up in another way.
.PHONY: $(CONFORMANCE)
$(CONFORMANCE): conformance-%: venv-dev
	@$(MAKE) --no-print-directory models-$(firstword $(subst -, ,$*))
	$(DEV)/python scripts/setup/conformance.py $(subst -, ,$*) $(ARGS)

# Three servers each: a prefill and a decode server, and an aggregated one to compare with.
DISAGG := $(foreach engine,reference vllm sglang,conformance-disagg-$(engine))
.PHONY: conformance-disagg $(DISAGG)
conformance-disagg: $(DISAGG) ## the suite's hand-over cases on a prefill and a decode server of each engine
$(DISAGG): conformance-disagg-%: venv-dev models-%
	$(DEV)/python scripts/setup/conformance_disagg.py $* $(ARGS)

.PHONY: conformance-tasks conformance-tasks-few
conformance-tasks: venv-dev models-vllm models-sglang ## the suite against a task server of each kind, on both engines
	$(DEV)/python scripts/setup/conformance_tasks.py $(ARGS)

conformance-tasks-few: venv-dev models-vllm models-sglang
	$(DEV)/python scripts/setup/conformance_tasks.py few $(ARGS)

.PHONY: bench
bench: models-vllm ## measure what the adapter costs per token
	.venv/vllm/bin/python -m benchmarks $(ARGS)

.PHONY: bench-kv
bench-kv: models-vllm ## measure what KV events cost, with no subscribers and with two hundred
	.venv/vllm/bin/python -m benchmarks.kv_events $(ARGS)

.PHONY: bench-load
bench-load: venv-dev models-vllm models-sglang ## measure what ten pollers of GetLoad cost a server's streams
	$(DEV)/python -m benchmarks.load vllm $(ARGS)
	$(DEV)/python -m benchmarks.load sglang $(ARGS)

.PHONY: lint $(LINTS)
lint: venv-dev ## style, types, schema, bindings, shell scripts
	@$(MAKE) --no-print-directory --keep-going $(LINTS)

lint-ruff:
	$(DEV)/ruff check --quiet $(CODE)

lint-format:
	$(DEV)/ruff format --check --quiet $(CODE)

lint-types:
	$(DEV)/mypy --strict $(CODE)

lint-bindings:
	$(DEV)/python scripts/generate_bindings.py --check

lint-proto:
	scripts/lint_proto.sh

lint-shell:
	$(DEV)/shellcheck $(SHELL_SCRIPTS)

.PHONY: format
format: venv-dev ## apply what lint can repair by itself
	$(DEV)/ruff check --fix --quiet $(CODE)
	$(DEV)/ruff format --quiet $(CODE)

.PHONY: $(VENVS:%=venv-%)
$(VENVS:%=venv-%): venv-%:
	@scripts/setup/venv.sh $*

.PHONY: setup
setup: $(VENVS:%=venv-%) models ## all environments and models

.PHONY: models models-reference models-vllm models-sglang
models: models-vllm ## build the test models into the cache folder

models-reference:

models-vllm: venv-vllm
	@.venv/vllm/bin/python scripts/setup/build_models.py
	@.venv/vllm/bin/python scripts/setup/build_task_models.py
	@.venv/vllm/bin/python scripts/setup/build_lora_adapters.py

models-sglang: venv-sglang
	@PYTHONPATH=tests/support/sglang_cpu .venv/sglang/bin/python scripts/setup/build_models.py
	@PYTHONPATH=tests/support/sglang_cpu .venv/sglang/bin/python scripts/setup/build_task_models.py
	@PYTHONPATH=tests/support/sglang_cpu .venv/sglang/bin/python scripts/setup/build_lora_adapters.py

.PHONY: clean
clean: ## remove all that was made in this folder (the models in the cache folder stay)
	rm -rf .venv build dist reports .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
