# Each target is one command on a bare machine with Python >= 3.11 (with venv) and git.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/mnist_ddp_spawn

.PHONY: help setup demo test bench report constraints clean

help:
	@echo "make demo    set up and train mnist_ddp_spawn with 2 processes on the embedded digits"
	@echo "make test    set up and run all tests (tox)"
	@echo "make bench   set up and run every benchmark that this machine can, and make the report of them:"
	@echo "             make bench PEER=../examples MNIST=DIR IMAGES=DIR CSV=FILE VOCAB=FILE; QUICK=1 ONLY=scaling to try it"
	@echo "make report  the page of the benchmarks from the results that are there"
	@echo "make setup   make .venv with everything"
	@echo "make clean   delete environments and runs"

setup: .venv/.ready

# uv downloads in parallel and hard-links from its cache; PYTHONDONTWRITEBYTECODE would make every start slower.
.venv/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two with an empty download cache)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --group dev --editable .
	@touch $@

demo: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m examples.mnist_ddp_spawn.train --nproc 2 --out $(OUT)

# Two environments at a time: starting a process keeps one core busy, and the tests start hundreds.
test: setup
	@$(BIN)/tox run-parallel --parallel 2 --parallel-no-spinner

# PEER is a checkout of pytorch/examples, MNIST and IMAGES are folders of data, CSV and VOCAB files of reviews and of a BERT:
# what is not given is skipped, by name in the report.
bench: setup
	@$(BIN)/python -m benchmarks.all $(if $(PEER),--peer "$(PEER)") $(if $(MNIST),--mnist "$(MNIST)") \
		$(if $(IMAGES),--images "$(IMAGES)") $(if $(CSV),--csv "$(CSV)") $(if $(VOCAB),--vocab "$(VOCAB)") \
		$(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick) $(if $(RESULTS),--out "$(RESULTS)")

report: setup
	@$(BIN)/python -m benchmarks.report

# After a change of the dependencies in pyproject.toml: pin the newest versions (and no registry's address).
constraints: setup
	$(BIN)/uv pip compile --quiet --universal --upgrade --no-emit-index-url --no-annotate --no-header \
		--python-version 3.11 --group dev pyproject.toml --output-file constraints.txt

clean:
	rm -rf .venv .tox runs
