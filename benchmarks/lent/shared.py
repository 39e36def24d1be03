"""Runs a script or a module in ranks that share GPUs: for what is right and what the host does, not for how fast it is.

    torchrun --standalone --nproc-per-node 2 benchmarks/lent/shared.py benchmarks/probes/host_time.py --rounds 20
    torchrun --standalone --nproc-per-node 2 benchmarks/lent/shared.py -m overlap_train bench layers

Each rank is a host of its own for NCCL, which refuses two ranks of one host on one GPU. Our kernels leave 8 SMs to the driver,
which copies between ranks of one GPU by kernels. With MPS (launch/test_gpu.sh starts it) the ranks run at once.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from overlap_train.ops import launch
from overlap_train.tools.measure.world import pretend_nodes


def share() -> None:
    """Before the first communicator and before the GPU is used."""
    pretend_nodes(1)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    all_of_them = launch.multiprocessors
    launch.multiprocessors = lambda device: all_of_them(device) - 8


if __name__ == "__main__":
    share()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
