#!/usr/bin/env bash
# Runs on the lent machine what prepare.sh has prepared, one step after the other, and says how long each took:
#   benchmarks/lent/session.sh FOLDER OUT STEP...
# STEP: tests (all GPU tests, one rank a GPU), shared4 and shared8 (so many ranks on two GPUs), faults (planted ones),
# record=NAME,NAME (steps of benchmarks/record.sh). TEST_ARGS and PROVIDERS are those of make test-gpu. OUT: a folder for logs.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

folder=${1:?the folder that prepare.sh has made} out=${2:?a folder for logs}
shift 2
mkdir -p "$out"
export PYTHONPATH=$PWD/benchmarks/lent TRITON_CACHE_DIR=/tmp/lent-triton LOGS=$out/ranks PYTHONUNBUFFERED=1
mkdir -p "$TRITON_CACHE_DIR"
tar xJ -C "$TRITON_CACHE_DIR" -f "$folder/kernels.tar.xz"
compiled() { find "$TRITON_CACHE_DIR" -name '*.cubin' | wc -l; }
brought=$(compiled)
launch/bootstrap.sh main
echo "set up after $SECONDS s"

# shellcheck disable=SC2086 # TEST_ARGS is a list
gpu_tests() { CONNECTIONS=${CONNECTIONS:-8} launch/test_gpu.sh .venv/bin/python ${TEST_ARGS-}; }

for step in "$@"; do
  begin=$SECONDS
  case $step in
    tests) gpu_tests ;;
    shared4) RANKS=4 SIZES=4 gpu_tests ;;
    shared8) RANKS=8 SIZES=8 gpu_tests ;;
    faults) .venv/bin/python -m tests.mutations --gpu --jobs 4 ;;
    record=*) names=${step#record=} && STEPS=${names//,/ } benchmarks/record.sh "$out/record" ;;
    *) echo "no such step: $step" && false ;;
  esac >"$out/$step.log" 2>&1
  # Kernels that prepare.sh has compiled are not compiled again: the last number must hardly differ from the first.
  echo "$step: status $? after $((SECONDS - begin)) s; $brought kernels were brought, $(compiled) are there"
done
