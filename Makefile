# `make demo`, `make test` and `make check` each set up .venv first; it is installed again only when
# pyproject.toml or constraints.txt change.

# A virtual environment or module path of the caller's must not leak into ours. Nor a wish for no bytecode: each process
# that tests start would compile ReplayLake again, and each worker the tests with their assertions.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python
SOURCES := $(wildcard datastore offline online serve cli tests examples benchmarks) src/replaylake/__init__.py
WORKERS ?= 2
KILLS ?= 500
FUZZ_MINUTES ?= 10

comma := ,

.PHONY: .venv demo test test-slow browser pictures bars chaos check check-newer-gymnasium check-pythons check-oldest check-container check-kernels check-package compat-agents compat-base compat compat-losses compat-mlflow compat-kserve compat-openapi compat-policies compat-recorders compat-verifiers bench ope-coverage clean
.DEFAULT_GOAL := test

.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@for candidate in python3.11 python3; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "no Python 3.11 or newer found as python3.11 or python3: install one" >&2; exit 1; fi; \
	echo "setting up .venv with $$found: about 140 packages, two minutes once they are downloaded"; \
	$$found -m venv .venv
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

demo: .venv/.installed
	@$(PY) examples/demo.py

# One torch thread per worker: more would only contend. The tests write 0.7 GB and wait for the disk some 50,000 times;
# so they write to memory, where there is room, and the slow tests to the disk. What failing tests wrote is kept.
test: .venv/.installed
	@echo "tests: fast, $(WORKERS) at a time"
	@trap : INT; folder=$$(.ci/test-folder) && \
	OMP_NUM_THREADS=1 $(PY) -m pytest -q --durations 30 --durations-min 1 -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not chaos and not bars" --basetemp="$$folder/tests"; \
	code=$$?; if [ $$code -eq 1 ]; then echo "the files of the tests are in $$folder"; else rm -rf "$$folder"; fi; exit $$code

test-slow: .venv/.installed
	@echo "tests: slow, $(WORKERS) at a time"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q --durations 60 --durations-min 5 -n $(WORKERS) --dist loadfile -m "slow and not gpu and not chaos and not bars" || [ $$? -eq 5 ]

# The explorer's pages in Debian's Chromium: what does not run for want of it, the first lines say; with CI=true that fails.
browser: .venv/.installed
	@command -v chromium chromium-browser google-chrome >/dev/null || echo "tests: NO browser: none of these tests can run. Install chromium (apt-get install chromium)" >&2
	@echo "tests: the explorer in Chromium"
	@OMP_NUM_THREADS=1 REPLAYLAKE_PICTURES=$(PICTURES) $(PY) -m pytest -q --durations 10 --durations-min 5 -p no:xdist -m browser tests/serve/explorer || [ $$? -eq 5 -a -z "$$CI" ]

# The pictures of docs/EXPLORER.md: pages of the demo's lake, which `make demo` makes, and of some more data. To look at all
# pages, `make browser PICTURES=/tmp/pages` saves each as it is tested.
pictures: .venv/.installed
	@OMP_NUM_THREADS=1 $(PY) tests/serve/explorer/make_pictures.py

# Learning online takes a minute a run, with two workers beside it: one run after the other.
bars: .venv/.installed
	@echo "tests: what training has to reach, one run after the other"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -rA -m bars tests/test_bars.py tests/online/test_bars.py

# The long form of the fault tests: kills, damage and failing disks by the hundred. `make chaos KILLS=2000`
# kills more often; -rP shows what each test did. Each target of tests/fuzz runs for FUZZ_MINUTES.
chaos: .venv/.installed
	@echo "tests: chaos, $(KILLS) kills, $(WORKERS) at a time"
	@REPLAYLAKE_KILLS=$(KILLS) REPLAYLAKE_FUZZ_MINUTES=$(FUZZ_MINUTES) OMP_NUM_THREADS=1 $(PY) -m pytest -q -rP -n $(WORKERS) -m chaos

check: .venv/.installed
	@echo "ruff format --check"
	@$(PY) -m ruff format --quiet --check $(SOURCES)
	@echo "ruff check"
	@$(PY) -m ruff check --quiet $(SOURCES)
	@echo "mypy -p replaylake"
	@$(PY) -m mypy --no-error-summary -p replaylake
	@echo "lint-imports"
	@.venv/bin/lint-imports --no-logo >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }

# Everything but d3rlpy with the newest Gymnasium, in an environment of its own below .bench/.
check-newer-gymnasium: .venv/.installed
	@.ci/newer-gymnasium

# What records, replays and queries on Python 3.12 and 3.13, without torch, each in an environment below .bench/.
check-pythons:
	@.ci/pythons

# The same on Python 3.11 with the oldest versions that the base's dependencies allow.
check-oldest:
	@.ci/pythons oldest

# The numeric tests once for each set of kernels that numpy, OpenBLAS and torch have for this processor; half an hour.
# `make check-kernels TESTS=tests/offline/losses` runs some of the tests.
check-kernels: .venv/.installed
	@.ci/kernels $(TESTS)

# Wheel and sdist, built twice and compared, into dist/; the wheel alone, used with and without extras, each in an
# environment below .bench/. `make check-package EXTRAS=all` tries every extra: a quarter of an hour, and gigabytes.
check-package:
	@.ci/package $(EXTRAS)

# The steps of examples/deploy/Containerfile in a Debian below .bench/, and a server there with a read-only root; as root.
check-container:
	@.ci/container

# The base beside verl and TRL, each in an environment of over a gigabyte below .bench/.
compat-base:
	@.ci/compat-base

# Agents of libraries that know nothing of the gateway, recorded by it, in an environment below .bench/.
compat-agents: .venv/.installed
	@.ci/compat-agents

# A run logged to a real MLflow server, and aliases in its registry, in an environment of 800 MB below .bench/.
compat-mlflow: .venv/.installed
	@.ci/compat-mlflow

# KServe's own Python client against a real server, each answer compared with that of /act; 450 MB below .bench/.
compat-kserve: .venv/.installed
	@.ci/compat-kserve

# A client generated from /docs.json by openapi-python-client, used against a real server.
compat-openapi: .venv/.installed
	@.ci/compat-openapi

# Random message graphs by verifiers itself: its branches are those of `sequences`. `make compat-verifiers NUM=5000 SEED=7`.
# And a taskset of verifiers, played by `rollout_language`.
compat-verifiers: .venv/.installed
	@.ci/compat-verifiers $(or $(NUM),1000) $(SEED)

# What `export` writes for trainers of language models, opened with their own readers, in an environment of over a gigabyte
# below .bench/. `make compat ONLY=trl,verl` opens some; slime's reader needs its source tree: `SLIME=PATH make compat`.
compat: .venv/.installed
	@.ci/compat $(subst $(comma), ,$(ONLY))

# The hooks for TRL, verl and rLLM inside those frameworks: `make compat-recorders ONLY=trl`.
compat-recorders: .venv/.installed
	@.ci/compat-recorders $(subst $(comma), ,$(ONLY))

# The losses of `train language` beside those of TRL's trainers on the same batch.
compat-losses: .venv/.installed
	@.ci/compat-losses

# Policies of Stable-Baselines3, sb3-contrib and d3rlpy, imported and compared with the libraries' own actions.
compat-policies: .venv/.installed
	@.ci/compat-policies

# Ours beside its peers, each in an environment of its own below .bench/: run it on an idle machine.
# `make bench ONLY=append,load` runs some of the workloads.
bench: .venv/.installed
	@$(PY) -m benchmarks.run $(if $(ONLY),--only $(ONLY))

# How often intervals of `ope` contain the truth, over 1,000 logs a cell: about 40 minutes of one core on a fast disk
# (TMPDIR=/dev/shm). `make ope-coverage CELLS=near,sparse EPISODES=200,400 TRIALS=300 GATE_TRIALS=0` runs less.
ope-coverage: .venv/.installed
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.ope_coverage $(if $(CELLS),--cells $(CELLS)) $(if $(EPISODES),--episodes $(EPISODES)) \
	    $(if $(TRIALS),--trials $(TRIALS)) $(if $(GATE_TRIALS),--gate-trials $(GATE_TRIALS))

clean:
	rm -rf .venv .bench build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
