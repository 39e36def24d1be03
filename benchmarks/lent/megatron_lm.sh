#!/usr/bin/env bash
# Trains a model of MODEL's sizes by Megatron-LM's own pretrain_gpt.py with TransformerEngine's modules on this machine's GPUs, and
# prints the median time of a step of each variant, the last loss and gradient norm, and how far its losses are from the first one's
# (root mean square of the second half of the steps):
#   benchmarks/lent/megatron_lm.sh SCRIPT OUT VARIANT...
# SCRIPT: pretrain_gpt.py of a checkout (its folder may hold that, gpt_builders.py and model_provider.py alone: the rest is in the
# megatron-core wheel). VARIANT: te (no overlap), te_again (the same), userbuffers (their defaults), ring (row linears' scatters
# by ring exchange), ours (our launcher with --overlap-train), with tensor parallelism over all GPUs; cp_te, cp_ours: context
# parallelism over all of them by a2a, 32768 tokens, 2 layers; ep_te, ep_ours: te and ours with experts' exchange hidden by a
# second micro-batch, weight gradients delayed; experts: ours with --overlap-train-experts. MODEL: 8b (Llama-3, 4 layers;
# default), or with TP 2, experts over all GPUs and the distributed optimizer mixtral (8x7B, 2 layers), qwen3 (30B-A3B, 4 layers),
# deepseek (like V3, with 32 of its experts, 3 layers); of these mixtral-small, qwen3-small and deepseek-small are cut for two
# ranks on one GPU, with 1024 tokens, for losses and not for times. RANKS: more than there are GPUs share these (shared.sh).
# ITERS: steps, of which the first four do not count (default 14). LIMIT: seconds of a variant (default 120). TE_ENV: see
# session.sh. FUSION=on: gradient accumulation fusion on every side, with a stand-in for Apex's kernel; else on none.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

script=${1:?pretrain_gpt.py of a Megatron-LM checkout} out=${2:?a folder for logs}
shift 2
mkdir -p "$out"
# shellcheck disable=SC1090
. "${TE_ENV:-/tmp/te_site/env.sh}" || exit 1
export CUDA_DEVICE_MAX_CONNECTIONS=1
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
start=(.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "${RANKS:=$gpus}")
[ "$RANKS" -le "$gpus" ] || start=(benchmarks/lent/shared.sh "$RANKS")
ring=$out/ring.yaml
for product in proj_fprop fc2_fprop; do
  echo "$product: {method: ring_exchange, num_sm: 1, cga_size: 1, set_sm_margin: false, num_splits: 2}"
done >"$ring"

moe="--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 1e-3 --expert-model-parallel-size $RANKS --expert-tensor-parallel-size 1 --use-distributed-optimizer"
llama="--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
tp=2 length=8192
case ${MODEL:=8b} in *-small) length=1024 ;; esac
heads="--num-attention-heads 16"
case $MODEL in
  8b) layers=4 tp=$RANKS sizes=$llama ;;
  mixtral) layers=2 sizes="$llama --num-experts 8 --moe-router-topk 2 $moe" ;;
  qwen3) layers=4 sizes="--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention \
      --num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 $moe" ;;
  deepseek) layers=3 sizes="--hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention \
      --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm \
      --num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
      --moe-layer-freq ([0]+[1]*2) $moe" ;;
  mixtral-small) layers=2 sizes="--hidden-size 2048 --ffn-hidden-size 4096 $heads --group-query-attention --num-query-groups 8 \
      --num-experts 8 --moe-router-topk 2 $moe" ;;
  qwen3-small) layers=2 sizes="--hidden-size 2048 --ffn-hidden-size 6144 $heads --group-query-attention --num-query-groups 4 \
      --kv-channels 128 --qk-layernorm --num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 768 $moe" ;;
  deepseek-small) layers=3 sizes="--hidden-size 2048 --ffn-hidden-size 4096 $heads --multi-latent-attention \
      --q-lora-rank 512 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm \
      --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 \
      --moe-layer-freq ([0]+[1]*2) $moe" ;;
  *) echo "no such model: $MODEL" && exit 2 ;;
esac

# distance LOSSES LOSSES: root mean square of their differences in the second half of the steps that both have
distance() {
  paste "$1" "$2" | awk 'NF == 2 {d[++last] = ($1 - $2) ^ 2}
    END {for (i = last; i > last / 2; i--) {sum += d[i]; n++}; if (n) printf "%.2g", sqrt(sum / n)}'
}

# train NAME SEQUENCE LAYERS SAMPLES ARGUMENTS...
train() {
  local name=$1 seq=$2 layers=$3 samples=$4
  shift 4
  # shellcheck disable=SC2086 # lists; none of their words is a file's name
  timeout "${LIMIT:-120}" "${start[@]}" -m overlap_train.integrations.megatron "$script" --num-layers "$layers" $sizes \
    --seq-length "$seq" --max-position-embeddings "$seq" --position-embedding-type rope --rotary-base 500000 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size "$samples" \
    --train-iters "${ITERS:-14}" --lr 1e-4 --lr-decay-style constant --bf16 --mock-data --tokenizer-type NullTokenizer \
    --vocab-size 128255 --log-interval 1 --eval-iters 0 --eval-interval 1000 --attention-dropout 0 --hidden-dropout 0 \
    --transformer-impl transformer_engine --seed 1234 "$@" >"$out/$name.log" 2>&1
  local status=$? median
  median=$(grep -oE 'elapsed time per iteration \(ms\): [0-9.]+' "$out/$name.log" | grep -oE '[0-9.]+$' | tail -n +5 | sort -n |
    awk '{ms[NR] = $1} END {if (NR) printf "median of %d steps %.1f ms", NR, (ms[int((NR + 1) / 2)] + ms[int(NR / 2) + 1]) / 2}')
  grep -oE 'lm loss: [0-9.E+-]+' "$out/$name.log" | grep -oE '[0-9][0-9.E+-]+$' >"$out/$name.losses"
  first=${first-$out/$name.losses}
  echo "$name: status $status; $median; losses $(distance "$first" "$out/$name.losses") away;" \
    "$(grep -oE 'lm loss: [0-9.E+-]+|grad norm: [0-9.]+' "$out/$name.log" | tail -n 2 | paste -sd ' ')"
}

fusion=--no-gradient-accumulation-fusion
if [ "${FUSION:-off}" != off ]; then
  fusion=
  mkdir -p "$out/apex"
  cat >"$out/apex/fused_weight_gradient_mlp_cuda.py" <<'PYTHON'
from overlap_train.ops.wgrad import accumulate


def wgrad_gemm_accum_fp32(x, dy, main_grad):
    accumulate(main_grad, dy, x)
PYTHON
  export PYTHONPATH=$out/apex:${PYTHONPATH-}
fi
tensor="--tensor-model-parallel-size $tp --sequence-parallel $fusion"
beside="--overlap-moe-expert-parallel-comm --delay-wgrad-compute" # wants many hardware queues
# Without the last flag the data loader makes a mask of 1 GiB for each sample: four of eight steps took twice as long or longer.
context="--context-parallel-size $RANKS --cp-comm-type a2a $fusion --no-create-attention-mask-in-dataloader"
for variant in "$@"; do
  # shellcheck disable=SC2086 # lists
  case $variant in
    te | te_again) train $variant $length "$layers" $((4 * RANKS / tp)) $tensor ;;
    userbuffers) train userbuffers $length "$layers" $((4 * RANKS / tp)) $tensor --tp-comm-overlap ;;
    ring) train ring $length "$layers" $((4 * RANKS / tp)) $tensor --tp-comm-overlap --tp-comm-overlap-cfg "$ring" ;;
    ours) train ours $length "$layers" $((4 * RANKS / tp)) $tensor --overlap-train ;;
    ep_te) CUDA_DEVICE_MAX_CONNECTIONS=32 train ep_te $length "$layers" $((4 * RANKS / tp)) $tensor $beside ;;
    ep_ours) CUDA_DEVICE_MAX_CONNECTIONS=32 train ep_ours $length "$layers" $((4 * RANKS / tp)) $tensor $beside --overlap-train ;;
    experts) train experts $length "$layers" $((4 * RANKS / tp)) $tensor --overlap-train --overlap-train-experts ;;
    cp_te) train cp_te 32768 2 1 $context ;;
    cp_ours) train cp_ours 32768 2 1 $context --overlap-train ;;
    *) echo "no such variant: $variant" && exit 2 ;;
  esac
done
