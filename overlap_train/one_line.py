"""Commands whose wrong arguments are one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are raised, for the command to print, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")
