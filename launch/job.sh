# shellcheck shell=bash
# What train.sbatch and compare.sbatch share: ranks, logs, checkpoints, and what happens before the time limit. Sourced by
# them; `overlap-train launch` puts this text in the place of the line that does so.

say() { printf '[job %s] %s\n' "$SLURM_JOB_ID" "$*"; }
die() {
    printf '[job %s] error: %s\n' "$SLURM_JOB_ID" "$*" >&2
    exit 2
}

# run_job RECIPE'S ARGUMENTS...: the job from its first line to its exit status.
run_job() {
    local status step="" restarts=0 time_is_up=""
    prepare
    trap 'interrupted=1; stop_ranks' USR1 # sent before the time limit: #SBATCH --signal
    until start_and_wait "$@"; do
        if [ -n "$time_is_up" ]; then requeue; fi
        if ((restarts >= MAX_RESTARTS)); then
            say "failed with $status; each rank's output is under $logs"
            exit "$status"
        fi
        restarts=$((restarts + 1))
        say "failed with $status: restart $restarts of at most $MAX_RESTARTS"
    done
    say "done"
}

prepare() {
    mkdir -p "$RUN_DIR" || die "RUN_DIR=$RUN_DIR cannot be made"
    RUN_DIR=$(cd "$RUN_DIR" && pwd)
    [ -z "$CHECKPOINT_DIR" ] || mkdir -p "$CHECKPOINT_DIR" || die "CHECKPOINT_DIR=$CHECKPOINT_DIR cannot be made"
    first_checkpoint=$(newest_checkpoint)
    if [ -n "$MODULE" ]; then
        program=(-m "$MODULE")
    else
        [ -n "$CONTAINER_IMAGE" ] || [ -f "$RECIPE" ] || die "RECIPE=$RECIPE: no such file in $PWD"
        program=("$RECIPE")
    fi
    choose_container
    say "$SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), $PROCS_PER_NODE ranks each: ${program[*]}"
    say "variables in force: $(env | grep -E '^(NCCL|NVSHMEM|GLOO|CUDA|TORCH|TRITON|OMP)_' | sort | paste -s -d ' ')"
}

choose_container() {
    container=()
    if [ -n "$CONTAINER_IMAGE" ]; then
        local mounts="$PWD:$PWD,$RUN_DIR:$RUN_DIR"
        [ -z "$CHECKPOINT_DIR" ] || mounts+=",$CHECKPOINT_DIR:$CHECKPOINT_DIR"
        [ -z "$CONTAINER_MOUNTS" ] || mounts+=",$CONTAINER_MOUNTS"
        container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
    fi
}

# Megatron's own name for the file that says which checkpoint is the newest; the recipes write the same.
newest_checkpoint() { cat "${CHECKPOINT_DIR:-/nonexistent}/latest_checkpointed_iteration.txt" 2>/dev/null || true; }

# Starts all ranks and sets status to what they ended with. They begin with the newest checkpoint, which is chosen here for
# all of them: on a network file system two nodes may see two.
start_and_wait() {
    local resumed_from checkpoints=() interrupted
    resumed_from=$(newest_checkpoint)
    if [ -n "$CHECKPOINT_DIR" ]; then checkpoints=(--save "$CHECKPOINT_DIR"); fi
    if [ -n "$resumed_from" ]; then checkpoints+=(--load "$CHECKPOINT_DIR"); fi
    logs=$RUN_DIR/logs/$SLURM_JOB_ID/start-${SLURM_RESTART_COUNT:-0}.$restarts
    mkdir -p "$logs" || die "$logs cannot be made"
    say "newest checkpoint: ${resumed_from:-none}; each rank's output: $logs"
    status=1
    [ -z "$time_is_up" ] || return 1 # the signal came first
    start_nodes "$@" "${checkpoints[@]}" &
    step=$!
    while :; do # the signal interrupts wait, whose status then is not that of the ranks
        interrupted=
        wait "$step" && status=0 || status=$?
        [ -n "$interrupted" ] || return "$status"
    done
}

# One task a node. Its text goes along as an argument, because containers have no access to this file.
start_nodes() {
    local first port=$((20000 + SLURM_JOB_ID % 10000)) # below the ports that the kernel gives away
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol names no node of $SLURM_JOB_NODELIST"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank \${rank}] "
    exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 "${container[@]}" bash -c "$(declare -f start_node); start_node \"\$@\"" node \
        "$first:$port" "$logs" "$PROCS_PER_NODE" "$PYTHON" "${program[@]}" "$@"
}

# start_node ENDPOINT LOGS RANKS PYTHON PROGRAM...: torchrun on this node. Every rank writes to files of its own; the job's
# output shows the first rank of each node and the last one, on which Megatron prints its losses. torchrun itself restarts
# nothing: where ranks of two nodes fail at once, its second rendezvous can fail too (seen with torch 2.13).
start_node() {
    local endpoint=$1 logs=$2/node-$SLURM_NODEID-$SLURMD_NODENAME ranks=$3 interpreter=$4 is_host=0
    shift 4
    # Said here, not guessed from names: a node's name for itself may not be the one that the others know it by.
    if ((SLURM_NODEID == 0)); then is_host=1; fi
    mkdir -p "$logs"
    exec "$interpreter" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
        --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$is_host" \
        --local-addr="$SLURMD_NODENAME" --max-restarts=0 \
        --log-dir="$logs" --redirects=3 --tee="0:3,$((ranks - 1)):3" "$@"
}

# A rank that saves when it is told to end (Megatron: --exit-signal-handler) gets torchrun's 30 seconds for it.
stop_ranks() {
    [ -z "$time_is_up" ] || return 0
    time_is_up=1
    say "the time limit is near: stopping the ranks"
    scancel --signal=TERM "$SLURM_JOB_ID" || true # not to srun, which kills its tasks when it is told to end
    (sleep "$STOP_SECONDS" && kill -KILL "$step") 2>/dev/null &
}

# Only where this start wrote a checkpoint: without that rule a job that never gets to one would run for ever.
requeue() {
    if [ -z "$CHECKPOINT_DIR" ]; then
        say "not requeued: there are no checkpoints to resume from"
    elif [ "$(newest_checkpoint)" = "$first_checkpoint" ]; then
        say "not requeued: no checkpoint was written since the start; save more often (--save-interval) or raise --time"
    else
        say "requeued: the next start resumes from checkpoint $(newest_checkpoint)"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
        say "scontrol did not requeue the job; submit it again and it resumes"
    fi
    exit 1
}
