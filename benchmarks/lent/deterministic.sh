#!/usr/bin/env bash
# Trains a GPT twice with Megatron-LM's --deterministic-mode and --overlap-train, and says whether losses, gradient norms and the
# weights at the end are equal to the bit:
#   benchmarks/lent/deterministic.sh SCRIPT OUT LAYOUT...
# SCRIPT: as in megatron_lm.sh. LAYOUT: tp2, tp2_dp2 (four ranks, which share two GPUs), ulysses, recomputed (tp2). ITERS: steps
# (default 300). MODULES: local (Megatron-Core's, default) or te (TransformerEngine's; TE_ENV: see session.sh). LIMIT:
# seconds of a run (default 300).
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

script=${1:?pretrain_gpt.py of a Megatron-LM checkout} out=${2:?a folder for logs}
shift 2
mkdir -p "$out"
export CUDA_DEVICE_MAX_CONNECTIONS=1
modules="--transformer-impl local --spec overlap_train.integrations.megatron.spec gpt_block_spec --no-masked-softmax-fusion --no-rope-fusion"
if [ "${MODULES:-local}" = te ]; then
  # shellcheck disable=SC1090
  . "${TE_ENV:-/tmp/te_site/env.sh}" || exit 1
  modules="--transformer-impl transformer_engine"
fi

# train NAME RANKS ARGUMENTS...: its checkpoint is OUT/NAME
train() {
  local name=$1 ranks=$2 start=(.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$2")
  shift 2
  [ "$ranks" -le "$(nvidia-smi -L | wc -l)" ] || start=(benchmarks/lent/shared.sh "$ranks")
  # shellcheck disable=SC2086 # a list
  timeout "${LIMIT:-300}" "${start[@]}" -m overlap_train.integrations.megatron "$script" --overlap-train --deterministic-mode $modules \
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --group-query-attention --num-query-groups 8 \
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 4 --bf16 --mock-data \
    --train-iters "${ITERS:-300}" --lr 3e-4 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 32767 \
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer \
    --no-create-attention-mask-in-dataloader --seed 1234 --save "$out/$name" --save-interval "${ITERS:-300}" --no-save-optim \
    --no-save-rng "$@" >"$out/$name.log" 2>&1
}

# losses_of LOG: loss and gradient norm of every step
losses_of() { grep -oE 'iteration +[0-9]+/|lm loss: [0-9.E+-]+|grad norm: [0-9.]+' "$1"; }

# weights_of CHECKPOINT: a hash of all tensors
weights_of() {
  .venv/bin/python - "$1" <<'PYTHON'
import hashlib
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

reader = dcp.FileSystemReader(sys.argv[1])
kept = reader.read_metadata().state_dict_metadata.items()
tensors = {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in kept if isinstance(meta, TensorStorageMetadata)}
dcp.load(tensors, storage_reader=reader, no_dist=True)
found = hashlib.sha256()
for key in sorted(tensors):
    found.update(key.encode() + tensors[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print(len(tensors), "tensors", found.hexdigest()[:16])
PYTHON
}

failed=0
for layout in "$@"; do
  ranks=2 flags="--tensor-model-parallel-size 2 --sequence-parallel"
  case $layout in
    tp2) ;;
    tp2_dp2) ranks=4 ;;
    ulysses) flags="--context-parallel-size 2 --cp-comm-type a2a" ;;
    recomputed) flags="$flags --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" ;;
    *) echo "no such layout: $layout" && exit 2 ;;
  esac
  for run in first second; do
    # shellcheck disable=SC2086 # a list
    train "$layout-$run" "$ranks" $flags || echo "$layout, $run run: status $?"
    losses_of "$out/$layout-$run.log" >"$out/$layout-$run.losses"
    weights_of "$out/$layout-$run/iter_$(printf %07d "${ITERS:-300}")" >"$out/$layout-$run.weights"
    rm -rf "${out:?}/$layout-$run"
  done
  steps=$(grep -c iteration "$out/$layout-first.losses")
  if [ "$steps" -eq "${ITERS:-300}" ] && cmp -s "$out/$layout-"{first,second}.losses && cmp -s "$out/$layout-"{first,second}.weights; then
    echo "$layout: $steps steps twice, losses, gradient norms and $(cat "$out/$layout-first.weights") equal; last $(tail -n 2 "$out/$layout-first.losses" | paste -sd ' ')"
  else
    echo "$layout: NOT equal, or not $steps = ${ITERS:-300} steps: see $out/$layout-*"
    failed=1
  fi
done
exit "$failed"
