#!/usr/bin/env bash
# Runs a script or a module in ranks that share this machine's GPUs (shared.py), all at once by MPS:
#   benchmarks/lent/shared.sh RANKS SCRIPT|-m MODULE [arguments]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=launch/mps.sh
. launch/mps.sh

ranks=${1:?how many ranks}
shift
start_mps $((100 * $(nvidia-smi -L | wc -l) / ranks))
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" benchmarks/lent/shared.py "$@"
