"""The low-latency protocol as planning knows it: whom it serves, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import flag_name
from ..schedule.kinds import Kind
from .passes import Pass

LOW_LATENCY = "low_latency"
# Of a gathered, or scattered, matrix: 1024 rows of 16384 features in bf16 (Llama-3 405B). Its words are twice as large, in each
# of three slots: 192 MiB. By the model NCCL is faster from a fifth of that on.
MOST_BYTES = 32 << 20
_WORD_BYTES, _DATA_BYTES = 8, 4  # of a word, and of its data


def flagged_bytes(received: int, world: int) -> int:
    """What W blocks of `received` bytes take as flagged words."""
    return world * -(-received // world // _DATA_BYTES) * _WORD_BYTES


def refusal(name: str, kind: Kind, nbytes: int) -> str | None:
    """Why the protocol does not serve passes of a kind whose words take so many bytes, or None. name: of the operator."""
    what = f"{name} with method={LOW_LATENCY!r}"
    if kind.exchanges:
        return f"{what}: it serves gathers and scatters, no all-to-alls; use 'auto' or 'direct' ({flag_name('method')})"
    most = flagged_bytes(MOST_BYTES, 1)
    if nbytes > most:
        return (
            f"{what}: what is gathered or scattered takes {nbytes / 2**20:.1f} MiB as words with flags, at most "
            f"{most >> 20} are served, since it sends twice the bytes and pays below about 4 MiB; use 'auto' or 'direct' "
            f"({flag_name('method')})"
        )
    return None


def serves(pass_: Pass) -> bool:
    """Whether the protocol serves a pass."""
    received = pass_.m * pass_.row_features * pass_.dtype.itemsize
    return refusal("", pass_.kind, flagged_bytes(received, pass_.world)) is None


def serving(methods: Iterable[str], pass_: Pass) -> list[str]:
    """Those of the given methods that serve a pass: all, but for the low-latency protocol where it does not."""
    return [method for method in methods if method != LOW_LATENCY or serves(pass_)]
