"""A recipe for tests of the launch: all ranks meet over gloo, and each writes what it was given.

The first argument says where to and what then: DIR ok | DIR fail-once | DIR fail | DIR wait. "fail-once" writes a checkpoint's
name before it fails; "wait" stays until it is told to end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, what: str, rest: list[str]) -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank = dist.get_rank()
    restart = len(list(folder.glob(f"rank{rank}-restart*.json")))
    names = ("SLURM_NODEID", "MASTER_ADDR", "RUN_DIR", "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_CACHE_DIR")
    said = {"arguments": rest, "ranks": int(total), **{name: os.environ.get(name, "") for name in names}}
    (folder / f"rank{rank}-restart{restart}.json").write_text(json.dumps(said))
    print(f"rank {rank} on stdout", flush=True)
    print(f"rank {rank} on stderr", file=sys.stderr, flush=True)
    dist.barrier()
    if what == "wait":
        wait(folder, rank)
    if what == "fail" or (what == "fail-once" and restart == 0):
        if what == "fail-once" and rank == 0:
            Path(rest[rest.index("--save") + 1], "latest_checkpointed_iteration.txt").write_text("7")
        os._exit(5)  # at once: Python's own end, with a group whose peer is gone, may abort with another status
    dist.destroy_process_group()
    return 0


def wait(folder: Path, rank: int) -> None:
    def end(*_: object) -> None:
        (folder / f"rank{rank}-told").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    (folder / f"rank{rank}-waits").touch()
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
