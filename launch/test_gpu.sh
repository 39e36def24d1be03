#!/usr/bin/env bash
# Runs tests/gpu once for every provider, domain size and CUDA_DEVICE_MAX_CONNECTIONS; then the tests of two nodes for every provider,
# unless pytest arguments, SIZES or CONNECTIONS ask for less. Prints the output of rank 0, and after a failure that of the other ranks.
#   launch/test_gpu.sh PYTHON [pytest arguments; with a path among them only what is there]
# Variables: LOGS, folder for each rank's output (default runs/test-gpu); PROVIDERS (default "nvshmem torch"); SIZES of the overlap
# domain (default: all ranks, and of four or eight also half); CONNECTIONS (default "1 8"); RANKS (default: one a GPU, on 2, 4 or 8).
# More RANKS than GPUs share the GPUs, with torch's provider unless PROVIDERS says otherwise; NCCL goes over sockets between them.
# Where CUDA's Multi-Process Service (MPS) is installed, each rank has a part of its GPU's SMs, and all run at once.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=launch/mps.sh
. launch/mps.sh

python=$1
shift
logs=${LOGS:-runs/test-gpu}
gpus=$("$python" -c 'import torch; count = torch.cuda.device_count(); print(next((n for n in (8, 4, 2) if n <= count), count))')
if [ "$gpus" -lt 1 ] || [ "${RANKS:-$gpus}" -lt 2 ]; then
  echo "make test-gpu: needs 2 GPUs, or one and RANKS=2; found $gpus" >&2
  exit 1
fi
ranks=${RANKS:-$gpus}
sizes=$ranks
[ $((ranks % 4)) -eq 0 ] && sizes="$ranks $((ranks / 2))"
sizes=${SIZES:-$sizes}
providers=${PROVIDERS:-nvshmem torch}
if [ "$ranks" -gt "$gpus" ]; then
  providers=${PROVIDERS:-torch}
  export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
fi

tests=(tests/gpu)
for argument in "$@"; do
  case $argument in tests/*) tests=() ;; esac
done

failed=0 sessions=0

# session NAME CONNECTIONS PYTEST_ARGUMENTS...
session() {
  local name=$1 connections=$2
  shift 2
  echo "== $ranks ranks on $gpus GPUs: $name"
  sessions=$((sessions + 1))
  mkdir -p "$logs/$name"
  [ "$ranks" -le "$gpus" ] || start_mps $((100 * gpus / ranks))
  # CUBLAS_WORKSPACE_CONFIG: the bitwise training test needs a deterministic cuBLAS. faulthandler_timeout: a test, or what follows
  # the last one, that takes so many seconds shows in the log of each rank where it is.
  if ! CUDA_DEVICE_MAX_CONNECTIONS=$connections CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$ranks" --log-dir "$logs/$name" --redirects 3 --tee 0:1 --local-ranks-filter 0 \
    -m pytest -q -o faulthandler_timeout=300 "$@" 2>"$logs/$name/torchrun.log"; then
    failed=$((failed + 1))
    find "$logs/$name" -name stdout.log -not -path '*/0/*' -exec sh -c 'echo "-- $1"; tail -n 40 "$1"' _ {} \;
  fi
  stop_mps
}

for size in $sizes; do
  for provider in $providers; do
    for connections in ${CONNECTIONS:-1 8}; do
      session "$provider-domain$size-connections$connections" "$connections" "${tests[@]}" --provider "$provider" --domain-size "$size" "$@"
    done
  done
done
# Two nodes: in a session of its own, because NCCL finds its hosts once in a process.
if [ $# -eq 0 ] && [ -z "${SIZES-}${CONNECTIONS-}" ] && [ $((ranks % 2)) -eq 0 ]; then
  for provider in $providers; do
    session "$provider-two-nodes" 1 tests/gpu/test_nodes.py --provider "$provider"
  done
fi
if [ "$failed" -eq 0 ]; then
  echo "make test-gpu: all $sessions sessions passed"
else
  echo "make test-gpu: $failed of $sessions sessions failed; each rank's output is under $logs" >&2
fi
exit "$failed"
