"""python -m overlap_train.doctor, or torchrun --nproc-per-node 4 -m overlap_train.doctor."""

from __future__ import annotations

import sys

from .command import main

sys.exit(main(sys.argv[1:]))
