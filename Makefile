# What to run in a fresh clone; needs python3 (3.11 to 3.13), pip and make, everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-chaos test-k8s lint audit bench bench-peers lock clean

demo: .venv/installed ## train Pendulum on this machine, distributed
	$(BIN)/python examples/pendulum_demo.py

test: .venv/installed-dev ## everything that is quick
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: .venv/installed-dev ## the rest: whole training runs, faults
	$(BIN)/python -m pytest -q -m slow

test-chaos: .venv/installed-dev ## faults in real runs; some 15 minutes. SRL_CHAOS_SEED repeats one
	$(BIN)/python -m pytest -q -s tests/chaos

test-k8s: .venv/installed-dev ## on the cluster that KUBECONFIG names; its namespace srl is deleted. See tests/k8s/with-cluster
	$(BIN)/python -m pytest -q -s tests/k8s

audit: .venv/installed-dev ## known weaknesses of the locked dependencies; asks a database on the network
	$(BIN)/python -m pip install -q --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --require-hashes --disable-pip -r requirements.lock

lint: .venv/installed-dev ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict srl/
	$(BIN)/lint-imports

bench: .venv/installed ## how fast everything is, some minutes
	$(BIN)/python -m benchmarks

bench-peers: .venv/installed .venv-peers/installed ## the same work with other frameworks, some minutes more
	$(BIN)/python -m benchmarks.peers --python .venv-peers/bin/python

lock: .venv/bin/python ## choose new versions of all dependencies
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --upgrade \
		--extra all --extra test --custom-compile-command "make lock" -o requirements.lock pyproject.toml
	echo hatchling | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
		--extra atari --extra embedded --custom-compile-command "make lock" -c requirements.lock \
		-o deploy/requirements.lock pyproject.toml -

clean:
	rm -rf .venv .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v[:2] <= (3, 13) and \
		"SRL needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d; use: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv .venv

.venv/installed: requirements.lock pyproject.toml | .venv/bin/python
	@echo "Installing the locked dependencies into .venv (some minutes the first time)"
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The lock cannot hold rlax (see pyproject.toml): it takes what is newest and fits what is locked.
.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip freeze --exclude-editable > .venv/constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation \
		-c .venv/constraints.txt -e '.[dev]'
	@touch $@

.venv-peers/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/peers/requirements.txt
	@touch $@
