# make train: install into .venv, then train on the embedded digits.   make test: install, then run the fast tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# CUDA libraries are about 3 GB: only where there is an NVIDIA GPU to use them.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes || { test -e /proc/driver/nvidia && echo yes; })
EXTRAS := dev$(if $(HAS_GPU),$(shell echo ,gpu))

# Compile the tests once, not once a process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install train test test-all coverage lint audit docs docs-check gallery doctor digits matrix versions bench gpu-first bench-gpu clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP)  ## Make .venv and install the package into it

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "tfgpu needs Python 3.11 or newer; run make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

train: $(STAMP)  ## Train the default model (more: .venv/bin/tfgpu train --help)
	$(BIN)/tfgpu train $(ARGS)

# Four processes keep two cores busy while some tests wait, and share what TensorFlow keeps in memory.
test: $(STAMP)  ## Run the fast tests in four processes
	$(BIN)/python -m pytest -q -n 4 --dist worksteal $(ARGS)

test-all: $(STAMP)  ## Run the slow tests too (hours)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow or not slow" $(ARGS)

coverage: $(STAMP)  ## Which lines no test reaches; ARGS='-m ""' takes the slow ones too (hours)
	$(BIN)/python -m pytest -q -n 2 --cov=tfgpu --cov-report=term-missing:skip-covered $(ARGS)

lint: $(STAMP)  ## Check the style
	$(BIN)/ruff check .

audit: $(STAMP)  ## Ask whether an installed version has a known fault (needs the network)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --local --skip-editable --progress-spinner off --timeout 15

docs: $(STAMP)  ## Make the site in build/site; warnings are errors (runs the notebooks that have not run yet)
	$(BIN)/python docs/site/notebooks.py
	NO_MKDOCS_2_WARNING=1 CUDA_VISIBLE_DEVICES= $(BIN)/mkdocs build --strict --quiet

docs-check: $(STAMP)  ## Make the site, with notebooks that have not run as they stand
	TFGPU_DOCS_WITHOUT_OUTPUT=1 NO_MKDOCS_2_WARNING=1 CUDA_VISIBLE_DEVICES= $(BIN)/mkdocs build --strict --quiet

gallery: $(STAMP)  ## Make the screenshots of docs/start/gallery.md (needs Chromium)
	$(BIN)/python docs/site/gallery.py

doctor: $(STAMP)  ## Look for what is missing on this machine
	$(BIN)/tfgpu doctor

digits: $(STAMP)  ## Accuracy of the default recipe over five seeds and splits
	$(BIN)/python benchmarks/digits.py

matrix: $(STAMP)  ## Compare every option with one device, stock Keras beside tfgpu (hours)
	$(BIN)/python tests/matrix/run.py --paths fit loop loop-mean sharded --folder build/matrix --json build/matrix.json --write docs/measured/equivalence.md

versions: $(STAMP)  ## Try the supported TensorFlow and Keras versions, each in an environment of its own (half an hour)
	$(BIN)/python tests/versions/run.py --write docs/measured/versions.md $(ARGS)

# PyTorch and JAX, beside the package's environment, not in it. PyTorch's CPU build where an index has it
# (PIP_EXTRA_INDEX_URL can name PyTorch's own), else what there is. A peer that cannot be had is a row that says so.
PEERS := build/bench/venv

$(PEERS)/.installed: Makefile
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'keras~=3.15' 'jax[cpu]'
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0+cpu' \
		|| $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch
	touch $@

bench: $(STAMP) $(PEERS)/.installed  ## Measure speed beside Keras, JAX and PyTorch; writes docs/measured/benchmarks.md
	$(BIN)/python -m benchmarks.all $(ARGS)

gpu-first: $(STAMP)  ## What only a GPU can show: is the step right, and where does it run? Under ten minutes
	$(BIN)/python -m benchmarks.gpu_first $(ARGS)

bench-gpu: $(STAMP)  ## Measure ResNet-50 on the first GPU, for eight minutes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:  ## Remove .venv and everything that tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
