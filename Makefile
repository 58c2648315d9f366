# What people, the git hook and CI run. `make help` lists it.
PYTHON ?= python3
MODEL ?= models/demo
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP := $(wildcard services/worker/backends/native/cpp/*)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILD := DOCKER_BUILDKIT=1 docker build $(if $(BASE),--build-arg BASE=$(BASE)) $(DOCKER_ARGS)
TAG ?= $(VERSION)
COMMA := ,
EXTRAS := gateway,worker,cli,deploy,ecosystem,redis,tls,zstd,plot,proto
PROTOS := $(shell find protos -name '*.proto')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test tiles check proto bench images wheelhouse lock format clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(VENV)/.run gen/.built ## Install, start all four services and serve MODEL (models/demo)
	@exec $(BIN)/stepwell up --model $(MODEL) $(ARGS)

# Four processes divide the tests (tests/conftest.py); those of the files that ARGS names run in one.
# Bytecode is kept whatever the environment says: hundreds of processes import the services.
test: $(VENV)/.dev gen/.built ## Run every test, on the CPU
	@CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
	    $(if $(filter tests%,$(ARGS)),,--numprocesses 4) $(ARGS)

# The log of a run names the order: "bfloat16 in the order of tiles".
tiles: ## Run the tests of computation, or those of ARGS, with emulated tile registers (Intel AMX)
	@CXX=$(CURDIR)/tests/worker/emulated/tiles-c++ $(MAKE) test \
	    ARGS="$(or $(ARGS),tests/parity tests/worker/unit/backends tests/worker/unit/models)"

check: $(VENV)/.dev gen/.built ## Format, lint, types, layering, contracts, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: gen/.built ## Generate gen/ from protos/

bench: $(VENV)/.dev gen/.built ## Measure; prints tables of docs/benchmarks.md
	$(BIN)/python -m benchmarks.serving $(ARGS)

images: ## Build the images of all services, for the CPU, as TAG; BASE and DOCKER_ARGS are for docker build
	@for image in gateway scheduler kvpool; do \
	    $(BUILD) --file deploy/docker/Dockerfile --target $$image --tag stepwell/$$image:$(TAG) . || exit 1; \
	done
	@$(BUILD) --file deploy/docker/worker.Dockerfile --target cpu --tag stepwell/worker:$(TAG) .

wheelhouse: $(VENV)/.run ## Download the packages of the images, to build them without the package index
	$(BIN)/python deploy/docker/packages.py download deploy/docker/wheelhouse \
	    services gateway worker redis tls cli ecosystem build

lock: $(VENV)/.dev ## Resolve requirements.lock anew from pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --all-extras --no-header \
	    --no-annotate --no-emit-index-url pyproject.toml -o requirements.lock

format: $(VENV)/.dev ## Rewrite sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/buf format -w

clean: ## Remove everything that can be made again
	rm -rf $(VENV) gen build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	    || { echo "Stepwell needs Python 3.11 to 3.13; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) \
	    || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }

# torch comes first: pip's choice of its build (CPU or CUDA) then stands. pip would compile 20,000
# files with one processor. Half of their text is rarely imported: Python compiles it at first use.
NOT_COMPILED := /(transformers/models|litellm|sympy|networkx|torch/(_inductor|testing)|tests)/
define install
	@echo "Installing what $(1) (a few minutes the first time; torch is the large part)"
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null \
	    || $(PIP) install --no-compile --progress-bar on -c requirements.lock torch
	$(PIP) install --no-compile --progress-bar on -c requirements.lock -e '.[$(EXTRAS)$(2)]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true
endef

$(VENV)/.run: $(BIN)/python pyproject.toml requirements.lock
	$(call install,serving needs)
	@touch $@

# One installation: pip prepares the project and compares all packages in each.
$(VENV)/.dev: $(BIN)/python pyproject.toml requirements.lock
	$(call install,serving$(COMMA) tests and checks need,$(COMMA)dev)
	@touch $(VENV)/.run $@

gen/.built: $(PROTOS) | $(VENV)/.run
	@echo "Generating gen/ from protos/"
	@rm -rf gen && mkdir -p gen
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	    --python_out=gen --grpc_python_out=gen --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen $(PROTOS)
	@touch $@
