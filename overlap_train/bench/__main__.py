"""torchrun --nproc-per-node 4 -m overlap_train.bench operators|layers, python -m overlap_train.bench plot DIR."""

from __future__ import annotations

import sys

from .command import main

sys.exit(main())
