#!/usr/bin/env bash
# Runs on the lent machine what prepare.sh has prepared, and says how long each step took:
#   benchmarks/lent/session.sh OUT STEP...
# Steps run one after the other; those joined by + run at once (tests=torch+tests=nvshmem), which is right but not for times. Run
# shared4 and shared8 alone: beside others, and shared8 on GPUs of 80 GB, memory runs out (13 GiB a rank).
# STEP: tests (all GPU tests, one rank a GPU; two on one GPU), tests=PROVIDER, shared4 and shared8 (so many ranks on the GPUs), te
# (TransformerEngine's tests, where TE_ENV, default /tmp/te_site/env.sh, makes it importable), record=NAME,NAME
# (steps of benchmarks/record.sh). TEST_ARGS is that of make test-gpu. LIMIT: seconds of a step (default 3600). OUT: for logs.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

out=${1:?a folder for logs}
shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1
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
  echo "$step: status $status after $((SECONDS - begin)) s"
}

for steps in "$@"; do
  for step in ${steps//+/ }; do run_step "$step" & done
  wait
done
