"""The low-latency protocol as planning knows it: whom it serves, what memory it takes, and where it pays."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import flag_name
from ..schedule.order import EXCHANGES
from .passes import Pass

LOW_LATENCY = "low_latency"
# Of a gathered, or scattered, matrix: 1024 rows of 16384 features in bf16 (Llama-3 405B). Its words are twice as large, in each
# of three slots: 192 MiB. By the model NCCL is faster from a fifth of that on.
MOST_BYTES = 32 << 20
# (M, bytes that a rank sends): where both are at most these, `auto` takes it. Over NCCL + cuBLAS it is 1.03 to 1.60 times as
# fast at M = 128 and 256, 1.24 in the mean (direct 0.96), with 4 MiB 1.00 to 1.03. At M = 512 it is 1.11 to 1.24 with 2 MiB
# (direct 0.84 to 1.24), and 0.99 to 1.05 with 4 MiB (direct 1.10 to 1.23; 2 x H200, 71af3f09, benchmarks/h200x2/small_m).
PAYS = ((256, 4 << 20), (512, 2 << 20))
_WORD_BYTES, _DATA_BYTES = 8, 4  # of a word, and of its data


def flagged_bytes(received: int, world: int) -> int:
    """What W blocks of `received` bytes take as flagged words."""
    return world * -(-received // world // _DATA_BYTES) * _WORD_BYTES


def refusal(name: str, kind: str, nbytes: int) -> str | None:
    """Why the protocol does not serve passes of a kind whose words take so many bytes, or None. name: of the operator."""
    what = f"{name} with method={LOW_LATENCY!r}"
    if kind in EXCHANGES:
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


def pays(pass_: Pass) -> bool:
    """Whether untuned `auto` takes the protocol for a pass."""
    sent = (pass_.world - 1) * (pass_.m // pass_.world) * pass_.row_features * pass_.dtype.itemsize
    few = any(pass_.m <= rows and sent <= most for rows, most in PAYS)
    return few and pass_.world > 1 and serves(pass_)
