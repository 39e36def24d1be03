"""`recipes/compare_mfu.py --model small` with the sizes that pretrain_gpt.py takes on a GPU, for ranks that share one.

    benchmarks/lent/shared.sh 2 benchmarks/lent/losses.py --cp 2 --layers 4 --seq-length 4096 --loss-steps 200

NCCL goes over sockets between such ranks: a step of the published models would send 6 GB of gradients through them.
"""

from __future__ import annotations

import sys
from pathlib import Path

recipes = str(Path(__file__).resolve().parents[2] / "recipes")
sys.path.insert(0, recipes)

import compare_mfu  # noqa: E402 # from the folder above

from mfu import plan  # noqa: E402

if __name__ == "__main__":
    on_gpu = plan.defaults(True)
    plan.defaults = lambda _, model: on_gpu  # type: ignore[assignment] # --model small is all that is asked for
    sys.argv[1:1] = ["--model", "small"]
    sys.exit(compare_mfu.main())
