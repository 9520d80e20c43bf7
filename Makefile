# `make train` and `make test` work on a fresh machine with Python 3.11 or newer.
#
# Which Python: VENV=<folder> if given; else an active environment that already has a torch the project
# supports (it is used as it is: its torch is never replaced); else .venv, made here from constraints.txt.

.PHONY: train test test-xla parity-xla check mutants parity bench format clean
.DEFAULT_GOAL := help

ARGS ?=
JOBS ?= 4
XLA_VENV ?= .venv-xla
PYTHON = $$(tests/setup.sh $(1))

help:
	@sed -n '/^[a-z-]*:.*##/s/\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 14

train: ## train the default recipe (ARGS="precision=bf16 seed=1" overrides values)
	@python=$(call PYTHON,run) && exec "$$python" -m runner $(ARGS)

# Hundreds of processes import the project, each of which would compile it anew without bytecode.
test: ## run the tests, JOBS=4 files at once (ARGS="-k name" chooses some, ARGS="-m slow" the slow ones)
	@python=$(call PYTHON,test) && exec env -u PYTHONDONTWRITEBYTECODE "$$python" -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# An environment of its own, made once: some 7 GB, most of it torch's CUDA libraries.
test-xla: $(XLA_VENV)/.installed ## test training through torch_xla, on one device of the CPU and on two
	@for number in 1 2; do PJRT_DEVICE=CPU CPU_NUM_DEVICES=$$number \
	  $(XLA_VENV)/bin/python -m pytest -m xla tests/accel/strategies/xla tests/runner/test_xla.py $(ARGS) || exit 1; done

parity-xla: $(XLA_VENV)/.installed ## the same comparison through torch_xla, on one device and on two
	@for number in 1 2; do PJRT_DEVICE=CPU CPU_NUM_DEVICES=$$number \
	  $(XLA_VENV)/bin/python -m tests.parity --device xla --world 1 $(ARGS) || exit 1; done

$(XLA_VENV)/.installed: tests/xla_requirements.txt
	python3 -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install -q -r tests/xla_requirements.txt
	@touch $@

check: ## lint, format and types
	@python=$(call PYTHON,check) && "$$python" -m ruff check . && "$$python" -m ruff format --check . && "$$python" -m mypy

format: ## rewrite files in the project's format
	@python=$(call PYTHON,check) && "$$python" -m ruff check --fix . && "$$python" -m ruff format .

mutants: ## break each documented name in turn; its test must fail (ARGS="--only gather")
	@python=$(call PYTHON,test) && exec "$$python" -m tests.conformance.gate $(ARGS)

parity: ## train under every strategy and precision; compare with a plain loop (ARGS="--only fsdp")
	@python=$(call PYTHON,test) && exec "$$python" -m tests.parity $(ARGS)

bench: ## measure a step against a hand-written loop, the import, and large models
	@python=$(call PYTHON,test) && exec "$$python" -m tests.benchmarks

clean: ## remove what was built here (not the runs)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
