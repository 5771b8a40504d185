#!/usr/bin/env bash
# One command for a machine with a GPU: doctor, the GPU tests, the benchmarks, within 8 minutes.
#
#   benchmarks/on_gpu.sh [--wheels DIR] [--no-tests] [--rehearse]
#
# Leaves <date>-gpu.txt (everything, for people) and one JSON file a benchmark in $OUT, or in
# benchmarks/results/ where OUT is not set. Benchmarks run also when tests fail; the file says so.
#   --wheels DIR   wheels that this machine lacks (benchmarks/carry_wheels.sh)
#   --no-tests     the benchmarks alone
#   --rehearse     the same steps on CPU ranks, small: for a machine without a GPU
# FlashInfer is measured beside ours where it is installed or among the wheels, and nvcc is there to
# compile its kernels; the tests' minutes are fewer then.
# BENCH_COMMIT names the commit where the checkout came without its history; PYTHON the interpreter.
# Needs no installation: the package is put together in a temporary folder. Exit status: 0 all well,
# 1 a test or a benchmark failed, 2 nothing could be run.
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd) || exit 2
command_line="benchmarks/on_gpu.sh $*"

wheels="" rehearse=0 tests=1
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels)
      wheels=$(cd "${2:?a folder}" && pwd) || exit 2
      shift
      ;;
    --no-tests) tests=0 ;;
    --rehearse) rehearse=1 ;;
    *)
      awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$repository/benchmarks/on_gpu.sh"
      exit 2
      ;;
  esac
  shift
done

PYTHON=${PYTHON:-python3}
results=${OUT:-$repository/benchmarks/results}
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit 2
cd "$repository" || exit 2
BENCH_COMMIT=${BENCH_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
# Processes meet over gloo on this machine alone, which may have no other network.
export BENCH_COMMIT PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
export MOE_NVLINK_CACHE_DIR="${MOE_NVLINK_CACHE_DIR:-$scratch/cache}"
if [ -n "$wheels" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$scratch/site" "$wheels"/*.whl || exit 2
fi

# The package in the shape it has once installed: kernels/ and integration/ inside it.
view="$scratch/view"
mkdir "$view" && cp -r moe_nvlink_plugin tests benchmarks pyproject.toml "$view" || exit 2
cp -r kernels integration "$view/moe_nvlink_plugin" || exit 2
cd "$view" || exit 2
export PYTHONPATH="$view:$scratch/site"
# What FlashInfer compiles, and the ninja that it compiles with.
export FLASHINFER_WORKSPACE_BASE="$scratch" PATH="$PATH:$scratch/site/bin:/usr/local/cuda/bin"

date=$(date -u +%Y-%m-%d)
kind=gpu
if [ "$rehearse" = 1 ]; then kind=rehearsal; fi
report="$results/$date-$kind.txt"
started=$SECONDS
failures="$scratch/failures" # a file: what runs in a pipe has no other way to tell
: >"$failures"

# step NAME SECONDS COMMAND...: runs, records, goes on. The limit also bounds what is left of all.
step() {
  local name=$1 limit=$2 before=$SECONDS status
  shift 2
  local left=$((470 - (SECONDS - started)))
  if [ "$left" -lt 10 ]; then
    printf '\n== %s: not run, the 8 minutes are over\n' "$name"
    echo "$name (not run)" >>"$failures"
    return
  fi
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  printf '\n== %s\n%s\n' "$name" "$*"
  timeout --signal=INT --kill-after=15 "$limit" "$@"
  status=$?
  printf '== %s: exit status %d after %d s\n' "$name" "$status" "$((SECONDS - before))"
  if [ "$status" -ne 0 ]; then echo "$name (exit status $status)" >>"$failures"; fi
}

heading() {
  echo "date     $date"
  echo "commit   $BENCH_COMMIT"
  echo "command  $command_line"
  if [ "$rehearse" = 1 ]; then
    echo "gpu      none: a rehearsal on CPU ranks; none of its times means anything"
  else
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader 2>&1 |
      sed 's/^/gpu      /'
  fi
  "$PYTHON" -c "import torch; print('torch   ', torch.__version__)"
  uname -sr | sed 's/^/kernel   /'
  echo "One GPU: nothing here shows NVLink's latency, bandwidth or ordering."
}

run_all() {
  heading
  local lacking
  if ! lacking=$(PYTHON=$PYTHON bash benchmarks/carry_wheels.sh --missing); then
    echo "missing packages: $(echo "$lacking" | tr '\n' ' ')"
    echo "get them with benchmarks/carry_wheels.sh --download DIR NAME..., then pass --wheels DIR"
    echo "missing packages" >>"$failures"
    return
  fi
  # A rehearsal shares its machine with other tests.
  step "doctor" $((30 + 90 * rehearse)) "$PYTHON" -m moe_nvlink_plugin doctor
  if [ "$rehearse" = 1 ]; then
    rehearse_all
  elif ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "no CUDA device: nothing was run"
    echo "no CUDA device" >>"$failures"
  else
    measure_all
  fi
}

emulated=(benchmarks/bench_moe_comm.py --perfect_router)

rehearse_all() {
  if [ "$tests" = 1 ]; then
    step "tests" 200 "$PYTHON" -m pytest -q -p no:cacheprovider \
      tests/kernels/test_real_path.py tests/gpu -k "one_rank or gpu"
  fi
  step "benchmark: emulated ranks" 140 "$PYTHON" "${emulated[@]}" --device rehearsal \
    --emulate_ranks 2 --profile custom --hidden_size 64 --top_k 8 --num_experts 256 \
    --batches 1 4 --iters 10 --cuda_graph --kernel_breakdown \
    --output_file "$results/$date-$kind-moe-comm.json"
  step "benchmark: recipes" 140 "$PYTHON" benchmarks/bench_recipes.py --device rehearsal \
    --ep-size 2 --tokens 4 --hidden-size 256 --num-experts 8 --iterations 5 \
    --output "$results/$date-$kind-recipes.json"
  step "benchmark: LM head" 140 "$PYTHON" benchmarks/bench_lm_head.py --device rehearsal \
    --groups 2 --vocab 1000 --hidden 64 --rows 1 4 --iterations 5 \
    --output "$results/$date-$kind-lm-head.json"
  step "benchmark: launch" 140 "$PYTHON" benchmarks/bench_launch.py --batches 5 \
    --output "$results/$date-$kind-launch.json"
}

measure_all() {
  emulated+=(--device cuda --emulate_ranks 8)
  local flashinfer=0 tests_limit=230
  if has_flashinfer; then
    flashinfer=1 tests_limit=100
  else
    printf '\nFlashInfer is not measured: it is not installed, or nvcc is not there\n'
  fi
  # The benchmarks' minutes are kept back.
  if [ "$tests" = 1 ]; then
    step "tests" "$tests_limit" "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/gpu \
      --maxfail=30 --durations=10
  fi
  # The goals are at most 64 and at 2048.
  local batches=(--batches 1 4 16 64 128 256 512 1024 2048)
  step "benchmark: emulated ranks" 60 "$PYTHON" "${emulated[@]}" --backend moe_nvlink \
    "${batches[@]}" --output_file "$results/$date-$kind-moe-comm.json"
  if [ "$flashinfer" = 1 ]; then # compiles for a minute or two; then its file is the better one
    step "benchmark: FlashInfer" 130 "$PYTHON" "${emulated[@]}" --backend moe_nvlink flashinfer \
      "${batches[@]}" --output_file "$results/$date-$kind-moe-comm.json"
  fi
  step "benchmark: kernels, PDL" 30 "$PYTHON" "${emulated[@]}" --backend moe_nvlink --pdl \
    --kernel_breakdown --batches 16 2048 --output_file "$results/$date-$kind-pdl.json"
  step "benchmark: recipes" 60 "$PYTHON" benchmarks/bench_recipes.py --device cuda --ep-size 8 \
    --tokens 16 128 2048 --iterations 100 --output "$results/$date-$kind-recipes.json"
  step "benchmark: LM head" 35 "$PYTHON" benchmarks/bench_lm_head.py --device cuda \
    --iterations 50 --output "$results/$date-$kind-lm-head.json"
  step "benchmark: launch" 25 "$PYTHON" benchmarks/bench_launch.py --driver real \
    --output "$results/$date-$kind-launch.json"
}

has_flashinfer() {
  command -v nvcc >/dev/null && "$PYTHON" -c "import importlib.util, sys
sys.exit(importlib.util.find_spec('flashinfer') is None)"
}

verdict() {
  local seconds=$((SECONDS - started))
  printf '\n'
  if [ -s "$failures" ]; then
    echo "FAILED after $seconds s: $(paste -sd ',' "$failures" | sed 's/,/, /g')"
  else
    echo "all steps passed in $seconds s"
  fi
}

{
  run_all
  verdict
} 2>&1 | tee "$report"
[ ! -s "$failures" ]
