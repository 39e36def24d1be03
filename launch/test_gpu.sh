#!/usr/bin/env bash
# Runs tests/gpu once for every provider, domain size and CUDA_DEVICE_MAX_CONNECTIONS. Prints rank 0, and the others if it fails.
#   launch/test_gpu.sh PYTHON [pytest arguments]
# LOGS: folder for each rank's output (default runs/test-gpu). What to run: PROVIDERS (default "nvshmem torch"),
# SIZES of the overlap domain (default all GPUs and, on four, also 2), CONNECTIONS (default "1 8").
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=$1
shift
logs=${LOGS:-runs/test-gpu}
gpus=$("$python" -c 'import torch; print(min(torch.cuda.device_count(), 4))')
if [ "$gpus" -lt 2 ]; then
  echo "make test-gpu: needs 2 GPUs, found $gpus" >&2
  exit 1
fi
sizes=$gpus
[ "$gpus" -eq 4 ] && sizes="4 2"
sizes=${SIZES:-$sizes}

failed=0 sessions=0
for size in $sizes; do
  for provider in ${PROVIDERS:-nvshmem torch}; do
    for connections in ${CONNECTIONS:-1 8}; do
      name="$provider-domain$size-connections$connections"
      echo "== $gpus GPUs: $name"
      sessions=$((sessions + 1))
      mkdir -p "$logs/$name"
      # CUBLAS_WORKSPACE_CONFIG: what cuBLAS needs to be deterministic, which the bitwise training test asks for.
      if ! CUDA_DEVICE_MAX_CONNECTIONS=$connections CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone \
        --nproc-per-node "$gpus" --log-dir "$logs/$name" --redirects 3 --tee 0:1 --local-ranks-filter 0 \
        -m pytest tests/gpu -q --provider "$provider" --domain-size "$size" "$@" \
        2>"$logs/$name/torchrun.log"; then
        failed=$((failed + 1))
        find "$logs/$name" -name stdout.log -not -path '*/0/*' -exec sh -c 'echo "-- $1"; tail -n 40 "$1"' _ {} \;
      fi
    done
  done
done
if [ "$failed" -eq 0 ]; then
  echo "make test-gpu: all $sessions sessions passed"
else
  echo "make test-gpu: $failed of $sessions sessions failed; each rank's output is under $logs" >&2
fi
exit "$failed"
