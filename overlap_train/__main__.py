"""`python -m overlap_train`, also under torchrun: the command line of cli.py."""

import sys

from .cli import main

sys.exit(main())
