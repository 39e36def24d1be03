"""torchrun whose failed runs end with one line and the failed rank's exit status instead of two stack traces.

    python launch/run.py [torchrun's arguments]

Each rank prints itself what went wrong. The stack trace of torchrun's agent would push that off the screen.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> int:
    """Run the command on every rank; returns the exit status as a shell counts it (128 + signal for a killed rank)."""
    # It warns that the agent ends the other ranks after a failure, and its errors repeat the line printed below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(None))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        print(f"torchrun: rank {rank} {how}; the other ranks were stopped", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
