# kvlab. `make lab` opens the lab, `make test` checks everything, `make help` lists the rest.
#
#   PYTHON=python3.12            which Python makes .venv (3.11 or newer)
#   TORCH_INDEX_URL=https://…    where else to look for torch; https://download.pytorch.org/whl/cpu has the small CPU build
#   TRANSFORMERS=5.17.0          another transformers than the pinned one ("newest" for the newest 5.x)
#   LAB_FLAGS=--no-browser       passed on to JupyterLab

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
TRANSFORMERS ?=
LAB_FLAGS ?=
OLDEST := 5.17.0

BIN := $(VENV)/bin
PY := $(BIN)/python
# pip compiles one file after another; compileall takes all cores, and leaves out what is large and hardly ever imported.
COMPILE := $(PY) -m compileall -qq -j 0 -x '/(tests?|testing|_inductor|transformers/models|third_party|lexers|locale-data)/' $(VENV)/lib || true
PIP := $(PY) -m pip --disable-pip-version-check install --no-compile -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
PINNED := pyproject.toml constraints.txt
HAS_PIP := $(PY) -m pip --version >/dev/null 2>&1 || { echo "$(PY) has no pip: $(PY) -m ensurepip, or make clean"; exit 1; }
CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name) 2>/dev/null)))

# Tests run two at a time, a thread each: two torches' threads would fight over two cores.
TESTING := OMP_NUM_THREADS=1

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: app docs help lab test lint unit oldest kernels-test course notebooks gpu nightly clean

help:
	@sed -n 's/^## //p' Makefile

## make lab        install what is pinned, fetch the model once, open JupyterLab on the live lab
lab: $(VENV)/.lab $(VENV)/.model
	@$(PY) kvlab/jupyter.py $(LAB_FLAGS)

## make app        the live lab as a page without code (Voilà); make app PANEL=block-table for another panel
PANEL ?= live-lab
app: $(VENV)/.app $(VENV)/.model
	@$(BIN)/kvlab app $(PANEL) $(LAB_FLAGS)

## make docs       the site: course, reading and API, in docs/_build
docs: $(VENV)/.docs
	$(PY) -m sphinx -q -W --keep-going -c docs . docs/_build

## make test       install what tests need, then lint, unit and kernel tests, notebooks, browser
test: $(VENV)/.test
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory oldest
	@$(MAKE) --no-print-directory kernels-test
	@$(MAKE) --no-print-directory course

## make lint       ruff and mypy
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes: the models are too small for one test to keep two cores busy.
unit: $(VENV)/.test $(VENV)/.model
	$(TESTING) $(PY) -m pytest -q -n 2 tests --ignore=tests/browser --ignore=tests/kernels

# What touches transformers, with the oldest one that is supported; it lies beside the pinned one and is found first.
oldest: $(VENV)/.test $(VENV)/transformers-$(OLDEST)
	$(TESTING) PYTHONPATH=$(VENV)/transformers-$(OLDEST) KVLAB_CASES=40 $(PY) -m pytest -q -n 2 -k 'not (compiled or lookup or many_turns or a_thread or samples or several or repacked or (gives_the_tokens and (gemma2 or mistral)))' tests/test_cache.py tests/test_generate.py tests/test_parity.py

# A process of their own: Triton reads at its first import whether to interpret. Half of the cases; all of them in `make nightly`.
kernels-test: $(VENV)/.test
	$(TESTING) TRITON_INTERPRET=1 $(PY) -m pytest -q -n 2 tests/kernels

# The cells of every notebook run (00, whose panel the browser drives, in `make nightly`); outputs are compared where a cell asks for it (tag nbval-check-output). The browser's tests run beside them:
# the longest first, two files at a time.
course: $(VENV)/.test
ifeq ($(CHROMIUM),)
	@echo "browser tests: SKIPPED, no Chromium found (sudo apt install chromium)"
endif
	$(TESTING) $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --nbval-lax --nbval-current-env --nbval-cell-timeout=300 \
	  --ignore=notebooks/solutions --ignore=notebooks/00_live_lab.ipynb $(if $(CHROMIUM),tests/browser/test_panels.py) notebooks/05_eviction.ipynb \
	  $(if $(CHROMIUM),tests/browser/test_live_lab.py) notebooks

## make notebooks  run every notebook and save it with pictures and without widget state
notebooks: $(VENV)/.test
	$(PY) tools/notebooks.py notebooks

## make gpu        check and time the Triton kernels and offloading on this machine's GPU
OUT ?= gpu
gpu: $(VENV)/.test
	$(PY) kernels/gpu.py --out $(OUT)-kernels.json
	$(PY) -m kvlab.measure.whole_model $(OUT)-model.json
	$(PY) -m kvlab.measure.place_studies $(OUT)-offload.json
	$(PY) -m kvlab.measure.serving_studies $(OUT)-serving.json

## make nightly    the tests that are too long for every run
nightly: $(VENV)/.test $(VENV)/transformers-$(OLDEST)
	KVLAB_ALL=1 $(PY) -m pytest -q -n 2 -m 'many or nightly' tests --ignore=tests/browser --ignore=tests/kernels
	$(PY) -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout=300 notebooks/00_live_lab.ipynb notebooks/solutions
	KVLAB_ALL=1 $(PY) -m pytest -q tests/browser
	PYTHONPATH=$(VENV)/transformers-$(OLDEST) $(PY) -m pytest -q tests/test_families.py tests/test_generate.py
	KVLAB_CASES=10000 $(PY) -m pytest -q tests/test_parity.py
	TRITON_INTERPRET=1 KVLAB_ALL=1 KVLAB_COMPILE=all KVLAB_SHAPES=40 $(PY) -m pytest -q -n 2 tests/kernels

## make clean      remove .venv and caches (not the model: `kvlab model` says where it lies)
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A stamp for each set of packages: installed again only when a pin changes.
$(VENV)/.lab: $(PY) $(PINNED)
	@$(HAS_PIP)
	$(PIP) -e ".[lab,kernels]"
	@$(COMPILE)
	@touch $@

$(VENV)/transformers-$(OLDEST): | $(VENV)/.test
	$(PY) -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --target $@ transformers==$(OLDEST) "huggingface-hub>=1.5,<2"

$(VENV)/.test: $(PY) $(PINNED)
	@$(HAS_PIP)
	$(PIP) -e ".[test]"
	@$(COMPILE)
ifneq ($(TRANSFORMERS),)
	$(PY) -m pip --disable-pip-version-check install --quiet --upgrade "transformers$(if $(filter newest,$(TRANSFORMERS)),<6,==$(TRANSFORMERS))"
endif
	@touch $@ $(VENV)/.lab

$(VENV)/.app: $(VENV)/.lab
	$(PIP) -e ".[lab,kernels,app]"
	@touch $@

$(VENV)/.docs: $(VENV)/.lab
	$(PIP) -e ".[lab,kernels,docs]"
	@touch $@

# Fetched and checked before the first start; whatever happens to it later, kvlab.load sees it.
$(VENV)/.model: kvlab/fetch.py | $(VENV)/.lab
	$(BIN)/kvlab model
	@touch $@

$(PY):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "kvlab needs Python 3.11 or newer, and there is no '$(PYTHON)': sudo apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvlab needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2): make lab PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment with pip: sudo apt install python3-venv"; exit 1; }
	@command -v git >/dev/null || echo "note: git is missing, which updating kvlab needs: sudo apt install git"
	$(PYTHON) -m venv $(VENV)
