#!/usr/bin/env bash
# Fills .carry with what a machine with a GPU, without a network and lent for minutes should not have
# to make itself. Beside it .carry/commit says which commit this is: a copy that was sent may lack its
# history.
#
#   benchmarks/carry.sh                # a quarter of an hour the first time: --kernels --flashinfer
#   benchmarks/carry.sh --kernels      # for sm_90a: all that verify and the stages ask for
#   benchmarks/carry.sh --flashinfer   # with its one library compiled
#   benchmarks/carry.sh --vllm         # the Python files of vLLM, for one stage
#   benchmarks/carry.sh --commit       # only which commit this is, if nothing else has changed
#
# Fails if the folder has more than 52 MiB, of the 64 that travel with the working tree. PYTHON is an
# interpreter that has this package and the tests' packages (.venv/bin/python); PYTHON_VERSION (3.12)
# is the other machine's. FlashInfer is compiled by the nvcc of CUDA_HOME, or on the PATH, which must
# be of CUDA 13; build/flashinfer keeps what was compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
PYTHON=${PYTHON:-.venv/bin/python}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
CARRY=${CARRY:-$repository/.carry}
MOST_KIB=$((52 * 1024))
# The release whose interface benchmarks/moe_comm/flashinfer_api.py was read from; what importing its
# flashinfer.comm needs and that machine lacks; and headers that compiling it needs.
FLASHINFER=(flashinfer-python==0.7.2.post1 "apache-tvm-ffi>=0.1.11,<0.2" nvidia-ml-py
  requests certifi charset-normalizer idna urllib3 tqdm)
HEADERS="nvidia-cublas>=13.0,<13.2"
# What importing vLLM's MoE kernels needs and that machine lacks. Names without meaning stand for the
# other packages that they import (tests/support/vllm_files.py).
BESIDE_VLLM=(pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection msgspec
  cachetools)
# Built for the other machine.
THERE=(--python-version "$PYTHON_VERSION" --implementation cp
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64)
module=mnnvl_moe_alltoall
packed=$(mktemp -d)
trap 'rm -rf "$packed"' EXIT

kernels() {
  local cache=$repository/build/carried
  mkdir -p "$cache" && chmod 700 "$cache"
  MOE_NVLINK_CACHE_DIR=$cache MOE_NVLINK_TESTS_CACHE_DIR=$cache \
    "$PYTHON" -m tests.gpu.day.carried
  find "$cache" -type f ! -name '*.cubin' -delete # locks, and what runs on this CPU alone
  tar -C "$cache" -czf "$CARRY/kernels.tar.gz" .
}

packages() { # TARGET PIP-OPTION...
  local target=$1
  shift
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --no-compile \
    --only-binary=:all: --target "$target" "$@"
}

# Compiled by the Python that is here; the library does not depend on it.
library() {
  local work=$repository/build/flashinfer cuda
  if [ -f "$work/$module.so" ]; then return; fi
  cuda=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
  # Where a script stands in the place of nvcc, the toolkit is often beside it.
  if [ ! -f "$cuda/include/cuda_runtime.h" ] && [ -d "$cuda/cuda" ]; then cuda=$cuda/cuda; fi
  mkdir -p "$work/stub"
  if [ ! -d "$work/site" ]; then packages "$work/site" "${FLASHINFER[@]}"; fi
  if [ ! -d "$work/headers" ]; then packages "$work/headers" "$HEADERS"; fi
  # Linked against a driver without symbols; the real one has them.
  gcc -shared -Wl,-soname,libcuda.so.1 -x c /dev/null -o "$work/stub/libcuda.so"
  echo "compiling FlashInfer's $module: some five minutes of processor time"
  CUDA_HOME=$cuda FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=$work \
    FLASHINFER_EXTRA_LDFLAGS="-L$work/stub" PYTHONPATH="$work/site" \
    CPATH="$work/headers/nvidia/cu13/include:$cuda/include/cccl" \
    PATH="$(cd "$(dirname "$PYTHON")" && pwd):$PATH" "$PYTHON" - "$work/$module.so" <<'END'
import shutil, sys
from flashinfer.jit.comm import gen_moe_alltoall_module
spec = gen_moe_alltoall_module()
spec.build()
shutil.copy(spec.jit_library_path, sys.argv[1])
END
}

flashinfer() {
  local site=$packed/flashinfer
  library
  packages "$site" "${THERE[@]}" "${FLASHINFER[@]}"
  # Sources that only compiling needs, 360 MB, stay here.
  rm -rf "$site"/flashinfer/data
  mkdir -p "$site/flashinfer/data/aot/$module"
  cp "build/flashinfer/$module.so" "$site/flashinfer/data/aot/$module"
  find "$site" -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' \) -delete
  tar -C "$site" -czf "$CARRY/flashinfer.tar.gz" .
}

# The release of `make vllm33-env`. Its libraries, half a GB, and models stay here.
vllm() {
  local release site=$packed/vllm
  release=$(sed -n 's/^vllm==//p' integration/demo/vllm33_env/requirements.txt)
  "$PYTHON" - "$release" "$site" <<'END'
import shutil, sys
from tests.support import vllm_files
shutil.copytree(vllm_files.wheel(sys.argv[1]), sys.argv[2], dirs_exist_ok=True)
END
  packages "$site" "${THERE[@]}" "${BESIDE_VLLM[@]}"
  tar -C "$site" -cf - . | gzip -9 >"$CARRY/vllm.tar.gz"
}

mkdir -p "$CARRY"
git describe --always --dirty --exclude '*' >"$CARRY/commit"
if [ $# -eq 0 ]; then set -- --kernels --flashinfer; fi
for part in "$@"; do
  case $part in
    --kernels | --flashinfer | --vllm) "${part#--}" ;;
    --commit) ;; # it is there
    *)
      awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' benchmarks/carry.sh
      exit 2
      ;;
  esac
done
du -ak "$CARRY"
if [ "$(du -sk "$CARRY" | cut -f1)" -gt "$MOST_KIB" ]; then
  echo "more than the $((MOST_KIB / 1024)) MiB that may travel; leave something out" >&2
  exit 1
fi
