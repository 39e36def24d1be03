#!/usr/bin/env bash
# launch/torchrun.sh ARGS...: torchrun on this machine: 4 processes on 4 or more GPUs, else 2 processes, on the CPU if there are
# fewer than two GPUs. NPROC=8 sets another number.
set -euo pipefail
cd "$(dirname "$0")/.."

gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if ((gpus >= 4)); then
    processes=4
else
    processes=2
fi
if ((gpus < 2)); then
    export CUDA_VISIBLE_DEVICES= # one GPU cannot hold two ranks
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-$processes}" "$@"
