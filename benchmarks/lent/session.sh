#!/usr/bin/env bash
# Runs on the lent machine what prepare.sh has prepared, and says how long each step took:
#   benchmarks/lent/session.sh FOLDER OUT STEP...
# Steps run one after the other; those joined by + run at once (tests=torch+tests=nvshmem), which is right but not for times. Run
# shared4 and shared8 alone: beside others, and shared8 on GPUs of 80 GB, memory runs out (13 GiB a rank).
# OUT/compiled-STEP: the kernels that a step has compiled, by name.
# STEP: tests (all GPU tests, one rank a GPU; two on one GPU), tests=PROVIDER, shared4 and shared8 (so many ranks on the GPUs), te
# (TransformerEngine's tests, where TE_ENV, default /tmp/te_site/env.sh, makes it importable), record=NAME,NAME
# (steps of benchmarks/record.sh). TEST_ARGS is that of make test-gpu. LIMIT: seconds of a step (default 3600). OUT: for logs.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

folder=${1:?the folder that prepare.sh has made} out=${2:?a folder for logs}
shift 2
mkdir -p "$out"
export PYTHONPATH=$PWD/benchmarks/lent TRITON_CACHE_DIR=/tmp/lent-triton PYTHONUNBUFFERED=1
mkdir -p "$TRITON_CACHE_DIR"
tar xJ -C "$TRITON_CACHE_DIR" -f "$folder/kernels.tar.xz"
# Triton notes where a kernel's files lie, on the machine that compiled it. Where they are not found, it compiles the kernel again.
sed -i -E "s#\"[^\"]*/([A-Z0-9]{52}/[^\"/]+)\"#\"$TRITON_CACHE_DIR/\1\"#g" "$TRITON_CACHE_DIR"/*/__grp__*
compiled() { find "$TRITON_CACHE_DIR" -name '*.cubin' | wc -l; }
brought=$(compiled)
launch/bootstrap.sh main
echo "set up after $SECONDS s"
[ "$(nvidia-smi -L | wc -l)" -gt 1 ] || export RANKS=${RANKS:-2}

# gpu_tests [VARIABLE=VALUE...]
gpu_tests() {
  # shellcheck disable=SC2086 # TEST_ARGS is a list
  env CONNECTIONS="${CONNECTIONS:-8}" LOGS="$out/ranks-$step" "$@" timeout "${LIMIT:-3600}" launch/test_gpu.sh .venv/bin/python ${TEST_ARGS-}
}

transformer_engine() {
  # shellcheck disable=SC1090
  . "${TE_ENV:-/tmp/te_site/env.sh}" || return
  TEST_ARGS=tests/gpu/test_transformer_engine.py gpu_tests PROVIDERS=torch CONNECTIONS=1
}

run_step() {
  local step=$1 begin=$SECONDS status
  touch "$out/begin-$step"
  case $step in
    tests) gpu_tests ;;
    tests=*) gpu_tests PROVIDERS="${step#tests=}" ;;
    shared4) gpu_tests RANKS=4 SIZES=4 PROVIDERS=torch ;;
    shared8) gpu_tests RANKS=8 SIZES=8 PROVIDERS=torch ;;
    te) transformer_engine ;;
    record=*) names=${step#record=} && STEPS=${names//,/ } benchmarks/record.sh "$out/record" ;;
    *) echo "no such step: $step" && false ;;
  esac >"$out/$step.log" 2>&1
  status=$?
  find "$TRITON_CACHE_DIR" -name '*.cubin' -newer "$out/begin-$step" -printf '%f\n' | sort | uniq -c >"$out/compiled-$step"
  # Of a record: kernels that prepare.sh has compiled are not compiled again, so the last number must hardly differ from the first.
  echo "$step: status $status after $((SECONDS - begin)) s; $brought kernels were brought, $(compiled) are there"
}

for steps in "$@"; do
  for step in ${steps//+/ }; do run_step "$step" & done
  wait
done
