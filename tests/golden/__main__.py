"""Record what operators return: `python -m tests.golden` into results.json, which tests hold every change to; with
`--noise FILE.json` for normally distributed inputs, to compare two checkouts on one machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.golden.test_golden import RECORD, measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--noise", metavar="FILE.json", type=Path, help="normally distributed inputs, into this file")
    noise = parser.parse_args().noise
    found, into = measured(noise is not None), noise or RECORD
    into.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} cases recorded in {into}")


if __name__ == "__main__":
    main()
