#!/usr/bin/env bash
# The stages of a first half hour on one GPU, each one command.
#
#   benchmarks/on_gpu.sh smoke          5 min: moe-nvlink verify, first tests, and first numbers
#   benchmarks/on_gpu.sh numbers        9 min: constants of the clock, the benchmarks, ncu
#   benchmarks/on_gpu.sh breadth        9 min: all of verify, GPU tests, sanitizers
#   benchmarks/on_gpu.sh vllm           6 min: vLLM's MoE kernel, and its engine, with our exchange
#   benchmarks/on_gpu.sh again NAME...  steps of these by name: what was mended, once more
#   --rehearse  before the stage: the same steps, small, on CPU ranks and the stand-in for the driver
#
# tests/gpu/day/steps.py has the steps and their limits. Leaves three files in $OUT (else in
# benchmarks/results): <date>-<h100, say>-<stage>.txt (all that was said), .json (what became of each
# step) and .tar.gz (the result files). All are complete after every step, also if this is ended.
# Exit status: 0 all well, 1 a step failed, was cut or found no time, 2 nothing could run.
#
# CARRY is the folder that benchmarks/carry.sh has filled (.carry in the repository), PYTHON the
# interpreter. BENCH_COMMIT names the commit where the checkout came without its history; else the
# file commit of CARRY does.
# Needs no installation: the package is put together in a temporary folder.
set -uo pipefail
if [ $# -eq 0 ]; then
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
  exit 2
fi
out=${OUT:-$(dirname "$0")/results}
mkdir -p "$out" && out=$(realpath "$out") || exit 2
python=$(command -v "${PYTHON:-python3}") || exit 2
python=$(realpath --no-symlinks "$python") # a virtual environment's is a link that must stay one
cd "$(dirname "$0")/.." || exit 2
carry=$(realpath -m "${CARRY:-.carry}")

# A copy that was sent may have an older history than its files: what was carried with them counts.
BENCH_COMMIT=${BENCH_COMMIT:-$(cat "$carry/commit" 2>/dev/null ||
  git describe --always --dirty 2>/dev/null || echo unknown)}
# Processes meet over gloo on this machine alone, which may have no other network.
export BENCH_COMMIT PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
TMPDIR=$(mktemp -d) || exit 2
trap 'rm -rf "$TMPDIR"' EXIT

# The package in the shape that it has once installed: kernels/ and integration/ are folders in it. In
# a checkout they are links, which a copy that was sent to another machine may have lost.
view=$TMPDIR/view
mkdir "$view" && cp -r moe_nvlink_plugin tests benchmarks pyproject.toml "$view" || exit 2
rm -rf "$view/moe_nvlink_plugin/kernels" "$view/moe_nvlink_plugin/integration" || exit 2
cp -r kernels integration "$view/moe_nvlink_plugin" || exit 2

# What was carried. A cache belongs to its user, and what lacks is added to it.
MOE_NVLINK_CACHE_DIR=${MOE_NVLINK_CACHE_DIR:-$TMPDIR/kernels}
mkdir -p -m 700 "$MOE_NVLINK_CACHE_DIR" "$TMPDIR/flashinfer" "$TMPDIR/vllm" || exit 2
GPU_STAGES_CARRIED=
unpack() { # NAME FOLDER
  [ -f "$carry/$1.tar.gz" ] && tar -xzf "$carry/$1.tar.gz" --no-same-owner -C "$2" &&
    GPU_STAGES_CARRIED="$GPU_STAGES_CARRIED$1 "
}
unpack kernels "$MOE_NVLINK_CACHE_DIR"
if unpack flashinfer "$TMPDIR/flashinfer"; then
  # Its kernels came compiled, and nothing else of it is to be compiled or fetched.
  export FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE="$TMPDIR"
  export FLASHINFER_CUDA_ARCH_LIST="${FLASHINFER_CUDA_ARCH_LIST:-9.0a}"
fi
unpack vllm "$TMPDIR/vllm"
export TMPDIR MOE_NVLINK_CACHE_DIR MOE_NVLINK_TESTS_CACHE_DIR="$MOE_NVLINK_CACHE_DIR"
export GPU_STAGES_CARRIED="${GPU_STAGES_CARRIED:-nothing; benchmarks/carry.sh packs it, elsewhere}"
# vLLM has a path of its own: other tests ask whether vLLM is installed. And vLLM would import
# FlashInfer, of which only the exchange is here.
export PYTHONPATH="$view:$TMPDIR/flashinfer" GPU_STAGES_VLLM="$view:$TMPDIR/vllm"

cd "$view" || exit 2
"$python" -m tests.gpu.day.stages --out "$out" "$@" &
stage=$!
# Whoever ends this script ends the stage, which ends its steps. Each signal ends a `wait` only.
trap 'kill "$stage"' TERM INT
while true; do
  wait "$stage"
  status=$?
  kill -0 "$stage" 2>/dev/null || exit "$status"
done
