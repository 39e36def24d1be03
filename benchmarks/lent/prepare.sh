#!/usr/bin/env bash
# Prepares a session on a GPU machine that is lent by the minute and has no network: wheels that it lacks (in .whl, where
# launch/bootstrap.sh looks), and kernels compiled here (in FOLDER-triton, packed into FOLDER).
#   benchmarks/lent/prepare.sh [FOLDER]        default runs/lent
# It compiles what is measured; kernels of the tests are compiled there.
# Take .whl and FOLDER there with the tree, and run session.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=${1:-runs/lent}
mkdir -p "$folder" .whl
python=$PWD/.venv/bin/python

# For Python 3.12 on x86-64 with torch, Triton, NVSHMEM, pytest and matplotlib, as the image there has them.
wheels="megatron-core==0.19.2 nvshmem4py-cu13==0.4.1 cuda-core greenlet==3.5.6"
platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 17 24 26 27 28 31 34 35)
# shellcheck disable=SC2086 # both are lists
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
  --platform manylinux2014_x86_64 -d .whl $wheels

export PYTHONPATH=$PWD:$PWD/benchmarks/lent TRITON_CACHE_DIR=$PWD/$folder-triton
"$python" benchmarks/probes/compile_ahead.py --rows 128 1024 2048 4100 8192 --cache "$TRITON_CACHE_DIR" >"$folder/shapes.log"
# Without what lies between source and PTX, which nothing reads again, and with kernels of one name side by side: 6 instead of 52 MB.
find "$TRITON_CACHE_DIR" -type f -name '*.*' ! -name '*.source' ! -name '*.ttir' ! -name '*.ttgir' ! -name '*.llir' -printf '%f %P\n' |
  sort | cut -d ' ' -f 2 | tar c -C "$TRITON_CACHE_DIR" -T - | xz --lzma2=preset=6,dict=128MiB >"$folder/kernels.tar.xz"
"$python" -c 'import torch, triton; print(f"compiled with torch {torch.__version__} and Triton {triton.__version__}")'
ls -lh "$folder/kernels.tar.xz" .whl
