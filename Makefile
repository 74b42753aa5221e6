# Each target is one command on a bare machine with Python >= 3.11 (with venv) and git.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/mnist_ddp_spawn

.PHONY: help setup demo test check installed test-examples test-pages test-timed test-e2e doctor images e2e images-e2e docs bench \
	prove-gpu report constraints clean

help:
	@echo "make demo    install PyTorch and train mnist_ddp_spawn with 2 processes on the embedded digits (CPU=1: without CUDA;"
	@echo "             INDEX=URL: from a mirror of the package index)"
	@echo "make test    set up and test each example with 1 to 3 processes, and the shared package: a few minutes"
	@echo "make check   the rest: mutations, faults, documented commands, pages, manifests, containers: up to an hour"
	@echo "make doctor  look for what would go wrong on this machine"
	@echo "make images  build the images with docker or podman (BASE_IMAGE=... on another base than CUDA's;"
	@echo "             COMPILER=yes with what --compile needs, under tags that end in -compile; ONLY=gan_ddp: one)"
	@echo "make e2e     build the images on a minimal Debian and run the examples in containers"
	@echo "make docs    set up and build the documentation, in English and Chinese, into site"
	@echo "make bench   set up and run every benchmark that this machine can, and make the report of them:"
	@echo "             make bench PEER=../examples MNIST=DIR CLOTHES=DIR IMAGES=DIR CSV=FILE VOCAB=FILE; QUICK=1 ONLY=scaling to try it"
	@echo "make prove-gpu  check every example on a machine with a GPU: PART=correctness, speed or nccl; DEVICE=cpu to try it; OUT=DIR"
	@echo "make report  the page of the benchmarks from the results that are there"
	@echo "make setup   make .venv with everything, tests and tools included"
	@echo "make clean   delete environments and runs"

setup: .venv/.ready

# Two stamps: what the programs need to run, and what tests, lint and pages need, too. uv downloads in parallel and hard-links
# from its cache; what pip warns of matters only if it fails.
# CPU=1 takes PyTorch's wheels without CUDA, from PyTorch's own index; INDEX=URL takes everything else from a mirror.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt $(if $(CPU),--torch-backend cpu)
UNREACHED = $(if $(CPU),if grep -q 'Failed to fetch.*/whl/cpu' .venv/setup.log; then \
	echo "error: PyTorch's own index cannot be reached: leave CPU=1 out" >&2; fi; )
# Set in many container images: every start would compile torch again, which takes 20 s.
export PYTHONDONTWRITEBYTECODE :=
ifdef INDEX
export PIP_INDEX_URL := $(INDEX)
export UV_DEFAULT_INDEX := $(INDEX)
endif

.venv/.demo: pyproject.toml constraints.txt
	@echo "setting up .venv ($(if $(CPU),without CUDA,3 GB to download with CUDA; CPU=1 leaves it out))"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	@$(PYTHON) -m venv --clear .venv
	@{ $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv && \
		$(INSTALL) --editable .; } >.venv/setup.log 2>&1 || { cat .venv/setup.log >&2; $(UNREACHED)exit 1; }
	@touch $@

.venv/.ready: .venv/.demo
	@$(INSTALL) --group dev --editable . >.venv/setup.log 2>&1 || { cat .venv/setup.log >&2; exit 1; }
	@touch $@

demo: .venv/.demo
	@$(BIN)/python -m examples.mnist_ddp_spawn --nproc 2 --out $(OUT)
	@echo "next: docs/en/getting-started.md; your own model: examples/your_model"

test: setup
	@$(BIN)/tox run -e lint,types,core
	@echo "make check runs the rest: mutations, faults, documented commands, pages in a browser, manifests, containers"

# Needs kubectl, ip and Chromium, which it installs on Debian; and a container engine, as make e2e does.
# Installing and building images keep less than a core busy: the tests that need neither run beside them.
check: setup
	@tests/install.sh look
	@$(MAKE) --no-print-directory --jobs 2 installed test-examples
	@$(MAKE) --no-print-directory test-pages
	@$(MAKE) --no-print-directory test-timed
	@$(MAKE) --no-print-directory test-e2e

installed: setup
	@tests/install.sh >.venv/install.log 2>&1 || { cat .venv/install.log >&2; exit 1; }
	@$(MAKE) --no-print-directory images-e2e

# Tests start programs of .venv by their names.
PYTEST = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest
# References, mutations, faults, benchmarks in their quick form. Two tests at a time, on two cores: a third made the same
# tests take 5 to 20 % longer.
test-examples: setup
	@$(PYTEST) -n 2 --dist loadgroup -m "not timed" tests/common/test_every_rank.py tests/common/test_real_data.py \
		tests/benchmarks tests/examples tests/faults

# Documented commands, languages, the site in a browser; Dockerfiles, and manifests against the schemas of Kubernetes.
test-pages: setup
	@$(PYTEST) -n 3 --dist loadgroup tests/docs tests/docker tests/k8s

# The files of a folder, one of them first: no worker is left with the longest tests at the end.
first = $(1) $(filter-out $(1),$(wildcard $(dir $(1))test_*.py))
# What has bounds in seconds mostly waits, with nothing else beside it.
test-timed: setup
	@$(PYTEST) -n 4 --maxschedchunk 1 -m timed $(call first,tests/faults/test_who.py) \
		tests/examples tests/benchmarks tests/common

doctor: .venv/.demo
	@$(BIN)/python -m common.doctor $(ARGS)

# COMPILER=yes, REGISTRY=... and TAG=... are in build.py's environment, wherever they were given.
images:
	@$(PYTHON) docker/build.py $(if $(BASE_IMAGE),--base-image $(BASE_IMAGE)) $(ONLY)

# Root, because a network for containers needs it; the tests' own containers have no rights at all.
e2e: images-e2e
	@$(MAKE) --no-print-directory test-e2e

images-e2e test-e2e: export CONTAINERS_CONF ?= $(CURDIR)/tests/e2e/containers.conf
images-e2e: setup
	@echo "building the images for the tests (.venv/images.log)"
	@{ base=$$(tests/e2e/prepare.sh) && $(MAKE) --no-print-directory images BASE_IMAGE=$$base && \
		$(MAKE) --no-print-directory images BASE_IMAGE=$$base COMPILER=yes ONLY=mnist_ddp_spawn; \
		} >.venv/images.log 2>&1 || { cat .venv/images.log >&2; exit 1; }

test-e2e: setup
	@$(PYTEST) -n 3 --maxschedchunk 1 --timeout 600 --durations 0 $(call first,tests/e2e/test_two_nodes.py)

# Needs no network. English first: it empties the folder. (The variable leaves out the theme's advertisement.)
docs: export NO_MKDOCS_2_WARNING = 1
docs: export REPOSITORY ?= $(shell git config remote.origin.url | sed -E 's,^git@([^:]+):,https://\1/,; s,\.git$$,,; /^https:/!d')
docs: setup
	@$(BIN)/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml
	@$(BIN)/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.zh.yml
	@echo "open site/index.html"

# PEER is a checkout of pytorch/examples, MNIST, CLOTHES and IMAGES are folders of data, CSV and VOCAB files of reviews and of a BERT:
# what is not given is skipped, by name in the report.
bench: setup
	@$(BIN)/python -m benchmarks.all $(if $(PEER),--peer "$(PEER)") $(if $(MNIST),--mnist "$(MNIST)") \
		$(if $(CLOTHES),--clothes "$(CLOTHES)") $(if $(IMAGES),--images "$(IMAGES)") $(if $(CSV),--csv "$(CSV)") $(if $(VOCAB),--vocab "$(VOCAB)") \
		$(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick) $(if $(RESULTS),--out "$(RESULTS)")

# Where torch and the rest are installed already and there is no network: python -m benchmarks.gpu
prove-gpu: OUT = runs/prove-gpu
prove-gpu: setup
	@$(BIN)/python -m benchmarks.gpu --out $(OUT) $(if $(PART),--part $(PART)) $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(IMAGES),--images "$(IMAGES)") $(if $(MNIST),--mnist "$(MNIST)") $(if $(PEER),--peer "$(PEER)")
report: setup
	@$(BIN)/python -m benchmarks.report
	@$(BIN)/python -m benchmarks.readme

# After a change of the dependencies in pyproject.toml: pin the newest versions (and no registry's address).
constraints: setup
	$(BIN)/uv pip compile --quiet --universal --upgrade --no-emit-index-url --no-annotate --no-header \
		--python-version 3.11 --group dev pyproject.toml --output-file constraints.txt

clean:
	rm -rf .venv .tox runs site
