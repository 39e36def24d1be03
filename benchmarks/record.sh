#!/usr/bin/env bash
# Records what lies under benchmarks/h200x4 on this machine's GPUs, with pictures; about half an hour on 4 x H200:
#   benchmarks/record.sh FOLDER [SECONDS]
# SECONDS: start nothing that would end later, and stop what does (default 3600). Needs .venv, which any make target makes.
# Set CONNECTIONS for another CUDA_DEVICE_MAX_CONNECTIONS than 1, STEPS for some of the steps below only. Those with TransformerEngine
# run where TE_ENV (default /tmp/te_site/env.sh) is a file to source that makes it importable; a step that only lacks it is left out.
# WIRE: a rate (40gbit) at which the step of two nodes keeps loopback; needs root (lent/steady_wire.sh).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

out=${1:?the folder to write}
limit=${2:-3600}
export CUDA_DEVICE_MAX_CONNECTIONS=${CONNECTIONS:-1} OMP_NUM_THREADS=1
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
te_env=${TE_ENV:-/tmp/te_site/env.sh}
mkdir -p "$out"
failed=0
with=() # what starts the programs of a step

# step NAME SECONDS ARGUMENTS...: torchrun with these arguments, its output in FOLDER/NAME.log
step() {
  local name=$1 needs=$2
  shift 2
  [[ " ${STEPS:-$name} " == *" $name "* ]] || return 0
  local left=$((limit - SECONDS))
  if [ "$left" -lt "$needs" ]; then
    echo "$name: left out, $left s are left and it takes $needs"
    return 0
  fi
  local begin=$SECONDS
  if timeout "$left" "${with[@]}" .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: $((SECONDS - begin)) s"
  else
    failed=$((failed + 1))
    echo "$name: failed after $((SECONDS - begin)) s, see $out/$name.log"
  fi
}

# te_step NAME SECONDS ARGUMENTS...: a step with TransformerEngine
te_step() {
  if [ -f "$te_env" ]; then
    # shellcheck disable=SC2016 # expanded by the inner shell
    with=(bash -c '. "$0" && exec "$@"' "$te_env")
    step "$@"
    with=()
  elif [[ " ${STEPS:-$1} " == *" $1 "* ]]; then
    echo "$1: left out, TransformerEngine is not there ($te_env)"
  fi
}

mfu=recipes/compare_mfu.py
big="--model llama3-8b,llama3-70b --layers 4,2" variants=megatron,chunked,fused,direct,overlap
graphs=megatron,overlap,megatron_graph,overlap_graph te=te,te_userbuffers,te_userbuffers_ring,te_overlap
big_too=""
memory='import torch; print(sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) >> 30)'
memory=$(.venv/bin/python -c "$memory")
# Variants stand side by side. Of 70B with TP 2 each takes 34 GiB of a GPU, of 8B 18: three and six fit in 140 GB, four of 8B do
# not in 80.
if [ "$memory" -lt 400 ]; then
  big="--model llama3-8b --layers 4" big_too="--model llama3-70b --layers 2"
fi
if [ "$memory" -lt 200 ]; then
  big_too="" variants=megatron,fused,overlap graphs=megatron_graph,overlap_graph te=te_userbuffers_ring,te_overlap
fi
step tune-8b 35 -m overlap_train tune --model llama3-8b --seq 8192 4096 2048
step tune-70b 25 -m overlap_train tune --model llama3-70b --seq 8192
mlps="11008,4096 14336,4096 28672,8192 53248,16384 29568,8192" # the weights of the operator benchmark: N,K of the columns
# shellcheck disable=SC2086,SC2046
step tune-operators 40 -m overlap_train tune --seq 8192 --column $mlps --row $(sed -E 's/([0-9]+),([0-9]+)/\2,\1/g' <<<"$mlps")
step tune-ulysses 60 -m overlap_train tune --model llama3-8b --ulysses --seq 32768
step operators 35 -m overlap_train bench operators --methods auto,fused,direct,chunked --out "$out"
step layers 50 -m overlap_train bench layers --methods auto,fused,direct,chunked --out "$out"
te_step layers_te 150 -m overlap_train bench layers --methods auto,direct --out "$out/te"
step small_m 40 -m overlap_train bench operators --rows 128 256 512 1024 --methods auto,low_latency,direct,collective --out "$out/small_m"
step all_reduce 40 -m overlap_train bench operators --all-reduce --methods auto,fused,direct,chunked --out "$out/all_reduce"
step all_reduce_small_m 60 -m overlap_train bench operators --all-reduce --rows 1 16 64 128 256 512 \
  --methods auto,low_latency,direct,collective --out "$out/all_reduce_small_m"
step all_reduce_graphs 60 -m overlap_train bench operators --all-reduce --rows 1 16 64 128 256 512 --graphs \
  --methods auto,low_latency,collective --out "$out/all_reduce_graphs"
for recipe in tensorwise blockwise; do
  step "fp8_$recipe" 60 -m overlap_train bench operators --fp8 "$recipe" --methods auto,fused,direct,chunked --out "$out/fp8_$recipe"
done
step ragged 50 -m overlap_train bench operators --rows 1992 "$((1992 + gpus))" 2048 4096 "$((gpus > 4 ? 4096 + gpus : 4100))" 8192 8200 \
  --shapes llama3-8b --methods auto,fused,direct --out "$out/ragged"
step ulysses 200 -m overlap_train bench ulysses --methods collective,fused,direct,chunked --out "$out/ulysses"
# Ranks of this machine as two nodes: NCCL over sockets between them.
half=$((gpus / 2))
[ -z "${WIRE-}" ] || with=(benchmarks/lent/steady_wire.sh "$WIRE")
[ "$half" -eq 0 ] || step hierarchical 120 -m overlap_train bench hierarchical --node-ranks "$half" --methods auto,collective --out "$out/hierarchical"
with=()
step timeline 15 -m overlap_train bench timeline --out "$out"
# shellcheck disable=SC2086
step mfu 150 $mfu $big --global-batch-size 4 --quick --variants "$variants" --out "$out/mfu"
# shellcheck disable=SC2086
[ -z "$big_too" ] || step mfu_70b 120 $mfu $big_too --global-batch-size 4 --quick --variants megatron,chunked,overlap --out "$out/mfu_70b"
step mfu_s2048 45 $mfu --model llama3-8b --layers 4 --seq-length 2048 --global-batch-size 8 --quick \
  --variants "$graphs" --out "$out/mfu_s2048"
step mfu_all_reduce 60 $mfu --model llama3-8b --layers 4 --global-batch-size 4 --quick --no-sequence-parallel --out "$out/mfu_all_reduce"
step loss 50 $mfu --model llama3-8b --layers 2 --seq-length 4096 --steps 200 --round-steps 20 --variants megatron,overlap \
  --out "$out/loss"
# Ulysses over all GPUs, with whole weights on each: five models of 18 GB stand side by side on 2 GPUs. A method that hangs ends
# the step after a minute.
ulysses="$mfu --cp $gpus --model llama3-8b --layers 2 --overlap-train-timeout-s 60"
# shellcheck disable=SC2086
step mfu_ulysses 150 $ulysses --seq-length 32768 --quick --out "$out/mfu_ulysses"
# shellcheck disable=SC2086
step loss_ulysses 150 $ulysses --seq-length 4096 --steps 200 --round-steps 20 --variants nccl,chunked,fused,direct --out "$out/loss_ulysses"
# Ulysses 2 beside tensor parallelism over the other GPUs.
[ "$gpus" -lt 4 ] || step mfu_tp_ulysses 120 $mfu --cp 2 --model llama3-8b --layers 2 --overlap-train-timeout-s 60 --seq-length 32768 \
  --quick --out "$out/mfu_tp_ulysses"
te8b="$mfu --model llama3-8b --layers 4 --global-batch-size 4 --steps 20 --round-steps 2"
# shellcheck disable=SC2086
for fusion in on off; do
  te_step "mfu_te_$fusion" 130 $te8b --weight-gradient-fusion $fusion --variants "$te" --out "$out/mfu_te_$fusion"
done
# shellcheck disable=SC2086
for recipe in tensorwise blockwise; do
  [ $recipe = tensorwise ] || te=te,te_overlap # userbuffers refuse it
  te_step "mfu_te_$recipe" 130 $te8b --te-fp8 $recipe --variants "$te" --out "$out/mfu_te_$recipe"
done
for model in qwen3 mixtral; do
  te_step "experts_$model" 60 benchmarks/probes/moe_layer.py --model $model --methods fused,fused_fp8,chunked
done
step lora 60 $mfu --model llama3-8b --layers 4 --global-batch-size 4 --lora 16 --out "$out/lora"
step deterministic 60 $mfu --model llama3-8b --layers 4 --global-batch-size 4 --deterministic --variants megatron,overlap --out "$out/deterministic"
for folder in "$out" "$out/small_m" "$out/all_reduce" "$out/all_reduce_small_m" "$out/all_reduce_graphs" "$out/ragged" "$out/ulysses" "$out/hierarchical" "$out/te"; do
  [ -z "$(find "$folder" -maxdepth 1 -name '*.json' 2>/dev/null)" ] || .venv/bin/python -m overlap_train bench plot "$folder"
done
exit "$failed"
