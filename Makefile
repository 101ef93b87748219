# `make demo` and `make test` are all the set-up there is: both create .venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN := .venv/bin
# Without its caches Python compiles every module, and pytest every test, in each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# Files side by side, in one process more than there are cores; the tests of a file stay together and in order.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder
# Types are checked while the tests run; what was found is shown after them.
WITH_TYPES := $(BIN)/mypy > .venv/mypy.log 2>&1 & types=$$!; \
	trap 'failed=$$?; wait $$types || failed=1; cat .venv/mypy.log; exit $$failed' EXIT;

# A given PYTHON is that of .venv, or .venv must go first.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard .venv/bin/python),)
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(call version,$(PYTHON)),$(call version,.venv/bin/python))
$(error .venv has Python $(call version,.venv/bin/python), not $(call version,$(PYTHON)): make clean)
endif
endif
endif

.PHONY: help demo test test-all test-slurm test-mutations test-docs lint style docs site clean
help:  ## show these lines
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/.core  ## train a small Llama on generated text, on the GPU if there is one
	@$(BIN)/shardline train --preset demo

test: .venv/.dev .venv/triton style  ## lint, types and tests
	$(WITH_TYPES) $(PYTEST) -m "not slow"

test-all: .venv/.dev .venv/triton style  ## also the tests that take longer, every program in a process of its own
	$(WITH_TYPES) SHARDLINE_TEST_STARTS=exec HYPOTHESIS_PROFILE=full $(PYTEST)

CLUSTER := slurmctld slurmd munged sshd mpirun ip
test-slurm: .venv/.dev  ## jobs on a real SLURM of two nodes, ssh, mpirun and torchrun on two hosts; installs them (Debian, root)
	@PATH="$$PATH:/usr/sbin"; for one in $(CLUSTER); do command -v $$one >/dev/null || { \
		apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
		slurm-wlm munge openssh-server openmpi-bin iproute2 && break; } || exit 1; done
	$(BIN)/python -m pytest -p no:xdist -rs tests/clusters

test-mutations: .venv/.dev .venv/triton  ## switch promises off one by one: each must make a test fail
	$(BIN)/python -m tests.mutations.run

test-docs: .venv/.dev .venv/.docs  ## run every command of README and docs, and build the site
	$(BIN)/python -m pytest -p no:xdist tests/docs

lint: style
	$(BIN)/mypy

style: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: .venv/.core  ## write the generated pages under docs/ again
	$(BIN)/shardline config --markdown > docs/config.md.new && mv docs/config.md.new docs/config.md
	$(BIN)/shardline config --compatibility > docs/new && mv docs/new docs/compatibility.md
	$(BIN)/shardline config --axolotl > docs/new && mv docs/new docs/axolotl-keys.md
	$(BIN)/shardline config --commands > docs/new && mv docs/new docs/cli.md

site: .venv/.docs  ## build the documentation site: build/site/index.html, which needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed (make PYTHON=/path/to/python3.11 ...)"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.core: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch .venv/.core $@

# The programs that build the site, and no torch.
.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt $$($(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Triton for its interpreter alone, apart: beside a CPU build of torch it would be taken for a compiler.
.venv/triton: Makefile | .venv/bin/python
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $@ triton==3.6.0 numpy==2.2.6 \
		|| echo "note: without Triton the fused kernels are not tested"
	@mkdir -p $@ && touch $@

clean:  ## remove .venv and caches; runs under outputs/ stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
