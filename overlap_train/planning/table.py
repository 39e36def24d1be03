"""Measured winners: in memory, and in one JSON file for each key. Rank 0 of a group reads it for all of its ranks.

A file is {"key": {...}, "winners": [...]}. The key has the fields of `Key`, but for those of LEFT_OUT that have the value there.
Each winner has the pass that was measured (kind, dtype, m, n, k), the method that won, and ms: the time of each method and
variant that ran.

A file is replaced as a whole (os.replace): a reader sees the old or the new one, never a part. Two tuners that write the
same file at once both leave a whole file; the later one may leave out what the earlier one has just added.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import flag_name
from ..methods import TRAITS
from ..select.passes import KINDS, Bucket, Pass, dtype_name
from ..warn import warn_user
from .table_key import LEFT_OUT, Key
from .variants import PLAIN, VARIANTS, Variant

SAME = 0.02  # by so much two measurements of one thing differ


@dataclass(frozen=True)
class Winner:
    """The method to take for all passes of a bucket.

    ms: of each method that ran, and of each variant in which the tuner ran it (`Variant.named`), for the pass that was measured.
    A trial has no variants: each method ran in the model's, and has one time, under its own name.
    """

    measured: Pass
    method: str
    ms: Mapping[str, float]

    def variant_of(self, method: str) -> Variant | None:
        """The fastest variant of a method, by more than noise; None where fewer than two were measured."""
        measured = {variant: self.ms[variant.named(method)] for variant in VARIANTS if variant.named(method) in self.ms}
        if len(measured) < 2 or PLAIN not in measured:
            return None
        fastest = min(measured, key=lambda variant: measured[variant])
        return fastest if measured[fastest] < (1 - SAME) * measured[PLAIN] else PLAIN


@dataclass(frozen=True)
class Table:
    """The winners of one key, by bucket."""

    winners: Mapping[Bucket, Winner]
    nodes: int = 1

    def find(self, pass_: Pass) -> Winner | None:
        """The winner for a pass, or None."""
        return self.winners.get(pass_.bucket)


UNTUNED = Table({})


def path_of(folder: str, key: Key) -> Path:
    """The file that holds the winners of a key. Raises FileNotFoundError for a user without a home folder."""
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", folder)
    return Path(found, key.file_name)


def read(folder: str, key: Key) -> Table:
    """The table in a folder; without winners where there is no file, or none that can be used, which is a warning."""
    try:
        return _read(path_of(folder, key), key)
    except FileNotFoundError:
        return Table({}, key.nodes)
    except OSError as error:
        _warn(path_of(folder, key), error)
        return Table({}, key.nodes)


def _read(path: Path, key: Key) -> Table:
    """The table in a file; without winners where it is damaged, which is a warning. Raises OSError."""
    try:
        return _from_document(json.loads(path.read_text()), key)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _warn(path, error)
        return Table({}, key.nodes)


def _warn(path: Path, error: Exception) -> None:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    warn_user(
        f"{path} cannot be used ({why}), so method=auto takes its defaults: delete the file and run overlap-train tune "
        f"again, or name another folder ({flag_name('tuning_dir')})"
    )


def save(folder: str, key: Key, winners: Iterable[Winner]) -> Path:
    """Add winners to those in the folder, in place of older ones of the same bucket.

    A damaged file is replaced. One that cannot be read is kept: what others have measured would be lost. Raises OSError.
    """
    path = path_of(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        there = _read(path, key).winners
    except FileNotFoundError:
        there = {}
    merged = {**there, **{winner.measured.bucket: winner for winner in winners}}
    document = {"key": key.as_dict(), "winners": [_to_entry(winner) for winner in merged.values()]}
    # On the same file system; unique over the hosts that share it; not of tempfile, whose files only their owner may read.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _to_entry(winner: Winner) -> dict[str, Any]:
    p = winner.measured
    shape = {"kind": p.kind, "dtype": dtype_name(p.dtype), "m": p.m, "n": p.n, "k": p.k}
    return {**shape, "method": winner.method, "ms": dict(winner.ms)}


def _from_document(document: dict[str, Any], key: Key) -> Table:
    """Raises ValueError, KeyError, TypeError or AttributeError for anything that `save` does not write."""
    found = LEFT_OUT | document["key"]
    if found != asdict(key):
        raise ValueError(f"it was measured with {found}, this is {asdict(key)}")
    winners = [_from_entry(entry, key.world) for entry in document["winners"]]
    return Table({winner.measured.bucket: winner for winner in winners}, key.nodes)


def _from_entry(entry: dict[str, Any], world: int) -> Winner:
    kind, dtype, method = entry["kind"], getattr(torch, entry["dtype"]), entry["method"]
    m, n, k = (int(entry[name]) for name in ("m", "n", "k"))
    known = kind in KINDS and method in TRAITS and isinstance(dtype, torch.dtype)
    if not known or min(m, n, k) < 1:
        raise ValueError(f"unknown entry {entry}")
    ms = {str(name): float(value) for name, value in entry["ms"].items()}
    return Winner(Pass(kind, m, n, k, dtype, world), method, ms)
