#!/usr/bin/env bash
# Wheels that a machine without a package registry needs for benchmarks/on_gpu.sh.
#
#   benchmarks/carry_wheels.sh                 # the pip command for the packages below
#   benchmarks/carry_wheels.sh --download DIR [NAME...]   # runs it, for these or all of them; then:
#                                              # on_gpu.sh --wheels DIR
#   benchmarks/carry_wheels.sh --missing       # run THERE: which of the needed packages it lacks
#   benchmarks/carry_wheels.sh --list flashinfer   # the peer's; names for --download, 63 MiB
#
# Name what is missing where that is known: a second pytest beside that machine's plugins may not
# suit them.
#
# Needed: torch, numpy, cuda-bindings and nvidia-cuda-nvrtc, which an image for CUDA work has, and
# the pure Python packages listed here. PYTHON_VERSION (3.12) is the other machine's.
set -euo pipefail

# "distribution:module". What an image lacks most often stands first.
PURE=(platformdirs:platformdirs filelock:filelock pluggy:pluggy pytest:pytest iniconfig:iniconfig
  pytest-timeout:pytest_timeout packaging:packaging pygments:pygments)
# The release whose interface benchmarks/moe_comm/flashinfer_api.py was read from, and what
# `import flashinfer.comm` and its compilation need; nvcc comes with the machine.
FLASHINFER=(flashinfer-python==0.7.2.post1 apache-tvm-ffi nvidia-ml-py ninja requests urllib3 idna
  certifi tqdm)
HEAVY=(torch:torch numpy:numpy cuda-bindings:cuda.bindings nvidia-cuda-nvrtc:nvidia)
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
PYTHON=${PYTHON:-python3}

command=("$PYTHON" -m pip download --no-deps --only-binary=:all:
  --python-version "$PYTHON_VERSION" --implementation cp --platform manylinux2014_x86_64
  --platform manylinux_2_28_x86_64)

missing() {
  local found=0 package
  for package in "${PURE[@]}" "${HEAVY[@]}"; do
    if ! "$PYTHON" -c "import importlib.util, sys
sys.exit(importlib.util.find_spec('${package#*:}') is None)" 2>/dev/null; then
      echo "${package%%:*}"
      found=1
    fi
  done
  return "$found"
}

case "${1:-}" in
  "") echo "${command[@]}" -d .whl "${PURE[@]%%:*}" ;;
  --download)
    folder=${2:?a folder}
    shift 2
    if [ $# -eq 0 ]; then set -- "${PURE[@]%%:*}"; fi
    "${command[@]}" -q -d "$folder" "$@"
    ;;
  --missing) missing ;;
  --list)
    if [ "${2:-}" != flashinfer ]; then
      echo "--list takes flashinfer, not '${2:-}'" >&2
      exit 2
    fi
    echo "${FLASHINFER[@]}"
    ;;
  *)
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 2
    ;;
esac
