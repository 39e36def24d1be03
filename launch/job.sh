# shellcheck shell=bash
# Shared by train.sbatch and compare.sbatch: starts the ranks, keeps their logs, resumes from checkpoints and requeues before the
# time limit. Both files source it; `overlap-train launch` replaces that line by this text.

say() { printf '[job %s] %s\n' "$SLURM_JOB_ID" "$*"; }
die() {
    printf '[job %s] error: %s\n' "$SLURM_JOB_ID" "$*" >&2
    exit 2
}

# run_job RECIPE'S ARGUMENTS...: the job from its first line to its exit status.
run_job() {
    local status step="" restarts=0 time_is_up=""
    prepare
    trap 'interrupted=1; stop_ranks' USR1 # Slurm sends it before the time limit: #SBATCH --signal
    until start_and_wait "$@"; do
        if [ -n "$time_is_up" ] || is_preempted; then requeue; fi
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
    RUN_DIR=$(CDPATH='' cd "$RUN_DIR" && pwd)
    if [ -n "$CHECKPOINT_DIR" ]; then
        mkdir -p "$CHECKPOINT_DIR" || die "CHECKPOINT_DIR=$CHECKPOINT_DIR cannot be made"
        CHECKPOINT_DIR=$(CDPATH='' cd "$CHECKPOINT_DIR" && pwd)
        claim_checkpoints
    fi
    first_step=$(saved_step)
    if [ -n "$MODULE" ]; then
        program=(-m "$MODULE")
    else
        [ -n "$CONTAINER_IMAGE" ] || [ -f "$RECIPE" ] || die "RECIPE=$RECIPE: no such file in $PWD"
        program=("$RECIPE")
    fi
    choose_container
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # as Megatron demands before Blackwell
    say "$SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), $PROCS_PER_NODE ranks each: ${program[*]}"
    say "variables in force: $(env | grep -E '^(NCCL|NVSHMEM|GLOO|CUDA|TORCH|TRITON|OMP)_' | sort | paste -s -d ' ')"
}

# Two jobs that save into one folder would write over each other's checkpoints, and resume from them. squeue names all tasks of an
# array by the number of its last one: the others are not that job. An old claim is removed first, because it may be another user's.
claim_checkpoints() {
    local other running claim=$CHECKPOINT_DIR/slurm_job
    other=$(cat "$claim" 2>/dev/null) || true
    if [ -n "$other" ] && [ "$other" != "$SLURM_JOB_ID" ] &&
        running=$(squeue --noheader --states=RUNNING,SUSPENDED --jobs="$other" --format=%A 2>/dev/null) &&
        grep -qx "$other" <<<"$running"; then
        die "job $other is running and saves into $CHECKPOINT_DIR, too: take another folder, or sbatch --dependency=singleton"
    fi
    { rm -f "$claim" && echo "$SLURM_JOB_ID" >"$claim"; } || die "CHECKPOINT_DIR=$CHECKPOINT_DIR cannot be written"
}

# A full disk leaves Megatron's file empty: without --load it would train from its first step and write over what is there.
check_tracker() {
    local file=$CHECKPOINT_DIR/$tracker
    [ -z "$MODULE" ] || [ -z "$CHECKPOINT_DIR" ] || [ ! -e "$file" ] || [ -s "$file" ] ||
        die "$file is empty: write into it the step of the newest whole checkpoint there, or take another folder"
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

# Megatron writes the step of the newest checkpoint into this file, and so do the recipes. Where a recipe did not come to it, or the
# file is empty, the newest folder says that there is something to resume from: the recipe then takes the newest one.
tracker=latest_checkpointed_iteration.txt
saved_step() { cat "${CHECKPOINT_DIR:-/nonexistent}/$tracker" 2>/dev/null || true; }
newest_checkpoint() {
    local step
    step=$(saved_step)
    if [ -z "$step$MODULE" ] && [ -n "$CHECKPOINT_DIR" ]; then
        step=$(find "$CHECKPOINT_DIR" -maxdepth 1 -regex '.*/iter_[0-9]+' -printf '%f\n' 2>/dev/null | sort | tail -n 1) || true
    fi
    echo "$step"
}

# Starts all ranks, waits, and sets status to their exit status. Whether there is a checkpoint to resume from is decided here, once
# for all ranks: on a network file system two nodes may see different files.
start_and_wait() {
    local resumed_from checkpoints=() interrupted
    check_tracker # before each start: the disk may have been full in the one before
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
    while :; do # the signal interrupts wait, which then returns another status than that of the ranks
        interrupted=
        wait "$step" && status=0 || status=$?
        [ -n "$interrupted" ] || return "$status"
    done
}

# One task a node. The text of the functions is passed as an argument, because a container cannot read this file.
start_nodes() {
    local first port=$((20000 + SLURM_JOB_ID % 10000)) # below the ports that the kernel assigns
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol names no node of $SLURM_JOB_NODELIST"
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank \${rank}] "
    # --export=ALL: after sbatch --export=NONE (or SBATCH_EXPORT, as some sites set it) tasks would have no PATH.
    exec srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 "${container[@]}" bash -c "$(declare -f start_node check_address); start_node \"\$@\"" node \
        "$first:$port" "$logs" "$PROCS_PER_NODE" "$PYTHON" "${program[@]}" "$@"
}

# start_node ENDPOINT LOGS RANKS PYTHON PROGRAM...: torchrun on this node. Every rank writes to its own files. The job's output
# shows the first and the last rank of each node; Megatron prints its losses on the last one. torchrun restarts nothing itself:
# after ranks of two nodes had failed at once, its second rendezvous failed too (torch 2.13). -u: it would keep back 8 KiB of what
# ranks print, minutes of training, and take them with it if it is killed.
start_node() {
    local endpoint=$1 logs=$2/node-$SLURM_NODEID-$SLURMD_NODENAME ranks=$3 interpreter=$4 is_host=0
    shift 4
    # Set here because torchrun would compare host names, and a node's own name may differ from the one that others use.
    if ((SLURM_NODEID == 0)); then is_host=1; fi
    mkdir -p "$logs"
    # Not below the home folder: on a network file system the ranks of all nodes would compile into one folder. Not another's, either.
    local cache=${TMPDIR:-/tmp}/triton-$UID
    if [ -z "${TRITON_CACHE_DIR:-}" ] && (umask 077 && mkdir -p "$cache") 2>/dev/null && [ -O "$cache" ]; then
        export TRITON_CACHE_DIR=$cache
    fi
    if ((SLURM_JOB_NUM_NODES > 1)) && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then check_address; fi
    exec "$interpreter" -u -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
        --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$is_host" \
        --local-addr="$SLURMD_NODENAME" --max-restarts=0 \
        --log-dir="$logs" --redirects=3 --tee="0:3,$((ranks - 1)):3" "$@"
}

# gloo gives the other nodes the address that this host's own name stands for. In Debian's /etc/hosts that is 127.0.1.1.
check_address() {
    local name address _
    read -r name </proc/sys/kernel/hostname
    read -r address _ < <(getent ahosts "$name") || return 0
    case $address in 127.* | ::1)
        printf '[job %s] warning: %s knows itself as %s, where gloo of other nodes cannot reach it: set GLOO_SOCKET_IFNAME\n' \
            "$SLURM_JOB_ID" "$name" "$address"
        ;;
    esac
}

# This job for Slurm's commands, which take the number of an array's last task for all of its tasks.
this_job() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# A rank that saves on SIGTERM (Megatron: --exit-signal-handler) has the 30 seconds that torchrun waits.
stop_ranks() {
    [ -z "$time_is_up" ] || return 0
    time_is_up=1
    if is_preempted; then say "preempted: stopping the ranks"; else say "the time limit is near: stopping the ranks"; fi
    scancel --signal=TERM "$(this_job)" || true # to the tasks; srun would kill its tasks if it got the signal itself
    (sleep "$STOP_SECONDS" && kill -KILL "$step") 2>/dev/null &
}

# Whether Slurm has preempted this start of the job. Where the partition or QOS has a GraceTime, Slurm then ends only the ranks, and
# requeues nothing by itself if this script ends before that time. An earlier start's PreemptTime does not count.
is_preempted() {
    local job preempted started
    job=$(SLURM_TIME_FORMAT=standard scontrol --oneliner show job "$(this_job)" 2>/dev/null) || return 1
    preempted=${job#* PreemptTime=} started=${job#* StartTime=}
    preempted=${preempted%% *} started=${started%% *}
    [[ $preempted == [0-9]* && ! $preempted < $started ]]
}

# Requeues only if this start saved a checkpoint: a job that never reaches one would otherwise be requeued for ever. A preempted job
# is requeued in any case, as Slurm itself does it.
requeue() {
    local newest next="begins anew: there is no checkpoint"
    newest=$(newest_checkpoint)
    [ -z "$newest" ] || next="resumes from checkpoint $newest"
    if [ -z "$CHECKPOINT_DIR" ]; then
        say "not requeued: there are no checkpoints to resume from"
    elif ! is_preempted && [ "$(saved_step)" = "$first_step" ]; then
        say "not requeued: no checkpoint was written since the start; save more often (--save-interval) or raise --time"
    else
        say "requeued: the next start $next"
        scontrol requeue "$(this_job)" && exit 0
        say "scontrol did not requeue the job; submit it again and it resumes"
    fi
    exit 1
}
