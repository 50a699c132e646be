# Every target sets up what it needs in .venv; nothing has to be installed by hand. `make` shows what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
CLIENTS := .clients-venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps
QUICK ?=
QUICKFLAG := $(if $(QUICK),--quick,)
WORKERS ?= 2
PYTEST := $(PY) -m pytest

.PHONY: help install serve chat test test-slow test-pythons test-crash simulate test-growth test-orphans soak check format \
	bench bench-isolation bench-runtime bench-store bench-stop bench-spawn bench-model bench-serve bench-sse bench-readers bench-start bench-growth bench-embed bench-console screenshots \
	bench-reference requirements clean

help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

# -- setting up ---------------------------------------------------------------------------------------------------------------

NO_PIP := $(VENV) has no pip, and Python cannot put it there. Install the venv module of your Python (Debian, Ubuntu: apt install python3-venv)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(NO_PIP), then run make again" >&2; exit 1; }

# A .venv that somebody else made, or that was interrupted, may have no pip.
$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/bin/python
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "putting pip into $(VENV)"; $(PY) -m ensurepip >/dev/null 2>&1; } \
		|| { echo "$(NO_PIP), remove $(VENV), and run make again" >&2; exit 1; }
	@echo "installing $$(grep -c '^[a-z0-9].*==' requirements.txt) packages from requirements.txt into $(VENV) (once; a minute or so)"
	@$(PIP) -r requirements.txt
	@echo "installing hermes-trio itself"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(PY) -m compileall -q hermes_trio
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@echo "installing the development tools from requirements-dev.txt into $(VENV) (once; a minute or so)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(CLIENTS)/.installed: requirements-clients.txt tests/clients/package.json | $(VENV)/.installed-dev
	@echo "installing the client libraries of test-clients into $(CLIENTS) (once)"
	@$(VENV)/bin/uv venv --quiet --clear --python $(PY) $(CLIENTS)
	@$(VENV)/bin/uv pip install --quiet --python $(CLIENTS)/bin/python --require-hashes --no-deps -r requirements-clients.txt
	@if command -v npm >/dev/null; then npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --silent; \
		else echo "npm is not installed: the clients for Node.js are skipped"; fi
	@touch $@

clients: $(CLIENTS)/.installed ## Install the client libraries of test-clients into .clients-venv and tests/clients/node_modules

install: $(VENV)/.installed ## Install hermes-trio into .venv

requirements: $(VENV)/.installed-dev ## Make the hashed requirement files anew from pyproject.toml
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		pyproject.toml --extra mcp --extra build -o requirements.txt
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		pyproject.toml --all-extras -o requirements-dev.txt
	@$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		tests/clients/requirements.in -o requirements-clients.txt

# -- running ------------------------------------------------------------------------------------------------------------------

serve: $(VENV)/.installed ## Start the server on 127.0.0.1:8642 (SQLite, the built-in demo model, a key of its own)
	@exec $(VENV)/bin/hermes-trio serve $(ARGS)

chat: $(VENV)/.installed ## Chat with the agent in this terminal
	@exec $(VENV)/bin/hermes-trio chat $(ARGS)

# -- checking -----------------------------------------------------------------------------------------------------------------

test: $(VENV)/.installed-dev ## Run the tests
	@$(PYTEST) -q -n $(WORKERS) $(ARGS)

test-slow: $(VENV)/.installed-dev $(CLIENTS)/.installed ## Run the long tests: crash, orphans, growth, fuzz, clients
	@test -n "$$CHROMIUM" || command -v chromium chromium-browser google-chrome >/dev/null || \
		echo "the browser tests are left out: no Chromium on the PATH (apt-get install chromium, or CHROMIUM=path)"
	@$(PYTEST) -q -m slow -n $(WORKERS) $(ARGS)

screens: $(VENV)/.installed-dev ## Play a new user's ten minutes and write the screens in docs/first-ten-minutes.md
	@WRITE_SCREENS=1 $(PYTEST) -q -m slow tests/e2e/test_first_ten_minutes.py

.PHONY: clients clients-table test-clients screens
test-clients: $(CLIENTS)/.installed ## Run ten unmodified client libraries against the server
	@$(PYTEST) -q -rs -m slow tests/clients $(ARGS)

clients-table: $(CLIENTS)/.installed ## The same, and write the table in docs/clients.md
	@$(PY) -m tests.clients.table

test-pythons: $(VENV)/.installed-dev ## Run a part of the tests on each supported Python that is installed, and with the oldest dependencies
	@$(PYTEST) -q -rs -m slow tests/e2e/test_pythons.py $(ARGS)

test-crash: $(VENV)/.installed-dev ## Kill a writer 100 times, and a runtime whose store fails 200 times, at random points
	@$(PYTEST) -q -m slow tests/store/test_crash.py $(ARGS)

.PHONY: test-chaos
test-chaos: $(VENV)/.installed-dev ## Kill, pause and cut off three nodes and their PostgreSQL under load, and judge what they promised
	@$(PYTEST) -q -m chaos tests/chaos $(ARGS)

simulate: $(VENV)/.installed-dev ## Simulate 10,000 gateways with faults (SEEDS=10000), judge them, and write bench/results/simulate.txt and .svg
	@$(VENV)/bin/hermes-trio simulate --seeds $(or $(SEEDS),10000) --workers $(WORKERS) \
		--report bench/results/simulate.txt --picture bench/results/simulate.svg $(ARGS)

test-growth: $(VENV)/.installed-dev ## Create, end and prune 100,000 sessions (SESSIONS=1000000 for more)
	@$(PYTEST) -q -m slow tests/store/test_growth.py $(ARGS)

test-orphans: $(VENV)/.installed-dev ## Fifty rounds of processes that try to survive
	@$(PYTEST) -q -m slow tests/tools/test_warden_orphans.py tests/e2e/test_orphans.py $(ARGS)

soak: $(VENV)/.installed-dev ## Mixed load from 200 clients for two minutes (SECONDS_=120), then prove that nothing is left
	@$(PY) -m bench.soak $(ARGS)

check: $(VENV)/.installed-dev ## Lint, formatting, async rules, strict types, layers
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/flake8 hermes_trio
	@$(VENV)/bin/basedpyright
	@$(VENV)/bin/basedpyright -p bench/pyrightconfig.json
	@$(VENV)/bin/lint-imports --no-cache

format: $(VENV)/.installed-dev ## Format the code and fix what can be fixed
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

# -- measuring ----------------------------------------------------------------------------------------------------------------

bench: $(VENV)/.installed-dev ## Run every benchmark and write bench/results/README.md
	@$(PY) -m bench.all $(QUICKFLAG) $(ARGS)

bench-isolation: $(VENV)/.installed-dev ## 1,000 sessions x 20 turns: does any see another's identity?
	@$(PY) -m bench.isolation $(QUICKFLAG) $(ARGS)

bench-runtime: $(VENV)/.installed-dev ## What a turn and a tree cost, against bare Trio
	@$(PY) -m bench.runtime $(QUICKFLAG) $(ARGS)

bench-store: $(VENV)/.installed-dev ## Durable commits, the cost of a turn's writes, reads under load
	@$(PY) -m bench.store $(QUICKFLAG) $(ARGS)

.PHONY: bench-compare
bench-compare: $(VENV)/.installed-dev ## CPU of a turn and of a request here against another checkout: BEFORE=path, 20 rounds (ROUNDS=…)
	@$(PY) bench/compare.py $(BEFORE)

.PHONY: bench-instructions
bench-instructions: $(VENV)/.installed-dev ## Instructions of a turn and of a request here, and in another checkout: BEFORE=path (needs valgrind)
	@$(PY) -m bench.instructions $(BEFORE)

bench-stop: $(VENV)/.installed-dev ## How long a stop with children and processes takes
	@$(PY) -m bench.stop $(QUICKFLAG) $(ARGS)

bench-spawn: $(VENV)/.installed-dev ## What the confinement of a command costs
	@$(PY) -m bench.spawn $(QUICKFLAG) $(ARGS)

bench-model: $(VENV)/.installed-dev ## The cost of a model call at 32, 256 and 1,000 concurrent calls
	@$(PY) -m bench.model $(QUICKFLAG) $(ARGS)

bench-console: $(VENV)/.installed-dev ## 10,000 nodes, 1,000 changes a second: frames of the page, CPU of the server for one viewer
	@$(PY) -m bench.console $(ARGS)

screenshots: $(VENV)/.installed-dev ## Make the pictures in docs/images from a scripted scene
	@$(PY) -m bench.screenshots $(ARGS)

bench-reference: ## Put the reference into a venv of its own, for bench-serve
	@$(PYTHON) -m venv .bench-venv
	@.bench-venv/bin/python -m pip install --quiet --disable-pip-version-check hermes-agent==0.19.0 aiohttp

bench-serve: $(VENV)/.installed-dev ## The whole server against the reference, uvicorn and stock Quart-Trio
	@$(PY) -m bench.serve $(QUICKFLAG) $(ARGS)

bench-sse: $(VENV)/.installed-dev ## Event streams: first event, events a second, idle streams
	@$(PY) -m bench.sse $(QUICKFLAG) $(ARGS)

bench-readers: $(VENV)/.installed-dev ## 200 readers that stall: memory of the server, and the time of /health beside them
	@$(PY) -m bench.readers $(QUICKFLAG) $(ARGS)

bench-start: $(VENV)/.installed-dev ## Import time, time to the first answer, idle memory
	@$(PY) -m bench.start $(QUICKFLAG) $(ARGS)

.PHONY: bench-tails
bench-tails: $(VENV)/.installed-dev ## 10,000 readers of runs of another node, at 4,000 events a second
	@$(PY) -m bench.tails $(QUICKFLAG) $(ARGS)

.PHONY: bench-disk
bench-disk: $(VENV)/.installed-dev ## What a turn and a run leave on the disk of PostgreSQL, and what a live run weighs
	@$(PY) -m bench.disk $(QUICKFLAG) $(ARGS)

.PHONY: bench-scale
bench-scale: $(VENV)/.installed-dev ## PostgreSQL beside SQLite and the reference: CPU of a turn with 1, 2 and 4 workers, notifications, balance
	@$(PY) -m bench.scale $(QUICKFLAG) $(ARGS)

bench-growth: $(VENV)/.installed-dev ## CPU a turn against stored sessions, history, live jobs and tree nodes
	@$(PY) -m bench.growth $(QUICKFLAG) $(ARGS)

bench-embed: $(VENV)/.installed-dev ## The cost of a turn from asyncio, compared with one from Trio
	@$(PY) -m bench.embed $(QUICKFLAG) $(ARGS)

.PHONY: bench-tracing
bench-tracing: $(VENV)/.installed-dev ## What tracing costs a turn, off and on; BEFORE=path adds a checkout without it
	@$(PY) bench/tracing.py $(BEFORE)

clean: ## Remove everything that was made here
	@rm -rf $(VENV) $(CLIENTS) tests/clients/node_modules .bench-venv .pytest_cache .ruff_cache .hypothesis dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
