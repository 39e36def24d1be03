# Every target makes the environment that it needs (launch/bootstrap.sh) and uses this machine's GPUs if it has any.

.DEFAULT_GOAL := help
.PHONY: help train test test-recipes test-launch test-nodes test-gpu test-other mutants lint types imports format docs
SHELL := /bin/bash

python := .venv/bin/python
bootstrap := @launch/bootstrap.sh
pytest := OMP_NUM_THREADS=1 $(python) -m pytest
# Two tests at once, the longest files first, where pytest-xdist is installed.
in_pairs := $$($(python) -c 'import xdist; print("-n 2 --dist loadgroup --no-loadscope-reorder")' 2>/dev/null)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
	  while IFS='|' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

train: ## train a small Megatron-Core GPT with overlapped linears (TRAIN_ARGS="--train-iters 100 ..." is passed on)
	$(bootstrap) main
	launch/torchrun.sh recipes/pretrain_gpt.py --overlap-train $(TRAIN_ARGS)

test: ## the tests that need no GPU, except test-recipes, test-launch and test-nodes (TEST_ARGS="-k name ..." is passed on)
	$(bootstrap) main
	$(pytest) $(in_pairs) tests/golden tests/megatron tests/protocol tests/unit $(TEST_ARGS)

test-recipes: ## the recipes: training, checkpoints, compare_mfu, on CPU processes
	$(bootstrap) main
	$(pytest) $(in_pairs) tests/recipes $(TEST_ARGS)

test-launch: ## batch jobs on a real Slurm, where its packages are installed (as root also on two nodes), and shellcheck
	$(bootstrap) main
	$(pytest) tests/launch $(TEST_ARGS)

test-nodes: ## groups that span nodes, each a network namespace of this machine: as root, with iproute2
	$(bootstrap) main
	$(pytest) tests/nodes $(TEST_ARGS)

test-gpu: ## the GPU tests, on 2, 4 or 8 GPUs, for every provider (TEST_ARGS="-k name ..." is passed on)
	$(bootstrap) main
	launch/test_gpu.sh $(python) $(TEST_ARGS)

test-other: ## the suite's fast part on the other Python and Megatron-Core
	$(bootstrap) other
	@if [ ! -x .venv-other/bin/python ]; then echo "make test-other: skipped, see the line above"; else \
	  $(subst $(python),.venv-other/bin/python,$(pytest) $(in_pairs)) tests/unit tests/megatron tests/recipes/test_pretrain.py \
	  --ignore-glob="tests/unit/test_bench_*" -m "not slow" $(TEST_ARGS); fi

mutants: ## change FILE in every way that cosmic-ray knows, and print what TESTS do not notice (FILE=... TESTS="tests/...")
	$(bootstrap) main
	launch/mutants.sh $(python) $(FILE) $(TESTS)

lint: ## ruff, mypy over the public API, import-linter for the layers
	$(bootstrap) main
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	@$(MAKE) --no-print-directory types imports

types: # mypy alone
	launch/layout.sh
	cd build/layout && ../../$(python) -m mypy --config-file ../../pyproject.toml

imports: # import-linter alone
	launch/layout.sh
	cd build/layout && ../../.venv/bin/lint-imports --config ../../pyproject.toml --no-logo --no-cache

docs: ## build the documentation into build/site; a warning is an error
	$(bootstrap) main
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@echo 'Open build/site/index.html. To search the site: $(python) -m http.server -d build/site'

format: ## let ruff sort imports and format
	$(bootstrap) main
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
