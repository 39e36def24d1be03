# shellcheck shell=bash
# CUDA's Multi-Process Service: processes that share a GPU run on it at once, each on a part of its SMs. Without it they take turns.

# start_mps PERCENT: for the processes that are started from now on, each with so many percent of its GPU's SMs. Does nothing where
# MPS is not installed, or where the caller has started it already: so sessions side by side share one. Else a daemon of its own
# each time: one whose clients have just been killed refuses new ones for a while (error 807).
start_mps() {
  [ -z "${CUDA_MPS_PIPE_DIRECTORY-}" ] || return 0
  mps=$(command -v nvidia-cuda-mps-control) || return 0
  mps_folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$mps_folder CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$1
  "$mps" -d
}

stop_mps() {
  [ -n "${mps_folder-}" ] || return 0
  echo quit | "$mps" >/dev/null
  rm -rf "$mps_folder"
  unset CUDA_MPS_PIPE_DIRECTORY mps_folder
}
trap stop_mps EXIT
