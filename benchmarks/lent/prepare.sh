#!/usr/bin/env bash
# Prepares a session on a GPU machine that is lent by the minute and has no network: wheels that it lacks, in .whl, where
# launch/bootstrap.sh looks. Take .whl there with the tree, and run session.sh.
#   benchmarks/lent/prepare.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

mkdir -p .whl
# For Python 3.12 on x86-64 with torch, Triton, NVSHMEM, pytest and matplotlib, as the image there has them.
wheels="megatron-core==0.19.2 nvshmem4py-cu13==0.4.1 cuda-core greenlet==3.5.6"
platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 17 24 26 27 28 31 34 35)
# shellcheck disable=SC2086 # both are lists
.venv/bin/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
  --platform manylinux2014_x86_64 -d .whl $wheels
ls -lh .whl
