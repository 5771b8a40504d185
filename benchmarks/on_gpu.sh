#!/usr/bin/env bash
# The stages of a first half hour on one GPU, each one command.
#
#   benchmarks/on_gpu.sh smoke          5 min: moe-nvlink verify, first tests, and first numbers
#   benchmarks/on_gpu.sh numbers        9 min: constants of the clock, the benchmarks, ncu
#   benchmarks/on_gpu.sh breadth        9 min: all of verify, GPU tests, sanitizers, litmus programs
#   benchmarks/on_gpu.sh vllm           6 min: vLLM's MoE kernel, and its engine, with our exchange
#   benchmarks/on_gpu.sh again NAME...  steps of these by name: what was mended, once more
#   --rehearse  before the stage: the same steps, small, on CPU ranks and the stand-in for the driver
#
# tests/gpu/day/steps.py has the steps and their limits. Leaves three files in $OUT, of which a lent
# machine gives back few: <date>-<h100, say>-<stage>.txt (all that was said), .json (what became of
# each step) and .tar.gz (a result file a benchmark). The archive is written anew after every step.
# Where OUT is not set, all files are in benchmarks/results/, and there is no archive.
# Exit status: 0 all well, 1 a step failed, was cut or found no time, 2 nothing could run.
#
# CARRY is the folder that benchmarks/carry.sh has filled (.carry in the repository), PYTHON the
# interpreter. BENCH_COMMIT names the commit where the checkout came without its history; else the
# file commit of CARRY does.
# Needs no installation: the package is put together in a temporary folder.
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd) || exit 2
if [ $# -eq 0 ]; then
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
  exit 2
fi

PYTHON=${PYTHON:-python3}
if [[ $PYTHON == */* && $PYTHON != /* ]]; then PYTHON=$PWD/$PYTHON; fi
carry=${CARRY:-$repository/.carry}
back=${OUT:-$repository/benchmarks/results}
mkdir -p "$back" && back=$(cd "$back" && pwd) || exit 2
cd "$repository" || exit 2
# A copy that was sent may have an older history than its files: what was carried with them counts.
if [ -z "${BENCH_COMMIT:-}" ] && [ -f "$carry/commit" ]; then BENCH_COMMIT=$(<"$carry/commit"); fi
BENCH_COMMIT=${BENCH_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
# Processes meet over gloo on this machine alone, which may have no other network.
export BENCH_COMMIT PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
export TMPDIR="$scratch"

# The package in the shape that it has once installed: kernels/ and integration/ are folders in it. In
# a checkout they are links, which a copy that was sent to another machine may have lost.
view="$scratch/view"
mkdir "$view" && cp -r moe_nvlink_plugin tests benchmarks pyproject.toml "$view" || exit 2
rm -rf "$view/moe_nvlink_plugin/kernels" "$view/moe_nvlink_plugin/integration" || exit 2
cp -r kernels integration "$view/moe_nvlink_plugin" || exit 2
export PYTHONPATH="$view:$scratch/site"

# What was carried. A cache belongs to its user, and what lacks is added to it.
export MOE_NVLINK_CACHE_DIR="${MOE_NVLINK_CACHE_DIR:-$scratch/cache}"
export MOE_NVLINK_TESTS_CACHE_DIR="$MOE_NVLINK_CACHE_DIR"
mkdir -p -m 700 "$MOE_NVLINK_CACHE_DIR" || exit 2
GPU_STAGES_CARRIED="nothing; benchmarks/carry.sh, elsewhere, makes .carry: kernels and FlashInfer"
if [ -d "$carry" ]; then
  if [ -f "$carry/kernels.tar.gz" ]; then
    tar -xzf "$carry/kernels.tar.gz" --no-same-owner -C "$MOE_NVLINK_CACHE_DIR"
  fi
  GPU_STAGES_CARRIED="$(find "$MOE_NVLINK_CACHE_DIR" -name '*.cubin' | wc -l) kernels"
  if [ -f "$carry/flashinfer.tar.gz" ] && mkdir "$scratch/site" &&
    tar -xzf "$carry/flashinfer.tar.gz" -C "$scratch/site"; then
    GPU_STAGES_CARRIED="$GPU_STAGES_CARRIED, FlashInfer"
    # Its kernels came compiled, and nothing else of it is to be compiled or fetched.
    export FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE="$scratch"
    export FLASHINFER_CUDA_ARCH_LIST="${FLASHINFER_CUDA_ARCH_LIST:-9.0a}"
  else
    GPU_STAGES_CARRIED="$GPU_STAGES_CARRIED, no FlashInfer (benchmarks/carry.sh packs it)"
  fi
fi
if [ -f "$carry/vllm.tar.gz" ] && mkdir "$scratch/vllm" &&
  tar -xzf "$carry/vllm.tar.gz" -C "$scratch/vllm"; then
  GPU_STAGES_CARRIED="$GPU_STAGES_CARRIED, vLLM's Python files"
fi
# Of the step that needs vLLM alone: other tests ask whether vLLM is installed. And vLLM would import
# FlashInfer, of which only the exchange is here.
if [ -d "$scratch/vllm" ]; then export GPU_STAGES_VLLM="$view:$scratch/vllm"; fi
export GPU_STAGES_CARRIED

places=(--results "$back")
if [ -n "${OUT:-}" ]; then places=(--results "$scratch/results" --back "$back"); fi
cd "$view" || exit 2
"$PYTHON" -m tests.gpu.day.stages "${places[@]}" "$@"
