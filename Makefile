# Each target is one command on a bare machine with Python >= 3.11 (with venv), make and git.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/mnist_ddp_spawn

.PHONY: help setup demo lint test check nightly mutants e2e images docs bench constraints clean

help:
	@echo "make demo     install PyTorch and train mnist_ddp_spawn with 2 processes on the embedded digits"
	@echo "              (CPU=1: without CUDA, from PyTorch's own index; INDEX=URL: from a mirror)"
	@echo "make test     set up and run the core of the tests: a few minutes"
	@echo "make check    the rest: all programs started cold, pages, manifests, containers"
	@echo "make nightly  mutants, long matrices, every documented command, benchmarks in their quick form"
	@echo "make mutants  plant mistakes in the code and see the tests fail (AREA=core: of one area)"
	@echo "make images   build the images with docker or podman (BASE_IMAGE=...: on another base)"
	@echo "make e2e      run the examples in containers on a minimal Debian; needs root and podman"
	@echo "make docs     build the site, in English and Chinese, into site"
	@echo "make clean    delete environments, runs and the site"

# Two stamps: what the programs need to run, and what tests and tools need as well. uv downloads in parallel.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt $(if $(CPU),--torch-backend cpu)
# Set in many container images; without bytecode, every start would compile torch again, which takes 20 s.
export PYTHONDONTWRITEBYTECODE :=
ifdef INDEX
export PIP_INDEX_URL := $(INDEX)
export UV_DEFAULT_INDEX := $(INDEX)
endif

setup: .venv/.ready

.venv/.demo: pyproject.toml constraints.txt
	@echo "setting up .venv ($(if $(CPU),without CUDA,3 GB with CUDA; CPU=1 leaves it out))"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	@$(PYTHON) -m venv --clear .venv
	@{ $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv && \
		$(INSTALL) --editable .; } >.venv/setup.log 2>&1 || { cat .venv/setup.log >&2; exit 1; }
	@touch $@

.venv/.ready: .venv/.demo
	@$(INSTALL) --group dev --editable . >.venv/setup.log 2>&1 || { cat .venv/setup.log >&2; exit 1; }
	@touch $@

demo: .venv/.demo
	@$(BIN)/python -m examples.mnist_ddp_spawn --nproc 2 --out $(OUT)
	@echo "next: docs/en/getting-started.md; your own model: examples/your_model"

PYTEST = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports
	@$(BIN)/ty check --quiet common examples tools benchmarks docker

# Form, units, and real ranks: every example against a plain loop, killed and resumed.
test: lint
	@$(PYTEST) -m "not nightly" tests/form tests/unit tests/test_parity.py tests/test_resume.py

check: setup
	@tests/install.sh
	@$(PYTEST) -m "not nightly" tests --ignore tests/form --ignore tests/unit \
		--ignore tests/test_parity.py --ignore tests/test_resume.py

nightly: setup
	@$(PYTEST) -m nightly tests
	@$(MAKE) --no-print-directory mutants

mutants: setup
	@$(BIN)/python -m tests.mutants $(AREA)

# The build lines of docs/en/docker.md.
ENGINE = $(shell command -v docker || command -v podman)
REGISTRY = localhost/distributed-training-examples
TAG = 0.2.0
images:
	$(ENGINE) build $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) --build-arg REVISION=$$(git rev-parse HEAD) \
		--file docker/base/Dockerfile --tag $(REGISTRY)/base:$(TAG) .
	for name in $(notdir $(patsubst %/Dockerfile,%,$(wildcard docker/*_*/Dockerfile))); do \
		$(ENGINE) build --file docker/$$name/Dockerfile --tag $(REGISTRY)/$$name:$(TAG) . || exit 1; \
	done

e2e: setup
	@$(BIN)/python -m pytest -m "not nightly" tests/e2e

docs: export NO_MKDOCS_2_WARNING = 1
docs: setup
	@$(BIN)/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml
	@$(BIN)/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.zh.yml
	@echo "open site/index.html"

# After a change of the dependencies: pin the newest versions (and no registry's address).
constraints: setup
	$(BIN)/uv pip compile --quiet --universal --upgrade --no-emit-index-url --no-annotate --no-header \
		--python-version 3.11 --group dev pyproject.toml --output-file constraints.txt

clean:
	rm -rf .venv .tox runs site
