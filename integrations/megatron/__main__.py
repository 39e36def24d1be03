"""`python -m overlap_train.integrations.megatron SCRIPT.py ...`: see launcher.py."""

import sys

from overlap_train.integrations.megatron.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
